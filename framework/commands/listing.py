"""`repertory list`: lists agents, environments, engines, parts and presets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from framework.commands.options import parse
from framework.environments import suites
from framework.runs import parts
from framework.runs.presets import presets_of
from framework.runs.registry import agent_names, find_agent
from launch.engines.base import ENGINES
from launch.texts import printable


@dataclass(frozen=True)
class ListOptions:
    """Lists agents, environments, engines, parts and presets, and says which of them lack a package."""


def main(arguments: Sequence[str]) -> int:
    parse(ListOptions, arguments, prog="repertory list")
    print(printable(text()))
    return 0


def _example(pattern: str) -> str:
    """A name that a preset's pattern matches: the first of `{ONE,OTHER}`, version 5, any NAME."""
    if ":" not in pattern:
        return f"SUITE:NAME --preset {pattern}"
    return re.sub(r"\{([^,]*).*\}", r"\1", pattern).replace("-v*", "-v5").replace("*", "NAME")


def text() -> str:
    """Returns the output of `repertory list`."""
    width = max(map(len, agent_names()), default=0)
    agents, presets, found = ["agents"], ["presets"], dict[str, Any]()
    for name in agent_names():
        try:
            found[name] = find_agent(name).load()
        except ValueError as error:
            agents.append(f"  {name:<{width}}  cannot be used: {error}")
    names = {agent: name for name, agent in found.items()}
    for name, agent in found.items():
        bases = ", ".join(names[base] for base in getattr(agent, "__mro__", ())[1:] if base in names)
        agents.append(f"  {name:<{width}}  {find_agent(name).summary()}{bases and f' (on {bases})'}")
        presets += [f"  repertory train {name} --environment {_example(of)}" for of in presets_of(agent)]
    environments = ["environments"]
    for name, suite in suites.SUITES.items():
        environments.append(f"  {name}:NAME  such as {name}:{suite.example}{_lacks(name)}")
    for name, target in suites.registered().items():
        environments.append(f"  {name}:NAME  of {target}")
    engines = ["engines", *(f"  {name}{_lacks(name)}" for name in ENGINES)]
    named = {"wrappers": parts.WRAPPERS, "observers": parts.OBSERVERS, "loggers": parts.LOGGERS}
    others = [[kind, *(f"  {name}{_lacks(name)}" for name in names)] for kind, names in named.items()]
    return "\n\n".join("\n".join(part) for part in (agents, environments, engines, *others, presets))


def _lacks(name: str) -> str:
    advice = parts.missing(name)
    return "" if advice is None else f"  (not installed: {advice})"
