"""Columns whose rows are compressed one by one, with lz4.

Compression pays for images with plain areas (frames of Atari games shrink 10 to 40 times), not for floats or
noise. A row of 84 x 84 bytes takes 10 to 40 µs to write and 1 to 2 µs to read, about ten times as long as a
copy. Each row takes 41 bytes beside its data, so small rows grow. Learners wait for reads: measure before you
turn it on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Bytes of a row beside its compressed data: the header of the Python object and its place in the list.
_OVERHEAD = 41


class CompressedColumn:
    """An array `[capacity, *shape]` as a row store needs it: rows are set, and read with `take`.

    Rows that were never written, or were cleared since, are zeros. Threads may use different rows at once.

    Args:
      shape: `(capacity, *shape of one row)`.
      dtype: the rows' dtype.
      account: called with the bytes by which the memory in use grows or shrinks, before it grows; may raise.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, account: Callable[[int], None]):
        # An optional package: only compression needs it.
        from lz4 import block

        self._compress, self._decompress = block.compress, block.decompress
        self.shape = shape
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.ndim = len(shape)
        self._size = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self._rows: list[bytes | None] = []
        self._account = account

    def __setitem__(self, at: slice | np.ndarray, values: np.ndarray) -> None:
        rows = range(self.shape[0])[at] if isinstance(at, slice) else at.tolist()
        packed = [self._compress(value.tobytes(), store_size=False) for value in values]
        if rows and max(rows) >= len(self._rows):
            self._rows.extend([None] * (max(rows) + 1 - len(self._rows)))
        self._account(sum(map(_cost, packed)) - sum(_cost(self._rows[row]) for row in rows))
        for row, data in zip(rows, packed, strict=True):
            self._rows[row] = data

    def take(
        self, rows: np.ndarray, axis: int = 0, out: np.ndarray | None = None, mode: str = "clip"
    ) -> np.ndarray:
        """`numpy.ndarray.take` along axis 0: rows `[...]` give an array `[..., *shape of one row]`."""
        array = np.empty((*rows.shape, *self.shape[1:]), self.dtype) if out is None else out
        whole = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
        raw = whole.reshape(-1).view(np.uint8).reshape(rows.size, self._size)
        first: dict[int, int] = {}  # stacks of frames overlap: each row is decompressed once
        for place, row in enumerate(rows.reshape(-1).tolist()):
            before = first.setdefault(row, place)
            if before != place:
                raw[place] = raw[before]
                continue
            data = self._rows[row] if row < len(self._rows) else None
            if data is None:
                raw[place] = 0
            else:
                raw[place] = np.frombuffer(self._decompress(data, uncompressed_size=self._size), np.uint8)
        if whole is not array:
            array[...] = whole
        return array

    def clear(self, rows: np.ndarray) -> None:
        """Frees rows that are not in use."""
        freed = 0
        for row in rows.tolist():
            if row < len(self._rows):
                freed += _cost(self._rows[row])
                self._rows[row] = None
        self._account(-freed)


def _cost(data: bytes | None) -> int:
    return 0 if data is None else len(data) + _OVERHEAD
