"""The interface of adders: experience of B envs in, replay items out."""

from __future__ import annotations

import abc
from typing import Any

from framework.environments.rows import TimeStepRows
from framework.types import Nest

# The tables that adders write to and agents read from by default. Items of the first are sampled repeatedly;
# items of the second are sampled once.
REPLAY_TABLE = "replay"
QUEUE_TABLE = "queue"


class Adder(abc.ABC):
    """Turns the experience of the B envs of one batched environment into replay items.

    The order of calls, for envs that reset themselves after their LAST step:

    ```python
    timestep = environment.reset()                  # every env FIRST
    adder.add_first(timestep)
    while True:
        action, extras = policy(timestep.observation)
        timestep = environment.step(action)
        adder.add(action, timestep, extras)         # envs may be FIRST, MID or LAST
    ```

    An env whose `next_timestep` is FIRST has just been reset. The environment ignored its action, so the step
    is not a transition and starts an episode. Time steps have leaves `[B, ...]` and a `step_type` `[B]`. A
    single `dm_env.TimeStep` (scalar `step_type`, leaves without an env axis) is a batch of one. It may be
    added as Acme's adders expect it, with `add_first` after each LAST step.

    Each call copies its arguments before it returns. An adder stages time steps and writes their items in
    blocks; a reader with a client in the same process sees all items. No thread writes what is staged after
    the last call: see `flush_pending`.
    """

    @abc.abstractmethod
    def add_first(self, timestep: Any) -> None:
        """Starts an episode in every env. Open episodes end as if they were truncated there.

        Args:
          timestep: the time step of a reset, FIRST in every env.

        Raises:
          ValueError: An env's time step is not FIRST.
        """

    @abc.abstractmethod
    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        """Adds one step: an action and the time step that resulted from it.

        Args:
          action: nest of `[B, ...]`, chosen from the newest observation.
          next_timestep: the environment's answer to `action`. FIRST starts an episode in that env.
          extras: nest of `[B, ...]` that belongs to the time of `action`, such as a log-probability or the
            recurrent state before the action. `()`, `{}` and None mean that there are none.

        Raises:
          ValueError: `add_first` was not called, an env's episode is over and its time step is not FIRST, or
            the shape or dtype of a leaf differs from the first step's. The step is not added.
        """

    def time_step_rows(self) -> TimeStepRows | None:
        """Rows into which the environment may write the next time steps, which `add` then need not copy.

        They change when the adder replaces its arrays. None: `add` copies all.
        """
        return None

    def end_episodes(self) -> None:
        """Ends the open episodes as if they were truncated. Call `add_first` next.

        Without this call, the last items of episodes that do not continue wait for the next `add_first`. It
        has no effect if items continue into the next episode.
        """
        return

    @abc.abstractmethod
    def reset(self) -> None:
        """Drops the unwritten part of the open episodes. Call `add_first` next."""

    @abc.abstractmethod
    def ready(self) -> bool:
        """Returns whether no item waits for room in its table and every table can take at least one more.

        With a client that is not concurrent (the serial engine), items of the next step that find no room
        wait in the writer, and `ready()` is False until they are in their tables.
        """

    def room(self) -> int:
        """Returns how many steps, at least 1, can be added before `ready`, now True, must be asked again."""
        return 1

    def flush_pending(self, late: bool = False) -> None:
        """Hands staged time steps to replay, if the adder stages any, without waiting for room.

        Call it before a wait, or a pause, in which readers of other processes need them.

        Args:
          late: whether to do so only if the oldest of them has been staged for too long.
        """
        return

    def make_room(self) -> None:
        """Makes room for the next step, so that a later `add` does not raise `WouldBlockError`.

        Has an effect with a client that is not concurrent. With others, `add` itself waits for room.

        Raises:
          WouldBlockError: Items wait for room that only a reader in this thread can make.
        """
        return

    @abc.abstractmethod
    def flush(self, timeout: float | None = None) -> None:
        """Waits until the tables have all items.

        Args:
          timeout: seconds; None waits without a limit.

        Raises:
          DeadlineExceededError: Items still wait for room after `timeout` seconds.
        """

    @abc.abstractmethod
    def close(self, timeout: float | None = None) -> int:
        """Flushes, closes the writer and releases its rows.

        Args:
          timeout: seconds; None waits without a limit.

        Returns:
          The number of items that were dropped.
        """
