"""By age: first in, first out, and last in, first out."""

from __future__ import annotations

import numpy as np

from framework.replay.rows.store import grown
from framework.replay.tables.selectors.base import Selector


class _ByAge(Selector):
    """The slots in order of their stamps, oldest at `_head`; -1 where one was deleted."""

    _newest_first = False

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._order = np.full(1024, -1, np.int64)
        self._stamps = np.zeros(1024, np.int64)
        self._where = np.full(1024, -1, np.int64)  # slot -> place in _order
        self._head = self._tail = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        n = len(slots)
        if not n:
            return
        self._where = grown(self._where, int(np.maximum.reduce(slots)) + 1, -1)
        self._push(slots, stamps)

    def _push(self, slots: np.ndarray, stamps: np.ndarray) -> None:
        n = len(slots)
        if self._tail + n > len(self._order):
            self._compact(n)
        begin, end = self._tail, self._tail + n
        self._order[begin:end] = slots
        self._stamps[begin:end] = stamps
        self._where[slots] = np.arange(begin, end)
        self._tail = end
        self._size += n
        if begin > self._head and stamps[0] < self._stamps[begin - 1]:
            self._sort()  # an item that was given back takes its old place again

    def delete(self, slots: np.ndarray) -> None:
        self._order[self._where[slots]] = -1
        self._where[slots] = -1
        self._size -= len(slots)
        self._trim()

    def replace(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        n = len(slots)
        oldest = self._order[self._head : self._head + n]
        if n < self._size and np.count_nonzero(oldest == slots) == n:  # what a full table does all the time
            oldest.fill(-1)
            self._head += n
            self._size -= n
            if self._order[self._head] < 0:
                self._trim()
            self._push(slots, stamps)
        else:
            self.delete(slots)
            self.insert(slots, priorities, stamps)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        return None

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        at = self._tail - 1 if self._newest_first else self._head
        return np.full(n, self._order[at]), np.ones(n)

    def first(self, n: int) -> np.ndarray:
        block = self._order[self._head : self._tail]
        block = block[::-1] if self._newest_first else block
        near = block[:n]
        if len(block) == self._size or (len(near) == n and near.min(initial=0) >= 0):
            return near.copy()  # none was deleted out of order, or none of these
        return block[block >= 0][:n]

    def _trim(self) -> None:
        """Moves head and tail past deleted places."""
        if not self._size:
            self._head = self._tail = 0
            return
        while self._order[self._head] < 0:
            live = self._order[self._head : self._head + 1024] >= 0
            step = int(live.argmax())
            self._head += step if live[step] else len(live)
        while self._order[self._tail - 1] < 0:
            live = self._order[max(self._head, self._tail - 1024) : self._tail][::-1] >= 0
            step = int(live.argmax())
            self._tail -= step if live[step] else len(live)

    def _compact(self, room: int) -> None:
        """Moves the slots to the front of an array that has space for `room` more, amortised O(1)."""
        live = self._order[self._head : self._tail] >= 0
        slots = self._order[self._head : self._tail][live]
        stamps = self._stamps[self._head : self._tail][live]
        size = max(1024, 2 * (self._size + room))
        self._order = np.full(size, -1, np.int64)
        self._stamps = np.zeros(size, np.int64)
        self._order[: len(slots)] = slots
        self._stamps[: len(slots)] = stamps
        self._where[slots] = np.arange(len(slots))
        self._head, self._tail = 0, len(slots)

    def _sort(self) -> None:
        self._compact(0)
        by_age = np.argsort(self._stamps[: self._tail], kind="stable")
        self._order[: self._tail] = self._order[by_age]
        self._stamps[: self._tail] = self._stamps[by_age]
        self._where[self._order[: self._tail]] = np.arange(self._tail)


class Fifo(_ByAge):
    """The item that was inserted first."""


class Lifo(_ByAge):
    """The item that was inserted last."""

    _newest_first = True
