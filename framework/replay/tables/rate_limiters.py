"""Rate limiters: when a table may be sampled from and inserted into.

With diff = inserts * samples_per_insert - samples and size = items in the table:

- sampling one needs `size >= min_size_to_sample` and `diff - 1 >= min_diff`;
- inserting one is free while `size + 1 <= min_size_to_sample`, else needs
`diff + samples_per_insert <= max_diff`.

Requests for several go through one by one as far as the rule allows.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

_MAX = sys.float_info.max


def _most(n: int, may: Callable[[int], bool]) -> int:
    """The largest number up to `n` that `may` allows; the rules are monotone: once one refuses, it goes on
    to."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if may(middle) else (low, middle)
    return low


class RateLimiter:
    """The general limiter; it belongs to one table and holds that table's counters.

    Args:
      samples_per_insert: the ratio to keep, > 0.
      min_size_to_sample: items the table must hold before any is sampled, >= 1.
      min_diff: lower end of the window of diff; the smaller, the further samples may run ahead.
      max_diff: upper end; the larger, the further inserts may run ahead.
    """

    def __init__(self, samples_per_insert: float, min_size_to_sample: int, min_diff: float, max_diff: float):
        if not samples_per_insert > 0 or not math.isfinite(samples_per_insert):
            raise ValueError(f"samples_per_insert: got {samples_per_insert}, expected a number > 0")
        if min_size_to_sample < 1:
            raise ValueError(f"min_size_to_sample: got {min_size_to_sample}, expected at least 1")
        if not max_diff > min_diff:
            raise ValueError(
                f"min_diff, max_diff: got [{min_diff}, {max_diff}], expected a window that is not empty"
            )
        self.samples_per_insert = float(samples_per_insert)
        self.min_size_to_sample = int(min_size_to_sample)
        self.min_diff = float(min_diff)
        self.max_diff = float(max_diff)
        self.inserts = 0
        self.samples = 0
        self.size = 0  # items in the table, which keeps it
        self._owner: str | None = None

    @property
    def diff(self) -> float:
        """inserts * samples_per_insert - samples."""
        return self.inserts * self.samples_per_insert - self.samples

    def bind(self, table: str) -> None:
        """Called by the table that owns this limiter; ValueError if another one does already."""
        if self._owner is not None:
            raise ValueError(
                f"rate_limiter: got one that belongs to table {self._owner!r} already, expected a new "
                "one for table "
                f"{table!r}; make one limiter per table"
            )
        self._owner = table

    def can_sample(self, n: int) -> bool:
        """Whether `n` may be sampled now, if none of them removes an item."""
        diff = self.inserts * self.samples_per_insert - self.samples
        return self.size >= self.min_size_to_sample and diff - n >= self.min_diff

    def can_insert(self, n: int) -> bool:
        """Whether `n` may be inserted now."""
        return (
            self.size + n <= self.min_size_to_sample
            or (self.inserts + n) * self.samples_per_insert - self.samples <= self.max_diff
        )

    def allowed_samples(self, n: int) -> int:
        """How many of `n` may be sampled one after another, if none of them removes an item."""
        return n if self.can_sample(n) else _most(n, self.can_sample)

    def allowed_inserts(self, n: int) -> int:
        """How many of `n` may be inserted one after another."""
        return n if self.can_insert(n) else _most(n, self.can_insert)

    def why_not_sample(self, n: int = 1) -> str:
        """Empty if `n` may be sampled, else the rule that refuses, with its numbers."""
        if self.can_sample(n):
            return ""
        if self.size < self.min_size_to_sample:
            return f"size {self.size} < min_size_to_sample {self.min_size_to_sample}"
        return f"diff {self.diff:g} - {n} < min_diff {self.min_diff:g}"

    def why_not_insert(self, n: int = 1) -> str:
        """Empty if `n` may be inserted, else the rule that refuses, with its numbers."""
        if self.can_insert(n):
            return ""
        return f"diff {self.diff:g} + {n} * {self.samples_per_insert:g} > max_diff {self.max_diff:g}"

    def reset(self) -> None:
        """Counters back to nothing."""
        self.inserts = self.samples = self.size = 0

    def copy(self) -> RateLimiter:
        """A new limiter with the same numbers and no table."""
        twin = RateLimiter.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._owner = None
        twin.reset()
        return twin

    def options(self) -> dict[str, Any]:
        """The numbers it was made with."""
        return {
            "samples_per_insert": self.samples_per_insert,
            "min_size_to_sample": self.min_size_to_sample,
            "min_diff": self.min_diff,
            "max_diff": self.max_diff,
        }

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
      min_size_to_sample: items before sampling begins.
      error_buffer: how far the two sides may drift apart, in samples; b stands for
        `(samples_per_insert * min_size_to_sample - b, samples_per_insert * min_size_to_sample + b)`, a pair
        is the window.
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        error_buffer: float | tuple[float, float],
    ):
        if isinstance(error_buffer, (int, float)):
            centre = samples_per_insert * min_size_to_sample
            low, high = centre - error_buffer, centre + error_buffer
        else:
            low, high = error_buffer
        super().__init__(samples_per_insert, min_size_to_sample, low, high)
        if not high - low >= 2 * max(1.0, samples_per_insert):
            raise ValueError(
                f"error_buffer: got a window of {high - low} ([{low}, {high}]), expected at least "
                f"2 * max(1, samples_per_insert) = {2 * max(1.0, samples_per_insert)}; a narrower one "
                "blocks both sides"
            )
        if low > samples_per_insert * min_size_to_sample:
            raise ValueError(
                f"error_buffer: got {low}, above samples_per_insert * min_size_to_sample = "
                f"{samples_per_insert * min_size_to_sample}: nothing could be sampled when the "
                "minimum size is reached"
            )
        if high < samples_per_insert * min_size_to_sample:
            logging.getLogger(__name__).warning(
                "error_buffer: its upper end %s is below samples_per_insert * min_size_to_sample = "
                "%s: inserts stop as soon as the minimum size "
                "is reached, until enough was sampled",
                high,
                samples_per_insert * min_size_to_sample,
            )


class Queue(RateLimiter):
    """Every item is sampled once: inserts wait when `size` items wait to be sampled."""

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"size: got {size}, expected at least 1")
        super().__init__(1.0, 1, 0.0, float(size))


class Stack(Queue):
    """The same rule as `Queue`; the order is the selector's matter."""
