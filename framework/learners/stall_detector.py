"""Detects lost data where the policy lag is limited."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds that a stall must last. Longer than clients wait for a restarted replay server.
PATIENCE_S = 45.0
_RECENT_S = 10.0  # Actors that wait ask every half second.


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
