"""The state of the rate limiters as text, for the message about a deadlock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from framework.replay import TableInfo

# Reverb's limiters without a bound use the largest float64.
_BOUNDLESS = 10**15


def describe_room(replay: Any) -> str:
    """The number of items that each table takes before a sample."""

    def room(info: TableInfo) -> str:
        limiter = info.rate_limiter_info
        by_ratio = (limiter.max_diff - _diff(info)) / limiter.samples_per_insert
        free = limiter.min_size_to_sample - info.current_size
        return f"takes {_count(max(free, by_ratio))} more before a sample"

    return _of_each_table(replay, room)


def describe_stock(replay: Any) -> str:
    """The number of samples that each table gives before an insert."""

    def stock(info: TableInfo) -> str:
        limiter = info.rate_limiter_info
        enough = info.current_size >= limiter.min_size_to_sample
        return f"gives {_count(_diff(info) - limiter.min_diff if enough else 0)} samples before an insert"

    return _of_each_table(replay, stock)


def _of_each_table(replay: Any, describe: Callable[[TableInfo], str]) -> str:
    tables = replay.server_info(timeout=1).values()
    return "; ".join(
        f"table {info.name!r} holds {info.current_size} items and {describe(info)}" for info in tables
    )


def _diff(info: TableInfo) -> float:
    limiter = info.rate_limiter_info
    inserted, sampled = limiter.insert_stats.completed, limiter.sample_stats.completed
    return inserted * limiter.samples_per_insert - sampled


def _count(number: float) -> str:
    return "any number of" if number >= _BOUNDLESS else f"{max(math.floor(number), 0):,}"
