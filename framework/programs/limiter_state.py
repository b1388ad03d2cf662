"""The state of the rate limiters as text, for the message about a deadlock."""

from __future__ import annotations

import math

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
