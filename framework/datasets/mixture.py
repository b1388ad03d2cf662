"""Batches of several tables, or of several things that give batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from framework.config_checks import whole_number
from framework.replay.batches import JoinedSource
from framework.replay.contracts import Batches, Source
from framework.replay.types import Drawn, Out, check_keys, check_priorities

# First bit of the table's number in the keys of mixed batches. Bits 56 to 60 belong to shards.
_TABLE_SHIFT = 61
_KEY = np.uint64((1 << _TABLE_SHIFT) - 1)
# Number of the newest keys of dm-reverb, which uses all 64 bits, that are remembered to set priorities.
_MAX_LONG_KEYS = 1 << 16
MAX_TABLES = 8


def table_numbers(keys: Any) -> Any:
    """The table of each item `[N]` of a mixed batch, by its `sample.info.key`.

    A table's number is its place in the `weights` of the `Mixture`, from 0. Arrays give an array; the keys of
    a compiled loss, a tensor of int64, give a tensor.
    """
    signed = keys if isinstance(keys, torch.Tensor) else np.asarray(keys, np.uint64).view(np.int64)
    return (signed >> _TABLE_SHIFT) & (MAX_TABLES - 1)


class Mixture(JoinedSource):
    """Batches from several tables of one or several clients, by fixed shares; one `Dataset` draws from it.

    ```python
    both = Mixture({(client, "replay"): 0.5, (recorded, "episodes"): 0.5})
    dataset = Dataset(both, "", batch_size=256)
    ```

    Each table contributes the share of a batch that its weight gives. Shares are rounded so that they are
    exact over many batches. The items of the first table come first; `table_numbers` tells them apart.

    Args:
      weights: `{(client, table): weight > 0}` of at most 8 tables; a client is any `Batches`.
      only_first: number of batches at the start that hold items of the first table alone; then the weights
        apply.

    Attributes:
      concurrent: see `Batches`.
    """

    def __init__(self, weights: Mapping[tuple[Batches, str], float], only_first: int = 0) -> None:
        if not 1 <= len(weights) <= MAX_TABLES or not all(0 < v < float("inf") for v in weights.values()):
            raise ValueError(
                f"table: got { {name: weight for (_, name), weight in weights.items()} }, expected a name or "
                f"up to {MAX_TABLES} weights > 0."
            )
        self._clients, self._tables = [client for client, _ in weights], [name for _, name in weights]
        self.concurrent = all(client.concurrent for client in self._clients)
        sources = {key: client.source() for key, client in {id(each): each for each in self._clients}.items()}
        self._sources: list[Source] = list(sources.values())
        self._parts = [(sources[id(client)], name) for client, name in weights]
        self._shares = np.array(list(weights.values())) / sum(weights.values())
        self._owed = np.zeros(len(weights))
        self._long: dict[int, int] = {}  # By marked key, the whole key.
        self._only_first = whole_number("only_first", only_first, 0)

    def source(self) -> Source:
        return self

    def draw(self, table: str, n: int, timeout: float | None, out: Out, pad: bool) -> Drawn:
        counts, owed = self._counts(n)
        batch, drawn = self.draw_parts(self._parts, counts, _TABLE_SHIFT, timeout, out, pad)
        self._owed = owed
        self._only_first = max(0, self._only_first - 1)
        return batch, drawn

    def mark_keys(self, keys: np.ndarray, numbers: np.ndarray, shift: int) -> np.ndarray:
        marked = super().mark_keys(keys & _KEY, numbers, shift)
        if (keys > _KEY).any():
            self._long.update(zip(marked.tolist(), keys.tolist(), strict=True))
            for key in [*itertools.islice(self._long, max(0, len(self._long) - _MAX_LONG_KEYS))]:
                del self._long[key]
        return marked

    def _counts(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of items of each table in the next batch, and what is owed after it."""
        if self._only_first:
            return np.array([n] + [0] * (len(self._tables) - 1)), self._owed
        owed = self._owed + self._shares * n
        counts = np.maximum(np.floor(owed), 0).astype(np.int64)
        # Tables that have had more than their share make the others' shares too large together.
        while (surplus := int(counts.sum()) - n) > 0:
            most = np.argsort(np.where(counts > 0, owed - counts, np.inf), kind="stable")[:surplus]
            counts[most[counts[most] > 0]] -= 1
        counts[np.argsort(counts - owed, kind="stable")[: n - int(counts.sum())]] += 1
        return counts, owed - counts

    def can_sample(self, table: str, n: int) -> bool:
        counts, _ = self._counts(n)
        return all(
            source.can_sample(name, count)
            for (source, name), count in zip(self._parts, counts.tolist(), strict=True)
            if count
        )

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets the priorities `[N]` of items of mixed batches by their keys `[N]`."""
        names = ", ".join(self._tables)
        keys = check_keys(names, keys)
        priorities = check_priorities(names, priorities, len(keys))  # before any table is changed
        numbers = table_numbers(keys)
        plain = keys & _KEY
        if self._long:
            whole = [self._long.get(key, key & int(_KEY)) for key in keys.tolist()]
            plain = np.array(whole, np.uint64)
        for number, (client, name) in enumerate(zip(self._clients, self._tables, strict=True)):
            mine = numbers == number
            if mine.any():
                client.update_priorities(name, plain[mine], priorities[mine])

    def refusals(self, timeout: float | None = None) -> list[str]:
        clients = {id(client): client for client in self._clients}.values()
        return [text for client in clients for text in client.refusals(timeout)]

    def interrupt(self) -> None:
        for source in self._sources:
            source.interrupt()

    def close(self) -> None:
        for source in self._sources:
            source.close()
