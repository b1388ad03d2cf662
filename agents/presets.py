"""Settings that are known to work, for an agent in an environment.

``repertory train AGENT --environment NAME`` starts from them; any flag overrides its value. They are in the
agents' own files, at the end: ``PRESETS``, by the environment's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import agents


@dataclass(frozen=True)
class Preset:
    """Differences from the defaults.

    Attributes:
      agent: fields of the agent's config.
      run: fields of `framework.programs.RunConfig`.
    """

    agent: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def of_agent(agent: str) -> Mapping[str, Preset]:
    """The presets of an agent by environment, none if its file has none; ValueError if there is no agent."""
    return getattr(importlib.import_module(agents.find(agent).module), "PRESETS", {})


def find(agent: str, environment: str) -> Preset:
    """The preset of this pair; an empty one if there is none. ValueError if there is no such agent."""
    return of_agent(agent).get(environment, Preset())


def __getattr__(name: str) -> Any:
    """``PRESETS``: all of them, by agent and environment. Made when asked for, as that imports the agents."""
    if name != "PRESETS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return {
        (agent, environment): preset
        for agent in agents.REGISTRY
        for environment, preset in of_agent(agent).items()
    }
