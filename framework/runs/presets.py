"""Settings that are known to work, for an agent in an environment.

They are at the end of an agent's file, as `PRESETS`, by the environment's name, or an attribute of its class.
`framework.train` and `repertory train` start from the preset of their agent and environment. What the user
gives overrides its values. A name may be a pattern:

```python
PRESETS = {
    "atari:Pong": Preset(agent={...}),
    "atari:*": Preset(agent={...}),                           # all other games
}
```

An environment that no name matches gets the first preset of its family: one suite, or all robots of MuJoCo.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_ROBOTS = ["Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"]
_ROBOTS += ["InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"]
#: Patterns of the environments of which one's settings suit the others.
FAMILIES = (
    ("atari:*", "gymnasium:ALE/*"),
    ("minatar:*",),
    (*(f"gymnasium:{name}-v*" for name in _ROBOTS), "dm_control:*"),
    ("minigrid:*",),
    ("tasks:*",),
    ("multi_agent:*",),
)
#: What a run of any agent begins with, before its preset.
DEFAULTS: Mapping[str, Any] = {"num_actors": 2, "envs_per_actor": 4, "max_env_steps": 100_000}


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


def find_preset(agent: Callable[..., Any], environment: Any) -> tuple[Preset, str]:
    """The preset of an agent's class or factory for an environment, and a line if it is made for another.

    The settings for another environment lack its `target_return`. A callable has no preset.
    """
    known, name = presets_of(agent), str(environment)
    if name in known:
        return known[name], ""
    for pattern, preset in known.items():
        if fnmatch.fnmatchcase(name, pattern):
            return preset, ""
    shown = name if isinstance(environment, str) else getattr(environment, "__qualname__", "an environment")
    who = f"{getattr(agent, '__name__', agent)} has no preset for {shown}"
    family = next((family for family in FAMILIES if _matches(name, family)), ())
    for other, preset in known.items():
        if _matches(other, family):
            run = {key: value for key, value in preset.run.items() if key != "target_return"}
            return Preset(preset.agent, run), f"{who}: it begins with the preset for {other}."
    return Preset(), f"{who}: it begins with the default settings." if known else ""


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
