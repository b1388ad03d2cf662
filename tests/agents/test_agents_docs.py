"""Pages hold every field of their agent's config, with default and comment; files of agents are short."""

import pathlib

import pytest
from config_fields import fields_table

from framework.programs import RunConfig
from framework.programs.registry import find_agent

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "agents"
NAMES = (
    "a2c",
    "apex",
    "appo",
    "batch_ppo",
    "c51",
    "d4pg",
    "ddpg",
    "dqfd",
    "dqn",
    "impala",
    "iqn",
    "maml",
    "mpo",
    "ppo",
    "ppo_dqn",
    "qr_dqn",
    "r2d2",
    "rainbow",
    "recurrent_td3",
    "sac",
    "td3",
    "td7",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_holds_every_field(name):
    table = fields_table(type(find_agent(name).make_config()))
    assert table.count("\n") > 15 and not any(line.endswith("|  |") for line in table.splitlines())
    assert table in (PAGES / f"{name}.md").read_text(encoding="utf-8"), (
        f"docs/agents/{name}.md lacks\n{table}"
    )


def test_the_settings_of_a_run_are_those_of_the_source():
    table = fields_table(RunConfig)
    assert not any(line.endswith("|  |") for line in table.splitlines())
    assert table in (PAGES.parent / "programs.md").read_text(encoding="utf-8"), (
        f"docs/programs.md lacks\n{table}"
    )


@pytest.mark.parametrize(
    "path", sorted((PAGES.parents[1] / "agents").glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_an_agent_is_a_file_of_at_most_300_lines_and_its_presets(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    presets = [number for number, line in enumerate(lines) if line.startswith("PRESETS")]
    assert (presets or [len(lines)])[0] <= 300
