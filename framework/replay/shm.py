"""Columns in shared memory: one sparse file per column, with pages reserved before they are used.

A server owns one directory of mode 0700 under `/dev/shm` (a tmpfs: the files never reach a disk). A machine
that has none (macOS) has it in the folder of temporary files, so the system may write rows to a disk:

```text
/dev/shm/repertory-<pid>-<random>/owner      locked while the owner lives
/dev/shm/repertory-<pid>-<random>/<n>        column n, [capacity, *shape] in C order
```

- A column's file has its full virtual size from the start, so that it is mapped once and never moves, but it
  holds no pages. The row store reserves pages in growing steps (`posix_fallocate`). A full tmpfs therefore
  raises a `StoreFullError` that names the bytes; a write to an unreserved page would kill the process
  (SIGBUS).
- The kernel releases the lock on `owner` when its process ends, however it ends. Every new server removes the
  directories whose lock is free.
- A process reads rows only after a message that names them, and sockets order memory: rows are whole on
  processors that reorder stores, too.
- A process that has mapped a file keeps its memory until it unmaps it, also after the owner removed the file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import shutil
import tempfile
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

import launch
from framework.replay import wire
from framework.replay.errors import ServerClosed, StoreFullError
from framework.replay.rows.allocator import Allocator, addresses
from launch import directories, platforms

PREFIX = "repertory-"


def default_root() -> str:
    """Returns `/dev/shm` if it exists, otherwise the directory for temporary files.

    In a node of a program it is the run's folder, which the launcher removes if the node was killed.
    """
    return launch.shared_memory_directory() or platforms.shared_memory_root()


class SharedMemory(Allocator):
    """The directory of one server and the columns in it; the `Allocator` of a served `RowStore`.

    Args:
      root: parent of the directory; None uses `default_root()`.

    Attributes:
      directory: the path of the directory.
    """

    def __init__(self, root: str | None = None) -> None:
        root = root or default_root()
        directories.remove_abandoned_directories(root, PREFIX)
        self._lock = threading.Lock()
        self._paths: dict[tuple[str, str], str] = {}
        self._numbers = itertools.count()
        self.directory = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root)  # mode 0700
        owner = directories.share_directory(self.directory)
        # Runs at the latest when the interpreter ends. A forked child must not remove its parent's files.
        self._finalizer = weakref.finalize(self, _remove, self.directory, owner, os.getpid())

    def allocate(self, stream: str, column: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a zeroed column of its full virtual size; the unnamed column of counts stays private."""
        if not column:
            return super().allocate(stream, column, shape, dtype)
        with self._lock:
            self._check()
            path = os.path.join(self.directory, str(next(self._numbers)))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                self._paths[stream, column] = path  # so that `free` removes it if a later step fails
                with addresses(shape, dtype):
                    os.truncate(descriptor, math.prod(shape) * dtype.itemsize)
                return _map(descriptor, shape, dtype)
            finally:
                os.close(descriptor)

    def reserve(self, stream: str, column: str, begin: int, end: int) -> None:
        """Backs bytes `[begin, end)` of a column with memory.

        Raises:
          StoreFullError: The machine's shared memory is full. The message says how much is needed and free.
        """
        if column and end > begin:
            self._check()
            back_with_memory(self._paths[stream, column], begin, end)

    def give_back(self, stream: str, column: str, array: np.ndarray, begin: int, end: int) -> None:
        """Takes the pages of bytes `[begin, end)` of a column back."""
        if column and end > begin and self._finalizer.alive:
            with open(self._paths[stream, column], "r+b") as file:
                platforms.free_pages(file.fileno(), begin, end)

    def free(self, stream: str, column: str) -> None:
        """Removes the file of a column, if there is one."""
        with self._lock:
            path = self._paths.pop((stream, column), None)
        if path is not None and self._finalizer.alive:
            with open(path, "r+b") as file:  # which clients may have mapped
                platforms.free_pages(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            os.unlink(path)

    def path(self, stream: str, column: str) -> str:
        """Returns the path of a column's file."""
        return self._paths[stream, column]

    def close(self) -> None:
        """Removes the files. The memory is freed when the last process that maps them unmaps them."""
        self._finalizer()

    def _check(self) -> None:
        if not self._finalizer.alive:
            raise ServerClosed("the server was stopped; its shared memory is gone")


class MappedStore:
    """A client's view of the rows of a server on its machine. Several threads may use it.

    Args:
      server: the server's name, a new one after each restart.
      directory: where its columns are; empty if it offers no memory. Its name is random, so that no other
        machine has it.

    Attributes:
      local: whether this process can map the server's columns (same machine, same user).
      streams: the streams mapped so far; they have what a `Binding` needs of a `Stream` to gather.
    """

    def __init__(self, server: str, directory: str) -> None:
        self.server = server
        self.directory = directory
        self.local = False
        with contextlib.suppress(OSError):  # on another machine, or of another user
            if directory:
                directories.check_private(directory)
                self.local = True
        self.streams: dict[str, types.SimpleNamespace] = {}
        self._lock = threading.Lock()

    def column(self, stream: str, column: str, path: str, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Returns a column, which the first call maps."""
        with self._lock:
            new = types.SimpleNamespace(name=stream, columns={}, paths={})
            found = self.streams.setdefault(stream, new)
            columns, mapped = found.columns, found.paths
            if mapped.get(column) != path:  # a new one of that name
                array = attach(path, shape, wire.parse_dtype(dtype, f"column {column!r}"))
                mapped[column], columns[column] = path, array
            return columns[column]


def attach(path: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Maps a column of another process, readable and writable.

    Args:
      path: the column's file.
      shape: `[capacity, ...]`.
      dtype: the column's dtype.

    Raises:
      OSError: The file was removed, because its server ended.
      ValueError: The file is smaller than the shape.
    """
    dtype, shape = np.dtype(dtype), tuple(shape)
    with open(path, "r+b") as file:
        found, size = os.fstat(file.fileno()).st_size, math.prod(shape) * dtype.itemsize
        if found < size:
            raise ValueError(f"{path}: got {found} bytes, expected {size} for {shape} of {dtype}.")
        return _map(file.fileno(), shape, dtype)


def back_with_memory(path: str, begin: int, end: int) -> None:
    """Backs bytes `[begin, end)` of a file with memory: a write to a full tmpfs would kill the process.

    Raises:
      StoreFullError: The machine's shared memory is full. The message says how much is needed and free.
    """
    with open(path, "r+b") as file:
        try:
            platforms.reserve(file.fileno(), begin, end)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            status = os.statvfs(path)
            raise StoreFullError(
                f"shared memory is full: {end - begin} more bytes are needed and "
                f"{status.f_bavail * status.f_frsize} are free for {path}. Enlarge it (docker run "
                "--shm-size, mount -o remount,size=), make the tables smaller (max_size) or set max_bytes."
            ) from None


def _remove(directory: str, owner: int, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(owner)


def _map(descriptor: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = math.prod(shape)
    if count * dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    with addresses(shape, dtype):
        return np.frombuffer(platforms.map_file(descriptor, count * dtype.itemsize), dtype).reshape(shape)
