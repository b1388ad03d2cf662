"""The map from the keys of a table's items to their slots."""

from __future__ import annotations

import numpy as np


class KeyMap:
    """Finds the slots of keys.

    Keys of one writer are consecutive, so their lowest bits lead to most slots without a search. `_cells`
    holds slots. An entry is valid if the key of its slot belongs to that cell. An item whose cell is taken by
    another item is a stray.

    Args:
      keys: uint64 `[slots]`, the key of each slot, 0 for none. The caller changes it and tells the map.
    """

    def __init__(self, keys: np.ndarray) -> None:
        self._keys = keys
        self._cells = np.zeros(1 << (2 * len(keys) - 1).bit_length(), np.int32)
        self._mask = np.array(len(self._cells) - 1, np.uint64)  # not a scalar, which takes numpy longer
        self._strays: dict[int, int] = {}
        used = np.flatnonzero(keys)
        self.add(used, keys[used])

    def add(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Adds `keys`, which `slots` have from now on."""
        low = keys & self._mask
        places = low.view(np.int64)
        free = self._keys.take(self._cells.take(places)) & self._mask != low
        self._cells[places[free]] = slots[free]
        strays = self._cells.take(places) != slots
        if np.count_nonzero(strays):
            self._strays.update(zip(keys[strays].tolist(), slots[strays].tolist(), strict=True))

    def forget(self, keys: np.ndarray) -> None:
        """Removes `keys`, which no slot has from now on."""
        if self._strays:
            for key in keys.tolist():
                self._strays.pop(key, None)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the slot of each key, int64 `[n]`; -1 for keys that are gone or never existed."""
        # Indices of another type are slower.
        slots = self._cells.take((keys & self._mask).view(np.int64)).astype(np.int64)
        found = self._keys.take(slots) == keys
        if np.count_nonzero(keys) < len(keys):  # free slots have key 0
            found &= keys != 0
        if np.count_nonzero(found) < len(keys):
            slots[~found] = [self._strays.get(key, -1) for key in keys[~found].tolist()]
        return slots
