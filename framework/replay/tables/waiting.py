"""The lock of a table and those who wait for it to change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SAMPLERS, INSERTERS = 0, 1


class Waiting:
    """Waiting calls on two sides, `SAMPLERS` and `INSERTERS`. `wait` and `notify` need `lock` held.

    Attributes:
      lock: guards the whole table.
      counts: how many calls of each side wait now, those of other processes included.
      seconds: for how long the calls of each side have waited.
      listeners: called with the lock held when a side that waits should look again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts = [0, 0]
        self.seconds = [0.0, 0.0]
        self.listeners: list[Callable[[], None]] = []
        self._conditions = [threading.Condition(self.lock) for _ in range(2)]

    def wait(self, side: int, deadline: float | None) -> None:
        """Returns after a `notify`, at the deadline, or after a few seconds: the caller looks again."""
        begin = time.monotonic()
        self.counts[side] += 1
        try:
            # An upper bound on a single wait keeps Ctrl-C working.
            self._conditions[side].wait(5.0 if deadline is None else min(5.0, deadline - begin))
        finally:
            self.counts[side] -= 1
            self.seconds[side] += time.monotonic() - begin

    def notify(self, side: int) -> None:
        """The table has changed so that calls of `side` may go through."""
        if self.counts[side]:
            self._conditions[side].notify_all()
            for listener in self.listeners:
                listener()

    def wake(self) -> None:
        """Makes every call that waits look again. The lock is not held."""
        with self.lock:
            self.notify(SAMPLERS)
            self.notify(INSERTERS)
