"""Memory for the columns of a row store."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np

from framework.replay.errors import StoreFullError

# Python has the flag since 3.13. The number is Linux's; on macOS the flag has no effect.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_HUGE_PAGE = 2 << 20


class Allocator:
    """Allocates columns in this process's own memory, which the kernel commits when it is first touched."""

    def allocate(self, stream: str, column: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a zeroed array of `shape` (rows first), whose pages need not be backed by memory yet."""
        size = max(1, int(np.prod(shape)) * dtype.itemsize)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, size, flags=flags)
        except (OSError, OverflowError) as error:
            raise StoreFullError(
                f"stream {stream!r}, column {column!r}: the address space does not hold {size} bytes for "
                f"{shape[0]} rows ({error}). Give RowStore a smaller capacity."
            ) from error
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE") and size // max(1, shape[0]) >= 1024:
            memory.madvise(mmap.MADV_HUGEPAGE)  # random gathers of wide rows miss the TLB less
        return np.frombuffer(memory, dtype, count=int(np.prod(shape))).reshape(shape)

    def reserve(self, stream: str, column: str, begin: int, end: int) -> None:
        """Backs bytes `[begin, end)` of a column with memory; `StoreFullError` if there is not enough."""

    def give_back(self, stream: str, column: str, array: np.ndarray, begin: int, end: int) -> None:
        """Inverts `reserve` for bytes `[begin, end)` of a column, whose array is given: nobody uses them."""
        memory: Any = array
        while type(memory) is np.ndarray:
            memory = memory.base
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < end and isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def free(self, stream: str, column: str) -> None:
        """Frees a column, if it was allocated."""

    def close(self) -> None:
        """Frees all columns."""
