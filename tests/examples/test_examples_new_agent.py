"""The agent of docs/agents.md is built and learns something."""

import importlib.util
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_the_new_agent_learns_and_its_curve_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    result = load("new_agent").main(max_env_steps=6_000, directory="run")
    # A random policy gets about 22, a policy that always pushes the same way about 9.
    assert result["env_steps"] == 6_000 and result["episode_return"] > 60
    (curve,) = blocks_of_the_guide()[1]
    names = {}
    exec(curve, names)
    # Evaluations come at the first step of all envs that is past each 2,000.
    assert [row["env_steps"] // 1_000 for row in names["rows"]] == [2, 4, 6]
    assert (tmp_path / "curve.png").stat().st_size > 1_000


def blocks_of_the_guide():
    """Blocks of Python before the section on the learning curve, and in it."""
    guide = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    return [re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in guide.split("## 7. A learning")]


def test_the_blocks_of_the_guide_are_the_example():
    example = (ROOT / "examples" / "new_agent.py").read_text(encoding="utf-8")
    shown = [line for block in blocks_of_the_guide()[0] for line in block.splitlines() if line]
    source = example.split('"""', 2)[2]  # but for the docstring
    assert shown == [line for line in source.splitlines() if line]
