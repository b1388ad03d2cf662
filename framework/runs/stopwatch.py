"""Seconds of a run."""

from __future__ import annotations

import time


class Stopwatch:
    """Counts the seconds since it was made. It pauses while it is pickled, as in a `Snapshot`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._started = time.monotonic() - seconds

    def __reduce__(self) -> tuple:
        return Stopwatch, (self.seconds(),)

    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._started
