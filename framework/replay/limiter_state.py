"""What replay says of its tables: as text, for the message about a deadlock, and as metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from framework.replay import TableInfo
from framework.replay.contracts import ReplayClient

# Reverb's limiters without a bound use the largest float64.
BOUNDLESS = 10**15


def describe_tables(replay: ReplayClient) -> str:
    """What each table holds, can take before the next sample, and can give before the next insert."""
    texts = []
    for info in replay.server_info(timeout=1).values():
        limiter = info.rate_limiter_info
        inserted, sampled = limiter.insert_stats.completed, limiter.sample_stats.completed
        diff = inserted * limiter.samples_per_insert - sampled
        missing = limiter.min_size_to_sample - info.current_size
        room = max(missing, (limiter.max_diff - diff) / limiter.samples_per_insert)
        stock = diff - limiter.min_diff if missing <= 0 else 0
        texts.append(
            f"table {info.name!r} holds {info.current_size} items, can take {_count(room)} more before the "
            f"next sample and can give {_count(stock)} samples before the next insert"
        )
    return "; ".join(texts)


def _count(number: float) -> str:
    return "any number of" if number >= BOUNDLESS else f"{max(math.floor(number), 0):,}"


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
