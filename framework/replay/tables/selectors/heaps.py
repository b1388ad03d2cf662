"""By priority: the item with the smallest, or the largest."""

from __future__ import annotations

import heapq

import numpy as np

from framework.replay.tables.selectors.base import Selector


class _Heap(Selector):
    """A binary heap of `(sign * priority, turn, slot)`.

    Of equal priorities the one that was inserted or updated least recently wins. Entries that an update or a
    deletion
    has made stale stay until they surface, or until they are the majority.
    """

    uses_priorities = True
    _sign = 1.0

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._turn_of: dict[int, int] = {}  # slot -> the turn of its valid entry
        self._turn = 0

    def __len__(self) -> int:
        return len(self._turn_of)

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        for slot, priority in zip(slots.tolist(), priorities.tolist(), strict=True):
            self._turn += 1
            self._turn_of[slot] = self._turn
            heapq.heappush(self._heap, (self._sign * priority, self._turn, slot))

    def delete(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            del self._turn_of[slot]
        self._clean()

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.insert(slots, priorities, slots)
        self._clean()

    def _clean(self) -> None:
        if len(self._heap) > 64 + 2 * len(self._turn_of):
            self._heap = [entry for entry in self._heap if self._turn_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        while self._heap and self._turn_of.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return np.full(n, self._heap[0][2], np.int64), np.ones(n)

    def first(self, n: int) -> np.ndarray:
        if n == 1:
            return np.full(1, self._heap[0][2], np.int64)
        live = (entry for entry in self._heap if self._turn_of.get(entry[2]) == entry[1])
        return np.array([entry[2] for entry in heapq.nsmallest(n, live)], np.int64)

    def state(self) -> dict[str, np.ndarray]:
        slots = np.fromiter(self._turn_of.keys(), np.int64, len(self._turn_of))
        turns = np.fromiter(self._turn_of.values(), np.int64, len(self._turn_of))
        return {"slots": slots[np.argsort(turns)]}

    def restore(
        self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray, state: dict[str, np.ndarray]
    ) -> None:
        self.clear()
        order = state.get("slots", slots)
        priority_of = dict(zip(slots.tolist(), priorities.tolist(), strict=True))
        if sorted(order.tolist()) != sorted(priority_of):
            raise ValueError(
                f"{type(self).__name__}: the saved order does not hold the same items as the table"
            )
        self.insert(order, np.array([priority_of[slot] for slot in order.tolist()], np.float64), order)


class MinHeap(_Heap):
    """The item with the smallest priority."""


class MaxHeap(_Heap):
    """The item with the largest priority."""

    _sign = -1.0
