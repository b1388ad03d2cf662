"""Settings that are known to work, for an agent in an environment.

They are at the end of an agent's file, as `PRESETS`, by the environment's name, or an attribute of its class.
`repertory train` starts from the preset of its agent and environment. Flags override its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Differences from the default settings.

    Attributes:
      agent: fields of the agent's config.
      run: fields of `framework.programs.RunConfig`.
    """

    agent: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def presets_of(agent: Callable[..., Any]) -> Mapping[str, Preset]:
    """The presets of an agent's class or factory by environment: its own `PRESETS`, its module's, or none."""
    return getattr(agent, "PRESETS", getattr(sys.modules[agent.__module__], "PRESETS", {}))
