"""Detects that the actors and the learner of a program wait for each other indefinitely."""

from __future__ import annotations

import time
from collections.abc import Callable

# Longer than clients wait for a restarted replay server.
PATIENCE_S = 45.0
_RECENT_S = 10.0  # Actors that wait ask every half second.


class StallDetector:
    """Detects lost data, for agents with a `max_policy_lag`.

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
        self._num_actors = num_actors
        self._patience = PATIENCE_S if patience is None else patience
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._since: float | None = None

    def moved(self) -> None:
        """Records that new parameters are published."""
        self._asked.clear()
        self._since = None

    def asked(self, actor: str) -> bool:
        """Records that `actor` and the learner wait. Returns whether all have waited for too long."""
        now = self._clock()
        self._asked[actor] = now
        self._asked = {each: at for each, at in self._asked.items() if now - at <= _RECENT_S}
        if len(self._asked) < self._num_actors:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._patience
