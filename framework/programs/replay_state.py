"""The state of replay as numbers for the learner's rows, and as text for the message about a deadlock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from framework.replay import TableInfo

# Reverb's limiters without a bound use the largest float64.
_BOUNDLESS = 10**15


def replay_numbers(info: Mapping[str, TableInfo]) -> dict[str, Any]:
    """Counters of each table of a `server_info`, since the start of the server.

    They are `size`, `inserted`, `sampled`, `samples_per_insert`, `sample_age` (mean number of items inserted
    between the insert of an item and its sampling) and `time/…_blocked_s` (seconds that inserts and samples
    waited for the rate limiter). A back end without the last two reports zeros for them.
    """
    numbers: dict[str, Any] = {}
    for name, table in info.items():
        prefix = "replay" if len(info) == 1 else f"replay/{name}"
        inserts, samples = table.rate_limiter_info.insert_stats, table.rate_limiter_info.sample_stats
        numbers[f"{prefix}/size"] = table.current_size
        numbers[f"{prefix}/inserted"] = inserts.completed
        numbers[f"{prefix}/sampled"] = samples.completed
        numbers[f"{prefix}/samples_per_insert"] = samples.completed / max(inserts.completed, 1)
        numbers[f"{prefix}/sample_age"] = table.sampled_age / max(samples.completed, 1)
        numbers[f"time/{prefix}/insert_blocked_s"] = inserts.blocked_ms / 1000
        numbers[f"time/{prefix}/sample_blocked_s"] = samples.blocked_ms / 1000
    return numbers


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
