"""The state of each table's rate limiter as text, for the message about a deadlock."""

from __future__ import annotations

import math
from typing import Any

# Reverb's limiters without a bound use the largest float64.
_BOUNDLESS = 10**15


def describe_room(replay: Any) -> str:
    """The number of items that each table takes before a sample."""
    return _of_each_table(replay, lambda info: f"takes {_count(_room(info))} more before a sample")


def describe_stock(replay: Any) -> str:
    """The number of samples that each table gives before an insert."""
    return _of_each_table(replay, lambda info: f"gives {_count(_stock(info))} samples before an insert")


def _of_each_table(replay: Any, says: Any) -> str:
    tables = replay.server_info(timeout=1).values()
    return "; ".join(
        f"table {info.name!r} holds {info.current_size} items and {says(info)}" for info in tables
    )


def _room(info: Any) -> int:
    limiter = info.rate_limiter_info
    by_ratio = (limiter.max_diff - _diff(info)) / limiter.samples_per_insert
    free = limiter.min_size_to_sample - info.current_size
    return max(free, math.floor(min(by_ratio, _BOUNDLESS)), 0)


def _stock(info: Any) -> int:
    limiter = info.rate_limiter_info
    if info.current_size < limiter.min_size_to_sample:
        return 0
    return max(math.floor(min(_diff(info) - limiter.min_diff, _BOUNDLESS)), 0)


def _diff(info: Any) -> float:
    limiter = info.rate_limiter_info
    inserted, sampled = limiter.insert_stats.completed, limiter.sample_stats.completed
    return inserted * limiter.samples_per_insert - sampled


def _count(number: int) -> str:
    return "any number of" if number >= _BOUNDLESS else f"{number:,}"
