"""``repertory list``: what there is to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import agents
from agents import presets
from agents.commands.options import parse


@dataclass(frozen=True)
class ListOptions:
    """Lists agents, environments, engines and presets."""


def main(arguments: Sequence[str]) -> int:
    parse(ListOptions, arguments, prog="repertory list")
    print(text())
    return 0


def text() -> str:
    """What ``repertory list`` prints."""
    from framework.environments import suites
    from launch.engines.base import engine_names

    width = max(len(name) for name in agents.REGISTRY)
    lines = ["agents"]
    lines += [f"  {entry.name:<{width}}  {entry.summary}" for entry in agents.REGISTRY.values()]
    lines += ["", "environments"]
    lines += [f"  {suite}:NAME  such as {suite}:{example}" for suite, example in suites.EXAMPLES.items()]
    lines += ["", "engines", *(f"  {name}" for name in engine_names()), "", "presets"]
    lines += [f"  repertory train {agent} --environment {name}" for agent, name in presets.PRESETS]
    return "\n".join(lines)
