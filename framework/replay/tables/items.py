"""The bookkeeping of a table's items as arrays over slots, and the map from keys to slots.

A key that the table gives out is ``generation << bits | slot``, so that looking it up is arithmetic. Keys
that writers make
themselves (they must know them before the server has answered) have the bit ``FOREIGN`` set and live in a
dict. Bits 56
to 63 are 0 in both, free for whoever puts several servers together.
"""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import numpy as np

from framework.replay import kernels
from framework.replay.tables.selectors.base import grown

FOREIGN = 1 << 55
_KEY_BITS = 55

# `SPENT` items have no turn left; their slots are kept until their readers are done with them.
FREE, LIVE, SPENT = 0, 1, 2
# What free slots are called; no item is.
NO_KEY = np.uint64((1 << 64) - 1)

_foreign_keys = itertools.count(secrets.randbits(_KEY_BITS - 1))


def make_keys(n: int) -> np.ndarray:
    """``n`` new foreign keys, uint64 ``[n]``; unique among processes but for a chance of about 1e-16 a
    pair."""
    first = next(_foreign_keys) if n == 1 else [next(_foreign_keys) for _ in range(n)]
    return np.array(first, np.uint64, ndmin=1) | np.uint64(FOREIGN)


class Items:
    """Arrays ``[slots]``; they grow up to the most items that the table ever held at once."""

    def __init__(self, max_size: int, width: int = 0):
        # One more than slots need, so that what NO_KEY points at is never a slot.
        self.bits = max(12, (4 * max_size).bit_length())
        self._mask = np.uint64((1 << self.bits) - 1)
        self._compiled = kernels.load()
        size = min(1024, max(16, max_size))
        self.state = np.zeros(size, np.int8)
        self.keys = np.full(size, NO_KEY)
        self._step = np.uint64(1 << self.bits)
        self.next_keys = self._first_keys(0, size)
        self.priorities = np.zeros(size)
        self.times = np.zeros(size, np.int32)  # sampled
        self.pending = np.zeros(size, np.int32)  # drawn, and neither released nor given back
        self.stamps = np.zeros(size, np.int64)
        self.layouts = np.zeros(size, np.int32)
        self.index = np.zeros((size, width), np.int64)
        self.lengths: np.ndarray | None = None  # int32 [slots, groups], made when the first ragged item comes
        self.episodes: np.ndarray | None = None  # uint64 [slots], made when the first item names its episode
        self.foreign: dict[int, int] = {}
        self._free = np.zeros(size, np.int64)
        self._num_free = 0
        self._next = 0

    @property
    def size(self) -> int:
        """Slots in use."""
        return self._next - self._num_free

    def _first_keys(self, begin: int, end: int) -> np.ndarray:
        return np.arange(begin, end, dtype=np.uint64) | self._step

    def span(self, slots: np.ndarray) -> Any:
        """A slice if ``slots`` are consecutive, as they mostly are: several times faster to write to."""
        n = len(slots)
        first = int(slots[0])
        consecutive = int(slots[-1]) - first == n - 1
        if self._compiled is not None:
            return slice(first, first + n) if consecutive and self._compiled.consecutive(slots) else slots
        if consecutive and (n == 1 or np.count_nonzero(slots[1:] - slots[:-1] == 1) == n - 1):
            return slice(first, first + n)
        return slots

    def take(self, n: int) -> np.ndarray:
        """``n`` free slots."""
        reused = min(n, self._num_free)
        if reused == n:
            self._num_free -= n
            return self._free[self._num_free : self._num_free + n].copy()
        slots = np.empty(n, np.int64)
        slots[:reused] = self._free[self._num_free - reused : self._num_free]
        self._num_free -= reused
        end = self._next + n - reused
        slots[reused:] = np.arange(self._next, end)
        self._next = end
        if end > len(self.state):
            self._grow(end)
        return slots

    def _grow(self, size: int) -> None:
        self.keys = grown(self.keys, size, int(NO_KEY))
        size = len(self.keys)
        self.next_keys = np.concatenate([self.next_keys, self._first_keys(len(self.next_keys), size)])
        for name in ("state", "priorities", "times", "pending", "stamps", "layouts", "index", "_free"):
            setattr(self, name, grown(getattr(self, name), size))
        if self.lengths is not None:
            self.lengths = grown(self.lengths, size)
        if self.episodes is not None:
            self.episodes = grown(self.episodes, size)

    def put_back(self, slots: np.ndarray) -> None:
        """``slots`` are free."""
        self.state[slots] = FREE
        self.keys[slots] = NO_KEY
        n = len(slots)
        self._free[self._num_free : self._num_free + n] = slots
        self._num_free += n

    def widen(self, width: int) -> None:
        """Makes lines of the index matrix ``width`` long."""
        if width > self.index.shape[1]:
            wider = np.zeros((len(self.index), width), np.int64)
            wider[:, : self.index.shape[1]] = self.index
            self.index = wider

    def set_lengths(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Stores int32 ``[k, groups]``."""
        groups = lengths.shape[1]
        if self.lengths is None:
            self.lengths = np.zeros((len(self.state), groups), np.int32)
        elif self.lengths.shape[1] < groups:
            wider = np.zeros((len(self.state), groups), np.int32)
            wider[:, : self.lengths.shape[1]] = self.lengths
            self.lengths = wider
        self.lengths[slots, :groups] = lengths

    def name(self, slots: np.ndarray, at: Any, keys: np.ndarray | None) -> np.ndarray:
        """Gives the items in ``slots`` (also known as ``at``) their keys, new ones for None, and returns
        them."""
        if keys is None:
            keys = self.next_keys[at]
            if type(at) is slice:
                keys = keys.copy()
            self.next_keys[at] = keys + self._step
        else:
            self.foreign.update(zip(keys.tolist(), slots.tolist(), strict=True))
        self.keys[at] = keys
        return keys

    def forget(self, slots: np.ndarray) -> None:
        """The keys of ``slots`` mean nothing any more."""
        if self.foreign:
            for key in self.keys.take(slots).tolist():
                self.foreign.pop(key, None)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, bool]:
        """The slot of each key, -1 for keys that are gone or never were, int64 ``[n]``; and whether all are
        there."""
        if self._compiled is not None:
            slots = np.empty(len(keys), np.int64)
            if not self._compiled.find(keys, self.keys, self._mask, slots):
                return slots, True
            return self._find_foreign(keys, slots, slots >= 0)
        slots = (keys & self._mask).view(np.int64)
        try:
            found = self.keys.take(slots) == keys
        except IndexError:  # a key that was never given out may point anywhere
            found = (slots < len(self.keys)) & (self.keys.take(slots, mode="clip") == keys)
        if np.count_nonzero(found) == len(keys):
            return slots, True
        return self._find_foreign(keys, np.where(found, slots, -1), found)

    def _find_foreign(
        self, keys: np.ndarray, slots: np.ndarray, found: np.ndarray
    ) -> tuple[np.ndarray, bool]:
        if not self.foreign:
            return slots, False
        missing = np.flatnonzero(~found)
        get = self.foreign.get
        slots[missing] = others = [get(key, -1) for key in keys[missing].tolist()]
        return slots, -1 not in others

    def in_order(self) -> np.ndarray:
        """The slots in use, oldest first."""
        slots = np.flatnonzero(self.state[: self._next])
        return slots[np.argsort(self.stamps[slots], kind="stable")]
