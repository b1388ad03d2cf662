"""Batches of several tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from framework.replay.batches import JoinedSource
from framework.replay.contracts import Client, Source
from framework.replay.types import PaddedSample, ReplaySample

# First bit of the table's number in the keys of mixed batches. Bits 56 to 60 belong to shards.
_TABLE_SHIFT = 61
MAX_TABLES = 8


class Mixture(JoinedSource):
    """Draws batches from several tables; see `framework.replay.contracts.Source`.

    Each table contributes the share of a batch that its weight gives. Shares are rounded so that they are
    exact over many batches. The items of the first table come first.

    Args:
      client: client of the tables.
      weights: `{table: weight > 0}` of at most 8 tables.
    """

    def __init__(self, client: Client, weights: Mapping[str, float]) -> None:
        if not 1 <= len(weights) <= MAX_TABLES or not all(0 < v < float("inf") for v in weights.values()):
            raise ValueError(
                f"table: got {dict(weights)}, expected a name or 1 to {MAX_TABLES} names with weights > 0."
            )
        self._client = client
        self._source: Source = client.source()
        self._tables = list(weights)
        self._shares = np.array(list(weights.values())) / sum(weights.values())
        self._owed = np.zeros(len(weights))

    def draw(
        self, table: str, n: int, timeout: float | None, out: list[Any] | None, pad: bool
    ) -> tuple[ReplaySample | PaddedSample, list[tuple[Source, Any]]]:
        counts, owed = self._counts(n)
        parts = [(self._source, name) for name in self._tables]
        batch, drawn = self.draw_parts(parts, counts, _TABLE_SHIFT, timeout, out, pad)
        self._owed = owed
        return batch, drawn

    def _counts(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of items of each table in the next batch, and what is owed after it."""
        owed = self._owed + self._shares * n
        counts = np.maximum(np.floor(owed), 0).astype(np.int64)
        missing = n - int(counts.sum())
        counts[np.argsort(counts - owed, kind="stable")[:missing]] += 1
        return counts, owed - counts

    def can_sample(self, table: str, n: int) -> bool:
        counts, _ = self._counts(n)
        return all(
            self._source.can_sample(name, count)
            for name, count in zip(self._tables, counts.tolist(), strict=True)
            if count
        )

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets the priorities `[N]` of items of mixed batches by their keys `[N]`."""
        keys, priorities = np.asarray(keys, np.uint64), np.asarray(priorities, np.float64)
        numbers = keys >> np.uint64(_TABLE_SHIFT)
        plain = keys & np.uint64((1 << _TABLE_SHIFT) - 1)
        for number, name in enumerate(self._tables):
            mine = numbers == number
            if mine.any():
                self._client.update_priorities(name, plain[mine], priorities[mine])

    def interrupt(self) -> None:
        self._source.interrupt()

    def close(self) -> None:
        self._source.close()
