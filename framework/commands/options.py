"""Dataclasses as flags, with tyro: each field is a flag, and the comment after it is its help."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import tyro

from framework.programs.run_config import RunConfig

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The environment and the engine of `repertory train`."""

    environment: str = "gymnasium:CartPole-v1"  # Or dm_control:DOMAIN/TASK, atari:GAME, minatar:GAME.
    engine: str = "processes"  # Engine of the program: serial, threads, processes, ray, launchpad.
    restarts: int = 0  # How often each node may fail and be restarted before the run ends with its error.

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ValueError(f"restarts: got {self.restarts}, expected at least 0.")


# The defaults of `repertory train`, before the preset and the flags.
DEFAULTS = {"num_actors": 2, "envs_per_actor": 4, "max_env_steps": 100_000}


def parse(options: type[T], arguments: Sequence[str], prog: str) -> T:
    """Parses `arguments` into the dataclass `options`; invalid ones print the reason and exit with 2."""
    return tyro.cli(options, args=list(arguments), prog=prog, description=inspect.getdoc(options))


def parse_train(
    agent_config: Any, run: dict[str, Any], arguments: Sequence[str], prog: str, description: str
) -> tuple[TrainOptions, RunConfig, Any]:
    """Parses one flat set of flags into the options, the run's config and the agent's config.

    Args:
      agent_config: the agent's config with the defaults of its flags.
      run: fields of `RunConfig` that replace its defaults.
      arguments: the command line; invalid arguments print the reason and exit with 2.
      prog: the command, for the help.
      description: description of the command, for the help.
    """
    groups = {"options": TrainOptions(), "run": RunConfig(**{**DEFAULTS, **run}), "agent": agent_config}
    annotated: Any = Annotated  # these annotations are values
    members: list[Any] = [
        (name, annotated[type(group), tyro.conf.OmitArgPrefixes], group) for name, group in groups.items()
    ]
    flags = dataclasses.make_dataclass("Flags", members, frozen=True)
    parsed: Any = tyro.cli(flags, args=list(arguments), prog=prog, description=description)
    return parsed.options, parsed.run, parsed.agent
