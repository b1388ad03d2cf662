"""BatchPPO: the page has the settings of its experiment."""

import ast
import pathlib
import re

from agents.batch_ppo import BatchPPOConfig


def test_the_page_has_the_settings():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "agents" / "batch_ppo.md").read_text(
        encoding="utf-8"
    )
    rows = [line for line in page.splitlines() if line.startswith("|")]
    settings = dict(re.findall(r"`(\w+)=([^`]+)`", "\n".join(rows)))
    assert len(settings) == 18
    config = BatchPPOConfig()
    assert {name: getattr(config, name) for name in settings} == {
        name: ast.literal_eval(text) for name, text in settings.items()
    }
