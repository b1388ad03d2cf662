"""The row store: one preallocated column per leaf, rows leased to writers and counted by reference.

```python
stream = store.stream("steps", {"observation": ((4,), np.float32), "reward": ((), np.float32)})
rows = stream.lease(256)                      # int64[256]; the writer holds one reference to each
stream.write("reward", rows, rewards)
stream.acquire(rows)                          # an item refers to them
stream.release(rows)                          # the writer does not need them any more
stream.release(rows)                          # the item was removed: the rows are free again
```

Columns are virtual memory of a generous capacity. Physical memory grows in steps with the rows in use. Rows
that were freed last are leased first, so that memory stays near the peak of rows in use.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from framework.replay.errors import StoreFullError
from framework.replay.rows.allocator import Allocator, zeros
from framework.replay.rows.compression import CompressedColumn

# Bytes of addresses of one stream of wide rows: more than a machine has memory, but far less than the 128 TiB
# of addresses that a process has, and less than the largest file of some file systems. After each
# `_STREAMS` streams it is halved, so that arrays of thousands of shapes find a place, each in its stream.
_MAX_STREAM_BYTES, _LEAST_STREAM_BYTES, _STREAMS = 1 << 42, 1 << 34, 8
_ONE = np.array(1, np.int32)  # numpy takes several times longer to convert a scalar

_Made = TypeVar("_Made")
# (shape of one row, dtype) of a column.
ColumnSpec = tuple[tuple[int, ...], Any]


def grown(array: np.ndarray, size: int, to: int | None = None) -> np.ndarray:
    """Returns `array`, or a copy with zeros at its end if it has less than `size` entries.

    The copy has `to` entries, or at least eight times as many as before: those that are not used take no
    memory.
    """
    if size <= len(array):
        return array
    to = max(size, 8 * len(array)) if to is None else to
    longer = zeros((to, *array.shape[1:]), array.dtype, huge=True)
    longer[: len(array)] = array
    return longer


def bytes_of(columns: Mapping[str, ColumnSpec]) -> int:
    """Returns the bytes of one row of these columns."""
    return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in columns.values())


def span(numbers: np.ndarray) -> slice | np.ndarray:
    """Returns a slice if `numbers` are consecutive, which copies several times faster; else `numbers`."""
    n = len(numbers)
    if not n:
        return numbers
    begin = int(numbers[0])
    if n > 1 and (int(numbers[-1]) - begin != n - 1 or np.count_nonzero(numbers[1:] > numbers[:-1]) != n - 1):
        return numbers
    return slice(begin, begin + n)


def _names_like(name: str) -> Iterator[str]:
    """Yields `name`, then names for others of that name: `name~2`, `name~3`, and so on."""
    yield name
    for number in itertools.count(2):
        yield f"{name}~{number}"


class Stream:
    """One row space. All methods may be called from several threads.

    Attributes:
      columns: arrays `[capacity, ...]` by name; `CompressedColumn` where `RowStore` compresses.
      specs: shape of one row and dtype of each column.
      num_leased: number of rows that were ever in use. They are the first rows.
      num_reserved: number of rows that have memory.
      row_bytes: bytes of one row over all columns that are not compressed, its reference count included.
      kept: the columns that stay when no client has declared them.
    """

    def __init__(self, name: str, store: RowStore):
        self.name = name
        self.kept: set[str] = set()
        self.capacity = store.capacity
        self.columns: dict[str, Any] = {}
        self.specs: dict[str, ColumnSpec] = {}
        self._compressed: list[CompressedColumn] = []
        self._store = store
        self._lock = store.lock
        # References to each row: of a writer that holds it, and of items.
        self._counts = store.allocator.allocate(name, "", (self.capacity,), np.dtype(np.int32))
        self._free = np.empty(1024, np.int64)  # a stack
        self._num_free = 0
        self.num_leased = 0
        self.num_reserved = 0
        self.row_bytes = 4

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self.num_leased - self._num_free

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays `[capacity, ...]` of the columns that are not compressed, and of the counts."""
        return [*(array for array in self.columns.values() if type(array) is np.ndarray), self._counts]

    def declare(self, columns: Mapping[str, ColumnSpec]) -> dict[str, str]:
        """Adds the columns that the stream does not have.

        Returns:
          `{name: the stream's name}`. The two differ if the stream has a different column of that name.

        Raises:
          ValueError: A dtype is not supported.
          StoreFullError: There is no room.
        """
        names = {}
        with self._lock:
            if not self.specs:  # the first columns decide
                self.capacity = self._store.rows_of(columns)
            for name, (shape, kind) in columns.items():
                spec = (tuple(shape), np.dtype(kind))
                own = next(each for each in _names_like(name) if self.specs.get(each, spec) == spec)
                if own not in self.columns:
                    column = self._store.with_room(self._make, own, *spec)
                    # Both at once: an interrupt leaves no column without its spec.
                    self.columns[own], self.specs[own] = column, spec
                names[name] = own
        return names

    def _make(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        if dtype.hasobject:
            raise ValueError(
                f"stream {self.name!r}, column {name!r}: got dtype {dtype}, expected numbers, booleans or "
                "strings of fixed width."
            )
        store = self._store
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in store.compress):
            packed = CompressedColumn(
                (self.capacity, *shape), dtype, lambda num_bytes: store.account(self.name, num_bytes)
            )
            self._compressed.append(packed)
            return packed
        bytes_per_row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        num_bytes = bytes_per_row * self.num_reserved
        store.account(self.name, num_bytes)
        try:
            array = store.allocator.allocate(self.name, name, (self.capacity, *shape), dtype)
            store.allocator.reserve(self.name, name, 0, num_bytes)
        except BaseException:
            store.account(self.name, -num_bytes)
            store.allocator.free(self.name, name)
            raise
        self.row_bytes += bytes_per_row
        return array

    def drop(self, column: str) -> None:
        """Removes a column that is no longer in use."""
        with self._lock:
            array, _ = self.columns.pop(column), self.specs.pop(column)
            if type(array) is CompressedColumn:
                self._compressed.remove(array)
                return
            self.row_bytes -= array[:1].nbytes
            self._store.account(self.name, -self.num_reserved * array[:1].nbytes)
            self._store.allocator.free(self.name, column)

    def trim(self) -> int:
        """Gives back the memory of the rows after the last one in use; returns how many bytes these had."""
        with self._lock:
            used = np.flatnonzero(self._counts[: self.num_leased])
            end, reserved = int(used[-1]) + 1 if len(used) else 0, self.num_reserved
            if end == reserved:
                return 0
            free = self._free[: self._num_free]
            free = free[free < end]
            self._free[: len(free)] = free
            # First: rows that are given back must never count as reserved, even after an interrupt.
            self._num_free, self.num_leased, self.num_reserved = len(free), min(end, self.num_leased), end
            for name, array in self.columns.items():
                if type(array) is not CompressedColumn:
                    size = array[:1].nbytes
                    self._store.allocator.give_back(self.name, name, array, end * size, reserved * size)
            num_bytes = (reserved - end) * self.row_bytes
            self._store.account(self.name, -num_bytes)
            return num_bytes

    def lease(self, n: int) -> np.ndarray:
        """Returns `n` rows for a writer, int64 `[n]`; `StoreFullError` if there is no room."""
        with self._lock:
            if self.num_leased + n - self._num_free > self.num_reserved:
                self._store.with_room(self._reserve, n)
            reused = min(n, self._num_free)
            begin, fresh = self._num_free - reused, n - reused
            rows = self._free[begin : self._num_free].copy()
            if fresh:
                rows = np.concatenate([rows, np.arange(self.num_leased, self.num_leased + fresh)])
                self.num_leased += fresh
            self._num_free = begin
            self._counts[rows] = _ONE
        return rows

    def write(self, column: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Copies `values [n, ...]` into `rows`, which the caller has leased.

        Raises:
          ValueError: The values have another dtype or shape than the column.
        """
        array = self.columns[column]
        if values.dtype != array.dtype or values.shape != (len(rows), *array.shape[1:]):
            raise ValueError(
                f"stream {self.name!r}, column {column!r}: got {values.dtype}{list(values.shape)}, expected "
                f"{array.dtype}{[len(rows), *array.shape[1:]]}."
            )
        array[span(rows)] = values

    def acquire(self, rows: np.ndarray) -> None:
        """Counts one more reference to each of `rows`, which may repeat and which the caller holds."""
        at = span(rows)
        with self._lock:
            if type(at) is slice:
                self._counts[at] += _ONE
            else:
                np.add.at(self._counts, rows, _ONE)

    def release(self, rows: np.ndarray) -> None:
        """Removes one reference to each of `rows`, which may repeat; rows without references are free."""
        at = span(rows)
        with self._lock:
            if type(at) is slice:
                self._counts[at] -= _ONE
            else:
                np.subtract.at(self._counts, rows, _ONE)
            left = self._counts[at]
            count = len(rows) - np.count_nonzero(left)
            if not count:
                return
            free = rows.copy() if count == len(rows) else rows[left == 0]
            if type(at) is not slice:
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

    def _reserve(self, n: int) -> None:
        """Backs enough rows with memory to lease `n`. Called with the lock held."""
        rows = self.num_leased + n - self._num_free
        if rows > self.capacity:
            raise StoreFullError(
                f"stream {self.name!r}: got a need for {rows} rows at once, expected at most the capacity, "
                f"{self.capacity}. Remove items sooner (max_size), or give RowStore a larger capacity."
            )
        # Beside compressed columns the rest is small, and must not take the room that they need.
        megabyte = 0 if self._compressed else (1 << 20) // self.row_bytes
        step = max(256 if self._compressed else 1, megabyte, self.num_reserved // 8)
        target = min(self.capacity, max(rows, self.num_reserved + step))
        target = max(rows, min(target, self.num_reserved + self._store.room() // self.row_bytes))
        num_bytes = (target - self.num_reserved) * self.row_bytes
        self._store.account(self.name, num_bytes)
        try:
            for name, array in self.columns.items():
                if type(array) is not CompressedColumn:  # which takes memory when it is written
                    size = array[:1].nbytes
                    self._store.allocator.reserve(self.name, name, self.num_reserved * size, target * size)
        except BaseException:
            self._store.account(self.name, -num_bytes)
            raise
        self.num_reserved = target


class RowStore:
    """The streams that a server's tables refer to.

    Args:
      max_bytes: physical memory that all rows together may take; None for no limit but the machine's.
      allocator: allocates the columns; None uses this process's own memory.
      capacity: rows that one stream can address; virtual, so it costs nothing until it is used. Streams of
        wide rows, from 64 KiB on, can address 4 TiB, and half of it after each eight streams, down to 16 GiB.
      compress: patterns, as of file names, of columns whose rows are kept compressed: `("*pixels*",)`;
        `framework.replay.rows.compression` says when that pays. They are in this process's memory, whatever
        the allocator.

    Attributes:
      streams: by name.
      num_bytes: physical memory reserved for rows, in bytes.
      lock: guards the streams, too.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        allocator: Allocator | None = None,
        capacity: int = 1 << 26,
        compress: Sequence[str] = (),
    ):
        if isinstance(compress, str):
            raise ValueError(f"compress: got the string {compress!r}, expected a sequence: ({compress!r},).")
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"max_bytes: got {max_bytes}, expected a positive number of bytes or None.")
        self.allocator = allocator or Allocator()
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.compress = tuple(compress)
        self.streams: dict[str, Stream] = {}
        self.num_bytes = 0
        self._numbers = itertools.count(2)
        self._has_dropped = False
        self.lock = threading.RLock()

    def stream(self, name: str, columns: Mapping[str, ColumnSpec] | None = None) -> Stream:
        """Returns the stream `name`, which the first call creates.

        Args:
          name: name of the stream.
          columns: `{name: (shape of one row, dtype)}` to add, if the stream does not have them.

        Raises:
          ValueError: The stream has a different column of one of these names.
        """
        with self.lock:
            if name not in self.streams:
                self.streams[name] = Stream(name, self)
            stream = self.streams[name]
            if any(own != column for column, own in stream.declare(columns or {}).items()):
                raise ValueError(f"stream {name!r}: got {columns}, expected {stream.specs} as before.")
            return stream

    def claim(
        self, name: str, columns: Mapping[str, ColumnSpec], stream: str | None = None, keep: bool = True
    ) -> tuple[Stream, dict[str, str]]:
        """Returns a stream for a writer that calls it `name`, with the writer's columns.

        Two writers that use one name for different columns get different streams; two that agree share one.

        Args:
          name: the writer's name of the stream.
          columns: `{the writer's name: (shape of one row, dtype)}`.
          stream: the stream that the writer has already, to which the columns are added; None for any.
          keep: whether the columns stay when this process has no writer of them; see `Holdings`.

        Returns:
          The stream, and the columns in it: `{the writer's name: the stream's name}`.
        """
        with self.lock:
            found = self._find(name, columns) if stream is None else self.streams[stream]
            names = found.declare(columns)
            if keep:
                found.kept.update(names.values())
            return found, names

    def _find(self, name: str, columns: Mapping[str, ColumnSpec]) -> Stream:
        """Returns a stream of this name, or with a number after it, that has the columns, or a new one."""
        for own, stream in self.streams.items():
            fits = not stream.specs or columns.items() <= stream.specs.items()
            if fits and (own == name or own.startswith(f"{name}~")):
                return stream
        own = name
        # Clients and items may still know the name of a stream that was dropped: no other ever gets it.
        while own in self.streams or (self._has_dropped and own == name):
            own = f"{name}~{next(self._numbers)}"
        return self.stream(own)

    def drop(self, stream: Stream) -> None:
        """Removes a stream without rows that is no longer in use, with its columns."""
        with self.lock:
            for column in list(stream.columns):
                stream.drop(column)
            stream.trim()
            self.streams.pop(stream.name, None)
            self._has_dropped = True

    def with_room(self, reserve: Callable[..., _Made], *arguments: Any) -> _Made:
        """Calls `reserve`; if there is no room, streams first give back the memory that they do not use."""
        try:
            return reserve(*arguments)
        except StoreFullError:
            if not sum([stream.trim() for stream in self.streams.values()]):
                raise
        return reserve(*arguments)

    def rows_of(self, columns: Mapping[str, ColumnSpec]) -> int:
        """Returns how many rows a new stream with these columns can address: fewer if they are wide."""
        row_bytes = bytes_of(columns)
        addresses = max(_LEAST_STREAM_BYTES, _MAX_STREAM_BYTES >> len(self.streams) // _STREAMS)
        return min(self.capacity, max(1, addresses // max(1, row_bytes)))

    def room(self) -> int:
        """Returns the bytes that may still be reserved."""
        return (1 << 62) if self.max_bytes is None else max(0, self.max_bytes - self.num_bytes)

    def account(self, stream: str, num_bytes: int) -> None:
        """Adds `num_bytes` to `self.num_bytes`; `StoreFullError` if that exceeds `max_bytes`."""
        with self.lock:
            if num_bytes > self.room():
                raise StoreFullError(
                    f"stream {stream!r}: {num_bytes} more bytes of rows are needed, {self.num_bytes} of "
                    f"max_bytes={self.max_bytes} are in use. Lower max_size of the tables or raise max_bytes."
                )
            self.num_bytes += num_bytes

    def close(self) -> None:
        """Frees the columns."""
        self.allocator.close()
