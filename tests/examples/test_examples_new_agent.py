"""The agent of docs/agents.md is built and learns something."""

import ast
import importlib.util
import pathlib
import re
import sys

import pytest

from framework import core, learners, networks, programs, replay, specs, torch_agents, types
from framework.runs import presets

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
    curve, _ = blocks_of_the_guide()[1]
    names = {}
    exec(curve, names)
    # An evaluation comes at the first step of all envs that is past 5,000, another at the end.
    assert [row["env_steps"] // 1_000 for row in names["rows"]] == [5, 6]
    assert (tmp_path / "curve.png").stat().st_size > 1_000


GUIDE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
MODULES = (core, learners, networks, programs, presets, replay, specs, torch_agents, types)


def names_of_the_guide():
    """What the table of names says an author must know."""
    table = GUIDE.split("## The names")[1].split("Networks (`framework")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def test_a_new_agent_needs_25_names():
    names = names_of_the_guide()
    assert 20 <= len(names) == len(set(names)) <= 25
    for name in names:
        owner, _, member = name.partition(".")
        found = [getattr(module, owner) for module in MODULES if hasattr(module, owner)]
        assert found, name
        assert not member or hasattr(found[0], member), name


def test_the_example_needs_no_other_names():
    """Classes and functions it imports from the framework, and methods it overrides."""
    example = ast.parse((ROOT / "examples" / "new_agent.py").read_text(encoding="utf-8"))
    known = {name.rpartition(".")[2] for name in names_of_the_guide()} | {"Nest", "losses", "networks"}
    for node in ast.walk(example):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("framework"):
            assert {alias.name for alias in node.names} <= known
        if isinstance(node, ast.ClassDef) and not node.name.endswith(("Config", "Networks")):
            defined = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            assert defined - {"__init__"} <= known


def blocks_of_the_guide():
    """Blocks of Python before the section on the learning curve, and in it."""
    return [re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in GUIDE.split("## 7. A learning")]


def test_the_blocks_of_the_guide_are_the_example():
    example = (ROOT / "examples" / "new_agent.py").read_text(encoding="utf-8")
    shown = [line for block in blocks_of_the_guide()[0] for line in block.splitlines() if line]
    source = example.split('"""', 2)[2]  # but for the docstring
    assert shown == [line for line in source.splitlines() if line]
