"""The bookkeeping of a table's items: arrays over *slots*, and the map from keys to slots."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Sequence

import numpy as np

from framework.replay import kernels
from framework.replay.rows.store import grown, span
from framework.replay.types import SampleInfo

# Items that have left the table keep their slots and rows until their readers are done: `SPENT` ones had
# their last turn, which may be given back; `GONE` ones were removed.
FREE, LIVE, SPENT, GONE = 0, 1, 2, 3

# Bits 56 to 63 of a key are 0, free for a client of several servers. Bit 55 is set: no key is 0.
_KEY_BIT = 1 << 55


class KeyCounter:
    """Makes keys that are unique among processes but for a chance of about 1e-16 a pair."""

    def __init__(self) -> None:
        self._next = _KEY_BIT | secrets.randbits(54)
        self._lock = threading.Lock()

    def take(self, n: int) -> np.ndarray:
        """`n` new keys, uint64 `[n]`."""
        with self._lock:
            begin, self._next = self._next, self._next + n
        return np.arange(begin, begin + n, dtype=np.uint64)


#: Writers make the keys of their items, because they need them before the server answers.
make_keys = KeyCounter().take


@dataclasses.dataclass(slots=True, eq=False)
class NewItems:
    """Items of one layout on their way into a table, checked by it: see `Table.new_items`.

    Attributes:
      index: int64 `[k, width]`, the rows of each item.
      keys: uint64 `[k]`.
      priorities: float64 `[k]`, or None for the largest so far.
      lengths: int32 `[k, groups]`, or None if the layout is not ragged.
      episodes: uint64 `[k]`, or None.
      layout: the table's number for the layout.
    """

    index: np.ndarray
    keys: np.ndarray
    priorities: np.ndarray | None = None
    lengths: np.ndarray | None = None
    episodes: np.ndarray | None = None
    layout: int = 0

    def part(self, begin: int, end: int) -> NewItems:
        """Items `begin` to `end`."""
        optional = (self.priorities, self.lengths, self.episodes)
        priorities, lengths, episodes = (None if array is None else array[begin:end] for array in optional)
        return NewItems(
            self.index[begin:end], self.keys[begin:end], priorities, lengths, episodes, self.layout
        )

    def kind(self) -> tuple[object, ...]:
        """Equal for items that `join` can join."""
        return (self.layout, *[array is None for array in (self.priorities, self.lengths, self.episodes)])

    @staticmethod
    def join(parts: Sequence[NewItems]) -> NewItems:
        """One of several of the same kind and table."""
        first = parts[0]
        if len(parts) == 1:
            return first

        def joined(arrays: list[np.ndarray | None]) -> np.ndarray | None:
            return (
                None
                if arrays[0] is None
                else np.concatenate([array for array in arrays if array is not None])
            )

        return NewItems(
            np.concatenate([part.index for part in parts]),
            np.concatenate([part.keys for part in parts]),
            joined([part.priorities for part in parts]),
            joined([part.lengths for part in parts]),
            joined([part.episodes for part in parts]),
            first.layout,
        )


class Items:
    """Arrays `[slots]` that grow to the most items the table ever held at once."""

    _TYPES = {
        "state": np.int8,
        "keys": np.uint64,  # 0 in a free slot
        "priorities": np.float64,
        "times": np.int32,  # sampled
        "done": np.int32,  # of these, released
        "stamps": np.int64,  # grow with each insertion
        "layouts": np.int32,  # numbers of bindings
        "episodes": np.uint64,  # 0 for none
        "_free": np.int64,  # a stack of free slots below `_next`
    }

    state: np.ndarray
    keys: np.ndarray
    priorities: np.ndarray
    times: np.ndarray
    done: np.ndarray
    stamps: np.ndarray
    layouts: np.ndarray
    episodes: np.ndarray
    _free: np.ndarray

    def __init__(self) -> None:
        self.size = 0  # live items
        self.num_left = 0  # spent or gone
        self._kernels = kernels.load()
        self._num_free = 0
        self._next = 0  # slots from here on were never used
        for name, dtype in self._TYPES.items():
            setattr(self, name, np.zeros(0, dtype))
        self.index = np.zeros((0, 0), np.int64)
        self.lengths = np.zeros((0, 0), np.int32)
        self._grow(1024)

    def _grow(self, size: int) -> None:
        for name in (*self._TYPES, "index", "lengths"):
            setattr(self, name, grown(getattr(self, name), size))
        # Keys of one writer are consecutive, so their lowest bits lead to most slots without a search.
        # `_cells` holds slots, which count where the slot has a key of that cell; an item that has lost its
        # cell is a stray.
        self._cells = np.zeros(1 << (2 * len(self.state) - 1).bit_length(), np.int64)
        self._mask = np.array(len(self._cells) - 1, np.uint64)  # not a scalar, which takes numpy longer
        self._strays: dict[int, int] = {}
        used = np.flatnonzero(self.keys)
        keys = self.keys[used]
        self.keys[used] = 0
        self._name(used, keys)

    def _widen(self, width: int, groups: int) -> None:
        """Makes room for index lines of `width` rows and `groups` lengths."""
        for name, columns in (("index", width), ("lengths", groups)):
            array = getattr(self, name)
            if columns > array.shape[1]:
                setattr(self, name, np.pad(array, ((0, 0), (0, columns - array.shape[1]))))

    def take(self, n: int) -> np.ndarray:
        """`n` free slots for new items."""
        self.size += n
        reused = min(n, self._num_free)
        self._num_free -= reused
        slots = self._free[self._num_free : self._num_free + reused].copy()
        if reused == n:
            return slots
        begin, self._next = self._next, self._next + n - reused
        if self._next > len(self.state):
            self._grow(self._next)
        fresh = np.arange(begin, self._next)
        return np.concatenate([slots, fresh]) if reused else fresh

    def add(self, slots: np.ndarray, new: NewItems, priorities: np.ndarray, stamps: np.ndarray) -> None:
        """Puts new items into `slots`."""
        groups = 0 if new.lengths is None else new.lengths.shape[1]
        if new.index.shape[1] > self.index.shape[1] or groups > self.lengths.shape[1]:
            self._widen(new.index.shape[1], groups)
        at = span(slots)
        self.state[at] = LIVE
        self.priorities[at] = priorities
        self.times[at] = 0
        self.done[at] = 0
        self.stamps[at] = stamps
        self.layouts[at] = new.layout
        self.episodes[at] = 0 if new.episodes is None else new.episodes
        self.index[at, : new.index.shape[1]] = new.index
        if new.lengths is not None:
            self.lengths[at, :groups] = new.lengths
        self._name(slots, new.keys)

    def free(self, slots: np.ndarray) -> None:
        """Makes `slots` of items that have left, and whose keys are forgotten, free."""
        self.state[slots] = FREE
        self.num_left -= len(slots)
        end = self._num_free + len(slots)
        self._free[self._num_free : end] = slots
        self._num_free = end

    def draw(self, slots: np.ndarray, probabilities: np.ndarray) -> SampleInfo:
        """Counts one more sample of each of `slots`; what the samples say."""
        size = np.empty(len(slots), np.int64)
        size.fill(self.size)
        times = self._kernels.count(self.times, slots)
        return SampleInfo(self.keys.take(slots), probabilities, size, self.priorities.take(slots), times)

    def in_order(self) -> np.ndarray:
        """The slots of the live items, oldest first."""
        slots = np.flatnonzero(self.state[: self._next] == LIVE)
        return slots[np.argsort(self.stamps[slots], kind="stable")]

    # Keys.

    def _name(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Gives the items in `slots`, which have none, their keys."""
        cells = keys & self._mask
        places = cells.view(np.int64)  # an index of another type is converted each time
        others = self._cells.take(places)
        known = self.keys.take(others)
        lose = known & self._mask == cells
        if np.count_nonzero(lose):
            self._stray(others[lose], known[lose])
        self._cells[places] = slots
        self.keys[slots] = keys
        if len(keys) > 1 and int(keys[-1]) - int(keys[0]) != len(keys) - 1:  # some may have the same cell
            lose = self._cells.take(places) != slots
            self._stray(slots[lose], keys[lose])

    def _stray(self, slots: np.ndarray, keys: np.ndarray) -> None:
        self._strays.update(zip(keys.tolist(), slots.tolist(), strict=True))
        self._strays.pop(0, None)  # no key

    def forget(self, slots: np.ndarray) -> None:
        """The keys of `slots` mean nothing any more."""
        if self._strays:
            for key in self.keys.take(slots).tolist():
                self._strays.pop(key, None)
        self.keys[slots] = 0

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each key, int64 `[n]`; -1 for keys that are gone or never were."""
        slots = self._cells.take((keys & self._mask).view(np.int64))
        found = self.keys.take(slots) == keys
        if np.count_nonzero(keys) < len(keys):  # free slots have key 0
            found &= keys != 0
        if np.count_nonzero(found) < len(keys):
            slots[~found] = [self._strays.get(key, -1) for key in keys[~found].tolist()]
        return slots

    # Checkpoints.

    _SAVED = ("state", "keys", "priorities", "times", "stamps", "layouts", "episodes", "index", "lengths")

    def save(self) -> dict[str, np.ndarray]:
        """Copies of the arrays, without the items that have left."""
        arrays = {name: getattr(self, name)[: self._next].copy() for name in self._SAVED}
        left = np.flatnonzero(arrays["state"] > LIVE)
        arrays["state"][left] = FREE
        arrays["keys"][left] = 0
        arrays["free"] = np.concatenate([self._free[: self._num_free], left])
        return arrays

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Becomes what `save` has copied; for new items."""
        self._widen(arrays["index"].shape[1], arrays["lengths"].shape[1])
        self._next, self._num_free = len(arrays["state"]), len(arrays["free"])
        self.size = self._next - self._num_free
        self._grow(max(1, self._next))
        for name in self._SAVED:
            array = arrays[name]
            getattr(self, name)[tuple(slice(size) for size in array.shape)] = array
        self.done[:] = self.times
        self._free[: self._num_free] = arrays["free"]
        used = np.flatnonzero(self.keys)
        keys = self.keys[used]
        self.keys[used] = 0
        self._name(used, keys)
