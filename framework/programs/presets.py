"""Settings that are known to work, for an agent in an environment.

They are at the end of an agent's file, as `PRESETS`, by the environment's name. `repertory train` starts from
the preset of its agent and environment. Flags override its values.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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


def presets_of(agent_class: type) -> Mapping[str, Preset]:
    """The presets of an agent by environment: `PRESETS` of its module, or empty without `PRESETS`."""
    return getattr(sys.modules[agent_class.__module__], "PRESETS", {})
