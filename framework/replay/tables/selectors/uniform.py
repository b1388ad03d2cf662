"""Every item with the same probability."""

from __future__ import annotations

import numpy as np

from framework.replay.rows.store import grown
from framework.replay.tables.selectors.base import Selector


class Uniform(Selector):
    """Each of the n items with probability 1 / n, independently; priorities are ignored."""

    deterministic = False

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._slots = np.zeros(1024, np.int64)  # the first _size are the slots, in no particular order
        self._where = np.full(1024, -1, np.int64)  # slot -> place in _slots
        self._size = 0
        self._identity = True  # _slots[i] == i, as long as nothing was deleted out of order

    def __len__(self) -> int:
        return self._size

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        n = len(slots)
        begin, end = self._size, self._size + n
        self._slots = grown(self._slots, end)
        self._where = grown(self._where, int(np.maximum.reduce(slots)) + 1 if n else 0, -1)
        places = np.arange(begin, end)
        if self._identity and np.count_nonzero(slots != places):
            self._identity = False
        self._slots[begin:end] = slots
        self._where[slots] = places
        self._size = end

    def replace(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        return None  # the same slots are there as before

    def delete(self, slots: np.ndarray) -> None:
        end = self._size - len(slots)
        places = self._where[slots]
        tail = self._slots[end : self._size].copy()
        self._where[slots] = -1
        movers = tail[self._where[tail] >= 0]
        holes = places[places < end]
        self._slots[holes] = movers
        self._where[movers] = holes
        self._size = end
        self._identity = end == 0 or (self._identity and not len(holes))

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        return None

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        size = self._size
        chosen = rng.random(n)
        chosen *= size  # below size: the product of size and the largest double under 1 rounds down
        places = chosen.astype(np.int64)
        chosen.fill(1.0 / size)
        return (places if self._identity else self._slots.take(places)), chosen

    def state(self) -> dict[str, np.ndarray]:
        return {"slots": self._slots[: self._size].copy()}

    def restore(
        self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray, state: dict[str, np.ndarray]
    ) -> None:
        self.clear()
        order = state.get(
            "slots", slots
        )  # random places mean the same slots as before only in the same order
        if sorted(order.tolist()) != sorted(slots.tolist()):
            raise ValueError("Uniform: the saved order does not hold the same items as the table")
        self.insert(order, priorities, stamps)
