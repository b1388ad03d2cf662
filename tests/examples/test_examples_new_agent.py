"""The agent of docs/agents.md is built and learns something."""

import importlib.util
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_new_agent_learns():
    result = load("new_agent").main(max_actor_steps=6_000)
    # A random policy gets about 22, a policy that always pushes the same way about 9.
    assert result["actor_steps"] == 6_000 and result["episode_return"] > 60


def test_the_guide_shows_the_code_of_the_example():
    example = (ROOT / "examples" / "new_agent.py").read_text(encoding="utf-8")
    guide = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert block.strip() in example, f"docs/agents.md shows code that the example has not:\n{block}"
