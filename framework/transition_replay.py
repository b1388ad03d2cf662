"""Replay of n-step transitions: the table and the adder of agents that learn off-policy."""

from __future__ import annotations

from typing import Any

from framework import adders, replay, specs
from framework.datasets import Dataset

TABLE = "replay"


def make_table(
    sampler: Any, *, max_size: int, min_size: int, batch_size: int, samples_per_insert: float, burst: int
) -> Any:
    """A table of the newest items whose rate limiter holds a ratio of learning to acting.

    Args:
      sampler: a ``replay.selectors`` selector.
      max_size: items kept; the oldest go first.
      min_size: items there before any is sampled.
      batch_size: items of one batch.
      samples_per_insert: times an item is drawn on average.
      burst: items that actors may be ahead or behind of that ratio.
    """
    return replay.Table(
        name=TABLE,
        sampler=sampler,
        remover=replay.selectors.Fifo(),
        max_size=max_size,
        rate_limiter=replay.rate_limiters.SampleToInsertRatio(
            samples_per_insert,
            min_size,
            # Room for a burst of items on either side of the exact ratio, and for one batch.
            burst * samples_per_insert + batch_size,
        ),
    )


def make_adder(client: Any, spec: Any, *, n_step: int, discount: float, burst: int) -> Any:
    """Writes n-step transitions of envs of ``spec`` (an ``EnvironmentSpec``), stacked frames once."""
    return adders.NStepTransitionAdder(
        client,
        n_step,
        discount,
        max_in_flight_items=burst,  # What waits for room counts as being ahead, too.
        frame_stack=specs.frame_stack(spec.observations),
    )


def make_dataset(client: Any, batch_size: int, device: str) -> Any:
    """Batches of the table on ``device``."""
    return Dataset(client, TABLE, batch_size, device=device)
