"""Notices that the actors and the learner of a program wait for each other without an end."""

from __future__ import annotations

import time
from collections.abc import Callable

# Longer than clients wait for a replay server that is restarted.
PATIENCE_S = 45.0
_RECENT_S = 10.0  # actors that wait ask every half second


class StallDetector:
    """For agents whose actors follow the learner in step.

    An actor waits for parameters when all that it made is in replay, and the learner makes them of what all
    actors have made. So if every actor waits, and the learner waits for data, some of that data was lost:
    with a replay server that was restarted, or with a learner that had sampled it and was killed. The
    program would never go on:

    ```text
    actor-0   |unroll 3|..............................|unroll 3 again|
    actor-1   |unroll 3|..............................|unroll 3 again|
    replay         lost ^                   patience ^
    learner   .......................................................|step 4|
    ```

    Not thread-safe.

    Args:
      num_actors: how many there are.
      patience: seconds for which they must all have waited.
      clock: seconds, for tests.
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
        """Notes that there are new parameters."""
        self._asked.clear()
        self._since = None

    def asked(self, actor: str) -> bool:
        """Notes that `actor` waits while the learner does. Returns whether all have waited for too long."""
        now = self._clock()
        self._asked[actor] = now
        self._asked = {each: at for each, at in self._asked.items() if now - at <= _RECENT_S}
        if len(self._asked) < self._num_actors:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._patience
