"""Settings that are known to work, for an agent in an environment.

They are at the end of an agent's file, as `PRESETS`, by the environment's name, or an attribute of its class.
`framework.train` and `repertory train` start from the preset of their agent and environment. What the user
gives overrides its values. A name may be a pattern:

```python
PRESETS = {
    "atari:Pong": Preset(agent={...}),
    "atari:*": Preset(agent={...}),                           # all other games
    "gymnasium:{Ant,Hopper}-v*": Preset(agent={...}),
}
```

A name without a colon, such as iqn's `beyond_the_rainbow`, is for `--preset` only.

An environment that no name matches gets the first preset of its family: one suite, or all robots of MuJoCo.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_ROBOTS = ["Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"]
_ROBOTS += ["InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"]
#: The pattern of all robots of MuJoCo in Gymnasium.
MUJOCO = f"gymnasium:{{{','.join(_ROBOTS)}}}-v*"
#: Patterns of the environments of which one's settings suit the others.
FAMILIES = (
    ("atari:*", "gymnasium:ALE/*"),
    ("minatar:*",),
    (MUJOCO, "dm_control:*"),
    ("minigrid:*",),
    ("tasks:*",),
    ("multi_agent:*",),
)
#: What a run of any agent begins with, before its preset.
DEFAULTS: Mapping[str, Any] = {"num_actors": 2, "envs_per_actor": 4, "max_env_steps": 100_000}
#: What a run that learns from a dataset has instead of what its preset says of actors and env steps.
OF_DATASETS: Mapping[str, Any] = {
    "num_actors": 1,
    "envs_per_actor": 1,
    "max_env_steps": None,
    "max_learner_steps": 100_000,
    "evaluate_period": "auto",
    "target_return": None,
}


#: How runs on Atari and on robots are made. Replay is large, so it is rarely saved.
ATARI_RUN: Mapping[str, Any] = {
    "num_actors": 1,
    "envs_per_actor": 8,
    "max_env_steps": 50_000_000,  # 200 million frames.
    "max_evaluation_steps": 27_000,  # Whole games.
    "evaluate_period": 1_000_000,
    "num_evaluation_episodes": 8,
    "learner_log_period": 10_000,
    "checkpoint_period": 1_000_000,
    "checkpoint_minutes": None,
    "keep_checkpoints": 1,
}
#: The same with the emulator of the papers until 2018, which ended episodes with a life.
ATARI_2015_RUN: Mapping[str, Any] = {
    **ATARI_RUN,
    "environment_options": {"sticky_actions": 0.0, "life_loss_terminates": True},
}
CONTROL_RUN: Mapping[str, Any] = {
    "num_actors": 1,
    "envs_per_actor": 1,
    "max_env_steps": 1_000_000,
    "evaluate_period": 50_000,
    "num_evaluation_episodes": 10,
}
#: The source of what no publication says.
HERE = "here"
_PUBLISHED = ("max_env_steps", "max_evaluation_steps", "environment_options")


@dataclass(frozen=True)
class Preset:
    """Differences from the default settings.

    Attributes:
      agent: fields of the agent's config.
      run: fields of `framework.programs.RunConfig`.
      source: publication of the fields of the agent, and of the run's length and environment.
      sources: names of other fields, separated by spaces, by their source.
    """

    agent: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    source: str = HERE
    sources: Mapping[str, str] = field(default_factory=dict)

    def by_source(self) -> dict[str, dict[str, Any]]:
        """All fields with their values, by source.

        Raises:
          ValueError: `sources` names no field of the preset.
        """
        found: dict[str, dict[str, Any]] = {self.source: {}}
        named = {name: source for source, names in self.sources.items() for name in names.split()}
        for name, value in {**self.agent, **self.run}.items():
            usual = self.source if name in self.agent or name in _PUBLISHED else HERE
            found.setdefault(named.pop(name, usual), {})[name] = value
        if named:
            raise ValueError(f"sources: got {sorted(named)}, expected fields of the preset.")
        return found


def presets_of(agent: Callable[..., Any]) -> Mapping[str, Preset]:
    """The presets of an agent's class or factory by environment: its own `PRESETS`, its module's, or none."""
    return getattr(agent, "PRESETS", getattr(sys.modules[agent.__module__], "PRESETS", {}))


def find_preset(agent: Callable[..., Any], environment: Any) -> tuple[Preset, str]:
    """The preset of an agent's class or factory for an environment, and a line if it is made for another.

    The settings for another environment lack its `target_return`. A callable has no preset.
    """
    known, name = presets_of(agent), str(environment)
    if environment is None:
        return Preset(), ""
    if name in known:
        return known[name], ""
    for pattern, preset in known.items():
        if _matches(name, (pattern,)):
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
    if name in patterns:
        return True
    return any(fnmatch.fnmatchcase(name, each) for pattern in patterns for each in _expanded(pattern))


def _expanded(pattern: str) -> list[str]:
    """The patterns that one with `{ONE,OTHER}` stands for."""
    parts = re.fullmatch(r"(.*)\{(.*)\}(.*)", pattern)
    return [parts[1] + each + parts[3] for each in parts[2].split(",")] if parts else [pattern]
