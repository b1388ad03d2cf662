"""`repertory list`: lists agents, environments, engines and presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from framework.commands.options import parse
from framework.environments import suites
from framework.programs.presets import presets_of
from framework.programs.registry import agent_names, find_agent
from launch.engines.base import engine_names


@dataclass(frozen=True)
class ListOptions:
    """Lists agents, environments, engines and presets."""


def main(arguments: Sequence[str]) -> int:
    parse(ListOptions, arguments, prog="repertory list")
    print(text())
    return 0


def text() -> str:
    """Returns the output of `repertory list`."""
    agents = [find_agent(name) for name in agent_names()]
    width = max((len(agent.name) for agent in agents), default=0)
    lines = ["agents"]
    lines += [f"  {agent.name:<{width}}  {agent.summary()}" for agent in agents]
    lines += ["", "environments"]
    lines += [f"  {suite}:NAME  such as {suite}:{example}" for suite, (_, example) in suites.SUITES.items()]
    lines += ["", "engines", *(f"  {name}" for name in engine_names()), "", "presets"]
    for agent in agents:
        lines += [f"  repertory train {agent.name} --environment {name}" for name in presets_of(agent.load())]
    return "\n".join(lines)
