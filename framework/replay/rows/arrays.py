"""What tables and rows do to arrays of row and slot numbers."""

from __future__ import annotations

import numpy as np


def grown(array: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """`array` if it holds `size` entries, else a copy at least twice as long; new entries are `fill`."""
    if size <= len(array):
        return array
    longer = np.full((max(size, 2 * len(array)), *array.shape[1:]), fill, array.dtype)
    longer[: len(array)] = array
    return longer


def span(numbers: np.ndarray) -> slice | np.ndarray:
    """A slice if `numbers` are consecutive, which copies several times faster; else `numbers`."""
    n = len(numbers)
    if not n:
        return numbers
    begin = int(numbers[0])
    if int(numbers[-1]) - begin != n - 1 or np.count_nonzero(numbers[1:] - numbers[:-1] == 1) != n - 1:
        return numbers
    return slice(begin, begin + n)
