"""The row store: one preallocated column per leaf, rows leased to writers and counted by reference.

```python
stream = store.stream("steps", {"observation": ((4,), np.float32), "reward": ((), np.float32)})
rows = stream.lease(256)                      # int64[256]; the writer holds one lease on each
stream.write("reward", rows, rewards)
stream.acquire(rows)                          # an item points at them
stream.release(rows)                          # the writer is done with them
stream.drop(rows)                             # the item is gone: the rows are free again
```

Columns are virtual memory of a generous capacity; physical memory follows the rows that were ever in use, in
growing
steps. Freed rows are used again last-freed-first, so that this stays near the peak of rows alive.
"""

from __future__ import annotations

import collections
import fnmatch
import mmap
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from framework.replay.errors import StoreFullError
from framework.replay.rows.arrays import grown, span
from framework.replay.rows.compression import CompressedColumn

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGE = 2 << 20
_ONE = np.int32(1)

ColumnSpec = tuple[tuple[int, ...], Any]


class Allocator(Protocol):
    """Where columns live."""

    def allocate(self, stream: str, column: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A zeroed array of `shape` (rows first), whose pages need not be backed by memory yet."""

    def reserve(self, stream: str, column: str, begin: int, end: int) -> None:
        """Makes sure that bytes `[begin, end)` of the column can be written; StoreFullError if not."""

    def free(self, stream: str, column: str) -> None:
        """Frees a column, if it was allocated."""

    def close(self) -> None:
        """Frees what was allocated."""


class MemoryAllocator:
    """Columns in this process's own memory, committed by the kernel when first touched."""

    def allocate(self, stream: str, column: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = max(1, int(np.prod(shape)) * dtype.itemsize)
        if not hasattr(mmap, "MAP_PRIVATE"):
            return np.zeros(shape, dtype)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, size, flags=flags)
        except (OSError, OverflowError) as error:
            raise StoreFullError(
                f"stream {stream!r}, column {column!r}: the address space does not hold {size} bytes for "
                f"{shape[0]} rows ({error}); give RowStore a smaller capacity"
            ) from error
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE") and size // max(1, shape[0]) >= 1024:
            memory.madvise(mmap.MADV_HUGEPAGE)  # random gathers of wide rows miss the TLB less
        return np.frombuffer(memory, dtype, count=int(np.prod(shape))).reshape(shape)

    def reserve(self, stream: str, column: str, begin: int, end: int) -> None:
        return None

    def free(self, stream: str, column: str) -> None:
        return None

    def close(self) -> None:
        return None


class Stream:
    """One row space. All methods may be called from several threads.

    Attributes:
      row_bytes: bytes of one row over all columns that are not compressed, its reference count included.
    """

    def __init__(self, name: str, store: RowStore, capacity: int):
        self.name = name
        self.capacity = capacity
        self._end = np.array(capacity, np.uint64)  # an array compares faster than a number
        self.columns: dict[str, Any] = {}  # np.ndarray, or CompressedColumn where that was asked for
        self._compressed: list[CompressedColumn] = []
        self._store = store
        self._lock = threading.Lock()
        self._counts = store.allocator.allocate(
            name, "", (capacity,), np.dtype(np.int32)
        )  # leases + references
        self._free = np.empty(1024, np.int64)  # a stack
        self._num_free = 0
        self._next = 0  # rows from here on were never leased
        self._reserved = 0
        self.row_bytes = 4

    @property
    def num_rows(self) -> int:
        """Rows in use: leased or referenced."""
        return self._next - self._num_free

    def add_columns(self, columns: Mapping[str, ColumnSpec]) -> None:
        """Declares columns `{name: (shape of one row, dtype)}`; ValueError if one exists and differs."""
        with self._lock:
            for name, (shape, dtype) in columns.items():
                shape, dtype = tuple(int(size) for size in shape), np.dtype(dtype)
                have = self.columns.get(name)
                if have is not None:
                    if have.shape[1:] != shape or have.dtype != dtype:
                        raise ValueError(
                            f"stream {self.name!r}, column {name!r}: got {dtype}{list(shape)} but it "
                            "was declared as "
                            f"{have.dtype}{list(have.shape[1:])}; write it to another stream or cast it"
                        )
                    continue
                if dtype.hasobject:
                    raise ValueError(
                        f"stream {self.name!r}, column {name!r}: got dtype {dtype}; rows hold "
                        "numbers, booleans and "
                        "strings of fixed width only"
                    )
                if self._store.compresses(name):
                    packed = CompressedColumn((self.capacity, *shape), dtype, self._account)
                    self._compressed.append(packed)
                    self.columns[name] = packed
                    continue
                bytes_per_row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                if self._reserved:
                    self._store.account(self.name, bytes_per_row * self._reserved)
                try:
                    array = self._store.allocator.allocate(self.name, name, (self.capacity, *shape), dtype)
                    if self._reserved:
                        self._store.allocator.reserve(self.name, name, 0, bytes_per_row * self._reserved)
                except BaseException:
                    self._store.account(self.name, -bytes_per_row * self._reserved)
                    self._store.allocator.free(self.name, name)
                    raise
                self.row_bytes += bytes_per_row
                self.columns[name] = array

    def has(self, columns: Mapping[str, ColumnSpec]) -> bool:
        """Whether the stream has all of these columns, with these shapes and dtypes."""
        return all(
            name in self.columns
            and (self.columns[name].shape[1:], self.columns[name].dtype) == (tuple(shape), np.dtype(dtype))
            for name, (shape, dtype) in columns.items()
        )

    def claim(self, columns: Mapping[str, ColumnSpec]) -> dict[str, str]:
        """Columns with these shapes and dtypes, added where there are none: `{the writer's name: column}`.

        The two names differ if another writer has a different column of that name.
        """
        names = {}
        for name, spec in columns.items():
            column, number = name, 1
            while column in self.columns and not self.has({column: spec}):
                number += 1
                column = f"{name}~{number}"
            self.add_columns({column: spec})
            names[name] = column
        return names

    def lease(self, n: int) -> np.ndarray:
        """`n` rows for a writer, int64 `[n]`; StoreFullError if there is no room, and then none."""
        with self._lock:
            reused = min(n, self._num_free)
            if n - reused > self._reserved - self._next:
                self._reserve(self._next + n - reused)
            begin = self._num_free - reused
            if reused == n:
                rows = self._free[begin : begin + n].copy()
            else:
                rows = np.empty(n, np.int64)
                rows[:reused] = self._free[begin : begin + reused]
                rows[reused:] = np.arange(self._next, self._next + n - reused)
                self._next += n - reused
            self._num_free = begin
            self._counts[rows] = _ONE
        return rows

    def write(self, column: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Copies `values [n, ...]` into `rows`, which the caller has leased; ValueError for another dtype
        or shape."""
        array = self.columns[column]
        if values.dtype != array.dtype or values.shape != (len(rows), *array.shape[1:]):
            raise ValueError(
                f"stream {self.name!r}, column {column!r}: got {values.dtype}{list(values.shape)}, expected "
                f"{array.dtype}{[len(rows), *array.shape[1:]]}"
            )
        array[span(rows)] = values

    def acquire(self, rows: np.ndarray) -> None:
        """An item points at each of `rows` once more (repeats allowed); IndexError if one is out of range."""
        with self._lock:
            if np.count_nonzero(rows.view(np.uint64) >= self._end):  # negative ones are huge
                raise self._out_of_range(rows)
            np.add.at(self._counts, rows, _ONE)

    def drop(self, rows: np.ndarray) -> None:
        """The opposite of `acquire`; rows that have no lease and no item are free. IndexError as there."""
        with self._lock:
            if np.count_nonzero(rows.view(np.uint64) >= self._end):  # negative ones are huge
                raise self._out_of_range(rows)
            np.subtract.at(self._counts, rows, _ONE)
            over = self._counts.take(rows) == 0
            count = np.count_nonzero(over)
            if not count:
                return
            free = rows.copy() if count == len(rows) else rows[over]
            free.sort()  # so that the next lease gets consecutive rows
            new = free[1:] != free[:-1]
            if np.count_nonzero(new) < count - 1:
                free = np.concatenate([free[:1], free[1:][new]])  # several times faster than numpy.unique
            end = self._num_free + len(free)
            if end > len(self._free):
                self._free = grown(self._free, end)
            self._free[self._num_free : end] = free
            self._num_free = end
            for column in self._compressed:
                column.clear(free)

    release = drop  # a lease is one more reference

    def _out_of_range(self, rows: np.ndarray) -> IndexError:
        return IndexError(
            f"stream {self.name!r}, rows: got {rows.min()} to {rows.max()}, expected 0 to {self.capacity - 1}"
        )

    def _account(self, num_bytes: int) -> None:
        self._store.account(self.name, num_bytes)

    def _reserve(self, rows: int) -> None:
        """Backs at least `rows` rows with memory. Called with the lock held."""
        if rows > self.capacity:
            raise StoreFullError(
                f"stream {self.name!r}: {rows} rows are needed at once and its capacity is "
                f"{self.capacity}; remove "
                "items sooner (max_size), or give RowStore a larger capacity"
            )
        # Beside compressed columns the rest is small, and must not take the room that they need.
        megabyte = 0 if self._compressed else (1 << 20) // self.row_bytes
        step = max(256, megabyte, self._reserved // 8)
        target = min(self.capacity, max(rows, self._reserved + step))
        target = max(rows, min(target, self._reserved + self._store.room() // self.row_bytes))
        self._store.account(self.name, (target - self._reserved) * self.row_bytes)
        for name, array in self.columns.items():
            if type(array) is CompressedColumn:
                continue  # takes memory when it is written
            size = array[:1].nbytes
            self._store.allocator.reserve(self.name, name, self._reserved * size, target * size)
        self._store.allocator.reserve(self.name, "", self._reserved * 4, target * 4)
        self._reserved = target


class RowStore:
    """The streams that a server's tables point into.

    Args:
      max_bytes: what all rows together may take of physical memory; None for no limit but the machine's.
      allocator: where columns live; this process's own memory if None.
      capacity: rows that one stream can address; virtual, so it costs nothing until it is used.
      compress: patterns, as of file names, of columns whose rows are kept compressed: `("*pixels*",)`;
        `framework.replay.rows.compression` says when that pays. They are in this process's memory, whatever
        the allocator.

    Attributes:
      num_bytes: physical memory reserved for rows, in bytes.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        allocator: Allocator | None = None,
        capacity: int = 1 << 26,
        compress: Sequence[str] = (),
    ):
        if isinstance(compress, str):
            raise ValueError(f"compress: got the string {compress!r}, expected a sequence: ({compress!r},)")
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"max_bytes: got {max_bytes}, expected a positive number of bytes or None")
        self.allocator: Allocator = allocator or MemoryAllocator()
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.compress = tuple(compress)
        self.streams: dict[str, Stream] = {}
        self.num_bytes = 0
        #: Writers that were dropped without `close`; the next writer or reader ends them.
        self.dropped_writers: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()
        self._claims = threading.Lock()

    def stream(self, name: str, columns: Mapping[str, ColumnSpec] | None = None) -> Stream:
        """The stream `name`, made on first use; `columns` are declared if it has not got them yet."""
        stream = self.streams.get(name)
        if stream is None:
            with self._lock:
                stream = self.streams.get(name)
                if stream is None:
                    stream = self.streams[name] = Stream(name, self, self.capacity)
        if columns:
            stream.add_columns(columns)
        return stream

    def claim(
        self, name: str, columns: Mapping[str, ColumnSpec], stream: str | None = None
    ) -> tuple[Stream, dict[str, str]]:
        """A stream for a writer that calls it `name`, with the writer's columns.

        Streams belong to writers: two that use one name for different columns get different streams, and
        two that agree share one.

        Args:
          name: the writer's name of the stream.
          columns: `{the writer's name: (shape of one row, dtype)}`.
          stream: the stream that the writer has already, to which the columns are added; None for any.

        Returns:
          The stream, and the columns in it: `{the writer's name: column}`.
        """
        with self._claims:
            if stream is not None:
                found = self.streams[stream]
                return found, found.claim(columns)
            found, number = self.stream(name), 1
            while found.columns and not found.has(columns):
                number += 1
                found = self.stream(f"{name}~{number}")
            return found, found.claim(columns)

    def compresses(self, column: str) -> bool:
        """Whether the rows of `column` are kept compressed."""
        return any(fnmatch.fnmatchcase(column, pattern) for pattern in self.compress)

    def room(self) -> int:
        """Bytes that may still be reserved."""
        return (1 << 62) if self.max_bytes is None else max(0, self.max_bytes - self.num_bytes)

    def account(self, stream: str, num_bytes: int) -> None:
        """Books `num_bytes` more; StoreFullError if that is over `max_bytes`."""
        with self._lock:
            if self.max_bytes is not None and self.num_bytes + num_bytes > self.max_bytes:
                raise StoreFullError(
                    f"stream {stream!r}: {num_bytes} more bytes of rows are needed, {self.num_bytes} of "
                    "max_bytes="
                    f"{self.max_bytes} are in use; lower max_size of the tables or raise max_bytes"
                )
            self.num_bytes += num_bytes

    def close(self) -> None:
        """Frees the columns."""
        self.allocator.close()
