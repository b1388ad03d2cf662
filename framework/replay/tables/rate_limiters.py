"""Rate limiters: when a table may be sampled from and inserted into, and the calls that wait for it.

With diff = inserts * samples_per_insert - samples and size = number of items in the table:

- a sample needs `size >= min_size_to_sample` and `diff - 1 >= min_diff`;
- an insert needs `size + 1 <= min_size_to_sample` or `diff + samples_per_insert <= max_diff`.

A request for several items goes through one item at a time, as far as the rule allows.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError

# The two sides of a table: calls of one wait for calls of the other.
SAMPLERS, INSERTERS = 0, 1

_MAX = sys.float_info.max
_NUMBERS = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff")


class RateLimiter:
    """The general limiter. It belongs to one table and holds that table's counters.

    Args:
      samples_per_insert: the ratio to keep, > 0.
      min_size_to_sample: number of items that the table must hold before any is sampled, >= 1.
      min_diff: lower end of the window of diff; the smaller it is, the further samples may run ahead.
      max_diff: upper end; the larger it is, the further inserts may run ahead.

    Attributes:
      inserts: number of items inserted so far. The table sets it.
      samples: number of samples drawn so far. The table sets it.
      size: number of items in the table. The table sets it.
      owner: name of the table that it belongs to; None before it belongs to one.
    """

    def __init__(self, samples_per_insert: float, min_size_to_sample: int, min_diff: float, max_diff: float):
        if not samples_per_insert > 0 or not math.isfinite(samples_per_insert):
            raise ValueError(f"samples_per_insert: got {samples_per_insert}, expected a number > 0.")
        if min_size_to_sample < 1:
            raise ValueError(f"min_size_to_sample: got {min_size_to_sample}, expected at least 1.")
        if not max_diff > min_diff:
            raise ValueError(f"min_diff, max_diff: got [{min_diff}, {max_diff}], expected min < max.")
        self.samples_per_insert = float(samples_per_insert)
        self.min_size_to_sample = int(min_size_to_sample)
        self.min_diff = float(min_diff)
        self.max_diff = float(max_diff)
        self.owner: str | None = None
        self.reset()

    @property
    def diff(self) -> float:
        """inserts * samples_per_insert - samples."""
        return self.inserts * self.samples_per_insert - self.samples

    def allowed_samples(self, n: int) -> int:
        """Returns how many of `n` samples are allowed, one after another, if none of them removes an item."""
        if self.size < self.min_size_to_sample:
            return 0
        diff = self.inserts * self.samples_per_insert - self.samples
        if diff - n >= self.min_diff:
            return n
        # A division would differ from the rule by rounding.
        return bisect.bisect_left(range(1, n), True, key=lambda k: diff - k < self.min_diff)

    def allowed_inserts(self, n: int) -> int:
        """Returns how many of `n` inserts are allowed, one after another."""
        ratio, room = self.samples_per_insert, self.max_diff
        if (self.inserts + n) * ratio - self.samples <= room:
            return n
        free = max(0, min(n, self.min_size_to_sample - self.size))
        return free + bisect.bisect_left(
            range(free + 1, n + 1),
            True,
            key=lambda k: (self.inserts + k) * ratio - self.samples > room,
        )

    def refusals(self) -> tuple[str, str]:
        """Returns why one sample, and why one insert, is refused: the rule with its numbers, or empty."""
        sample = insert = ""
        if self.size < self.min_size_to_sample:
            sample = f"size {self.size} < min_size_to_sample {self.min_size_to_sample}"
        elif not self.allowed_samples(1):
            sample = f"diff {self.diff:g} - 1 < min_diff {self.min_diff:g}"
        if not self.allowed_inserts(1):
            insert = f"diff {self.diff:g} + {self.samples_per_insert:g} > max_diff {self.max_diff:g}"
        return sample, insert

    def reset(self) -> None:
        """Sets the counters to 0."""
        self.inserts = self.samples = self.size = 0

    def copy(self) -> RateLimiter:
        """Returns a new limiter with the same numbers, which belongs to no table."""
        twin = copy.copy(self)
        twin.owner = None
        twin.reset()
        return twin

    def options(self) -> dict[str, Any]:
        """Returns the numbers that it was made with."""
        return {name: getattr(self, name) for name in _NUMBERS}

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:g}" for name, value in self.options().items())
        return f"{type(self).__name__}({numbers})"


class MinSize(RateLimiter):
    """Sampling waits until the table holds `min_size_to_sample` items; nothing else ever waits."""

    def __init__(self, min_size_to_sample: int):
        super().__init__(1.0, min_size_to_sample, -_MAX, _MAX)


class SampleToInsertRatio(RateLimiter):
    """Keeps samples / inserts near `samples_per_insert`.

    Args:
      samples_per_insert: average number of times that an item is sampled.
      min_size_to_sample: number of items before sampling begins.
      error_buffer: how far the two sides may drift apart, in samples. A number b stands for the window
        `(samples_per_insert * min_size_to_sample - b, samples_per_insert * min_size_to_sample + b)`; a pair
        is the window itself.
    """

    def __init__(
        self, samples_per_insert: float, min_size_to_sample: int, error_buffer: float | tuple[float, float]
    ):
        center = samples_per_insert * min_size_to_sample
        if isinstance(error_buffer, Sequence):
            low, high = error_buffer
        else:
            low, high = center - error_buffer, center + error_buffer
        super().__init__(samples_per_insert, min_size_to_sample, low, high)
        narrowest = 2 * max(1.0, samples_per_insert)
        if not high - low >= narrowest or low > center:
            raise ValueError(
                f"error_buffer: got the window [{low}, {high}], expected a width of at least 2 * max(1, "
                f"samples_per_insert) = {narrowest} and a lower end of at most samples_per_insert * "
                f"min_size_to_sample = {center}. Otherwise it blocks one side or both."
            )
        if high < center:
            text = f"error_buffer: got the upper end {high}, expected at least the center {center}"
            advice = "inserts stop when the table reaches its minimum size, until enough is sampled"
            logging.getLogger(__name__).warning("%s: %s.", text, advice)


class Queue(RateLimiter):
    """Every item is sampled once: inserts wait while `size` items are to be sampled."""

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"size: got {size}, expected at least 1.")
        super().__init__(1.0, 1, 0.0, float(size))


class Stack(Queue):
    """The same rule as `Queue`. The selectors determine the order."""


class Change:
    """Marks a table while it changes. The mark stays after an interrupt, which may leave half a change.

    Attributes:
      open: whether the table is being changed.
    """

    open = False

    def __enter__(self) -> None:
        self.open = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.open = kind is not None and not issubclass(kind, Exception)


class Waiting:
    """The calls of a table that its rate limiter holds back; a `side` is `SAMPLERS` or `INSERTERS`.

    Args:
      table: name of the table.
      lock: guards the table. The caller holds it where the method says so.

    Attributes:
      limiter: the rate limiter.
      concurrent: whether other threads use the table. If not, a call that would wait raises
        `WouldBlockError`.
      counts: number of calls that wait, by side, other processes' included.
      seconds: how long the calls of a side have waited. If calls of other processes wait for one another,
        only the first one counts.
      listeners: called, with the lock held, when calls of other processes should look again.
      closed: why the table is closed; None if it is not.
      change: surrounds every change of the table.
      look_s: seconds after which a call that waits looks again, though nothing has woken it: an adder of
        this process may have staged more.
    """

    look_s = 0.05

    def __init__(self, table: str, limiter: RateLimiter, lock: threading.Lock) -> None:
        self.limiter = limiter
        self.concurrent = True
        self.counts = [0, 0]
        self.seconds = [0.0, 0.0]
        self.listeners: list[Callable[[], None]] = []
        self.closed: str | None = None
        self.change = Change()
        self._table = table
        self._lock = lock
        self._conditions = [threading.Condition(lock) for _ in range(2)]

    def check_open(self) -> None:
        """Raises `ServerClosed` if the table is closed or broken. Called with the lock held."""
        if self.closed is not None:
            raise ServerClosed(self.closed)
        if self.change.open:
            raise ServerClosed(
                f"table {self._table!r}: got a call after an interrupt in the middle of a change, expected a "
                "whole table. Make new tables, and restore a checkpoint."
            )

    def close(self) -> None:
        """Ends every call that waits, and every later one, with `ServerClosed`."""
        self.closed = f"table {self._table!r}: the server was stopped"
        self.wake()

    def wake(self) -> None:
        """Makes calls that wait look at their `cancelled` again."""
        with self._lock:
            self.notify(SAMPLERS)
            self.notify(INSERTERS)

    def count(self, side: int, change: int, seconds: float = 0.0) -> None:
        """Counts a call that begins (1) or stops (-1) waiting, and how long one of another process waited."""
        with self._lock:
            self.counts[side] += change
            self.seconds[side] += seconds

    @contextlib.contextmanager
    def counted(self, side: int) -> Iterator[None]:
        """Surrounds a call that may wait."""
        self.count(side, 1)
        try:
            yield
        finally:
            self.count(side, -1)

    def notify(self, side: int) -> None:
        """Wakes the calls of `side`, which may go through now. Called with the lock held."""
        if self.counts[side]:
            self._conditions[side].notify_all()
            for listener in self.listeners:
                listener()

    def wait(
        self, side: int, n: int, done: int, deadline: float | None, cancelled: Callable[[], bool] | None
    ) -> None:
        """Waits until the other side has done something, or for some seconds.

        Called with the lock held, in `counted`.

        Args:
          side: the side of the call.
          n: number of items of the call.
          done: number of them that went through.
          deadline: time at which the call fails; None for no limit.
          cancelled: the call fails once it returns True.
        """
        self.check_open()
        if cancelled is not None and cancelled():
            raise ServerClosed(f"table {self._table!r}: the client was interrupted")
        begin = time.monotonic()
        expired = deadline is not None and begin >= deadline
        if expired or not self.concurrent:
            text = self.refusal(side, n, done)
            if expired:
                raise DeadlineExceededError(f"{text}; the timeout expired")
            raise WouldBlockError(f"{text}; nothing else runs in this thread, so the wait would never end")
        try:
            left = self.look_s if deadline is None else min(self.look_s, deadline - begin)
            self._conditions[side].wait(left)
        finally:
            self.seconds[side] += time.monotonic() - begin

    def refusal(self, side: int, n: int, done: int) -> str:
        """Returns why a call for `n` items, of which `done` went through, cannot go on."""
        why = self.limiter.refusals()[side] or "no item is left to sample"
        verb = ("sample", "insert")[side]
        return f"table {self._table!r}: cannot {verb} {n} items ({done} went through): {why}"
