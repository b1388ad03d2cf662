"""Which actors a batch waits for where the policy lag is limited, and what if data was lost."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds that a stall must last. Longer than clients wait for a restarted replay server.
PATIENCE_S = 45.0
_RECENT_S = 10.0  # Actors that wait ask every half second.


class Roster:
    """The actors from whose data an elastic learner makes its batches.

    An actor takes part from its `join` until it is lost. Version v + 1 is made from the unrolls that all of
    them collected for version v: a lost actor is not waited for, and one that joins during a learner step
    begins with the version that this step makes:

    ```text
    actor-0   |unroll 3|....|unroll 4|....|unroll 5|
    actor-1   |unroll 3|....|unr lost              join |unroll 6|
    learner            |step 4|      |step 5|      |step 6|
    envs of the batch     2             1             1
    ```

    A restarted actor has a new life. Late reports of a lost life are ignored. A report of an unknown life
    means that the learner was restarted; it counts as a join.

    Not thread-safe.

    Args:
      least: number of actors without which no batch is made.
    """

    def __init__(self, least: int):
        self._least = least
        self._reported: dict[str, int] = {}
        self._lives: dict[str, str] = {}
        self._lost: set[str] = set()  # Lives.

    def __len__(self) -> int:
        return len(self._reported)

    def join(self, actor: str, version: int, life: str) -> None:
        """The `life` of `actor` takes part, with `version` as its first."""
        if life in self._lost:
            return
        if self._lives.get(actor, life) != life:
            self.lose(actor)
        self._lives[actor], self._reported[actor] = life, version

    def report(self, actor: str, version: int, life: str) -> None:
        """All unrolls of the `life` of `actor` for versions before `version` are in replay."""
        self.join(actor, version, life)

    def lose(self, actor: str) -> None:
        """`actor` is not waited for any more."""
        self._reported.pop(actor, None)
        if actor in self._lives:
            self._lost.add(self._lives.pop(actor))

    def is_complete(self, version: int) -> bool:
        """Whether all unrolls for `version` are in replay."""
        return len(self._reported) >= self._least and min(self._reported.values()) > version


class StallDetector:
    """Detects that the actors and the learner wait for each other because data was lost.

    An actor waits for new parameters when all its items are in replay, and the learner makes the parameters
    from the items of all actors. If every actor waits and the learner waits for data, some items were lost,
    either with a replay server that was restarted, or with a learner that sampled them and was killed.
    Without new data, the program never continues:

    ```text
    actor-0   |unroll 3|..............................|unroll 3 again|
    actor-1   |unroll 3|..............................|unroll 3 again|
    replay         lost ^                   patience ^
    learner   .......................................................|step 4|
    ```

    Not thread-safe.

    Args:
      num_actors: number of actors in the program.
      patience: seconds that all actors must have waited.
      clock: returns the time in seconds; replaced in tests.
    """

    def __init__(
        self, num_actors: int, patience: float | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._num_actors, self._clock = num_actors, clock
        self._patience = PATIENCE_S if patience is None else patience
        self._version = -1
        self._waits: dict[str, tuple[float, float]] = {}  # By actor: when it began to ask, and last asked.

    def asked(self, actor: str, version: int) -> bool:
        """Records that `actor` and the learner wait for a newer version than `version`.

        Returns:
          Whether all actors have waited for too long.
        """
        now = self._clock()
        if version != self._version:
            self._version, self._waits = version, {}
        began, last = self._waits.get(actor, (now, now))
        self._waits[actor] = (began if now - last <= _RECENT_S else now, now)
        return len(self._waits) == self._num_actors and all(
            now - last <= _RECENT_S and now - began >= self._patience for began, last in self._waits.values()
        )
