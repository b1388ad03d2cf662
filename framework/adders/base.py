"""What every adder promises: experience of B envs in, replay items out."""

from __future__ import annotations

import abc
from typing import Any

from framework.types import Nest

# The tables that adders write to, and agents read from, unless they say otherwise: the one that is drawn from
# again and again, and the one whose items are learned from once.
REPLAY_TABLE = "replay"
QUEUE_TABLE = "queue"


class Adder(abc.ABC):
    """Turns the experience of the B envs of one batched environment into replay items.

    The order of the calls, for envs that reset themselves after their LAST step::

        timestep = environment.reset()                  # every env FIRST
        adder.add_first(timestep)
        while True:
            action, extras = policy(timestep.observation)
            timestep = environment.step(action)
            adder.add(action, timestep, extras)         # envs may be FIRST, MID or LAST

    An env whose `next_timestep` is FIRST has just been reset: its action was ignored by the environment,
    so it is no transition and starts an episode. Time steps have leaves `[B, ...]` and a `step_type` of
    `[B]`; a single `dm_env.TimeStep` (scalar `step_type`, leaves without an env axis) is a batch of
    one, and may come as Acme's adders expect it: `add_first` again after each LAST step.

    Everything is copied before the call returns. Items may be staged for a moment so that they are written in
    blocks; whoever reads through a client of the same process sees all of them.
    """

    @abc.abstractmethod
    def add_first(self, timestep: Any) -> None:
        """Starts an episode in every env; episodes that are open are closed as if truncated there.

        Raises:
          ValueError: if an env's time step is not FIRST.
        """

    @abc.abstractmethod
    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        """Adds what `action`, chosen from the newest observation, led to.

        Args:
          action: nest of `[B, ...]`.
          next_timestep: what the environment answered. FIRST starts an episode in that env.
          extras: nest of `[B, ...]` that belongs to the time of `action` (a log-probability, a recurrent
            state before the action); `()`, `{}` and None mean that there are none.

        Raises:
          ValueError: before `add_first`; in an env whose episode is over and whose time step is not FIRST;
            for a leaf with another shape or dtype than before. Nothing is added then.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Drops what is not yet written of the open episodes; `add_first` comes next."""

    @abc.abstractmethod
    def ready(self) -> bool:
        """Whether no item waits for room in its table and every table takes at least one more.

        Where nothing else runs (the serial engine), items of the next step that find no room wait in the
        writer, and `ready()` is False until they are in their tables.
        """

    @abc.abstractmethod
    def flush(self, timeout: float | None = None) -> None:
        """Waits until the tables have all items. `timeout` in seconds; None waits without a limit."""

    @abc.abstractmethod
    def close(self, timeout: float | None = None) -> int:
        """Flushes, ends the writer and gives its rows back; returns how many items were dropped."""
