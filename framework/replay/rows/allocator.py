"""Memory for the columns of a row store."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from framework.replay.errors import StoreFullError

# Python has the flag since 3.13. The number is Linux's; on macOS the flag has no effect.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_HUGE_PAGE = 2 << 20
_SMALL = 1 << 14  # bytes; smaller arrays come from malloc


def zeros(shape: tuple[int, ...], dtype: np.dtype, huge: bool) -> np.ndarray:
    """Returns an array of zeros whose pages take no memory before they are written.

    Args:
      shape: of the array.
      dtype: of the array.
      huge: whether pages may be of two MiB, which random reads of large arrays find faster.
    """
    count = int(np.prod(shape))
    size = max(1, count * dtype.itemsize)
    if size <= _SMALL:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    if huge and size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count=count).reshape(shape)


@contextlib.contextmanager
def addresses(shape: tuple[int, ...], dtype: np.dtype) -> Iterator[None]:
    """Raises a clear error if a column is too large for the addresses of this process, or for a file."""
    try:
        yield
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EFBIG):
            raise
        raise StoreFullError(
            f"{shape[0]} rows of {dtype}{list(shape[1:])} take {math.prod(shape) * dtype.itemsize} bytes of "
            f"addresses, more than there are ({error}). Raise the limits of the process (ulimit -v, -f), or "
            "give RowStore a smaller capacity. A stream of wide rows has fewer of them if its widest columns "
            "are in the first append."
        ) from None


class Allocator:
    """Allocates columns in this process's own memory, which the kernel commits when it is first touched."""

    def allocate(self, stream: str, column: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a zeroed array of `shape` (rows first), whose pages need not be backed by memory yet."""
        with addresses(shape, dtype):
            return zeros(shape, dtype, huge=math.prod(shape[1:]) * dtype.itemsize >= 1024)

    def reserve(self, stream: str, column: str, begin: int, end: int) -> None:
        """Backs bytes `[begin, end)` of a column with memory; `StoreFullError` if there is not enough."""

    def give_back(self, stream: str, column: str, array: np.ndarray, begin: int, end: int) -> None:
        """Inverts `reserve` for bytes `[begin, end)`, not in use, of a column whose array is given."""
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
