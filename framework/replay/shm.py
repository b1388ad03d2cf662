"""Columns in shared memory: one sparse file per column, with pages reserved before they are used.

A server owns one directory of mode 0700 under `/dev/shm` (a tmpfs: the files never reach a disk):

```text
/dev/shm/repertory-<pid>-<random>/owner      locked while the owner lives
/dev/shm/repertory-<pid>-<random>/<n>        column n, [capacity, *shape] in C order
/dev/shm/repertory-<pid>-<random>/control    the server's socket
```

- A column's file has its full virtual size from the start, so that it is mapped once and never moves, but it
  holds no pages. The row store reserves pages in growing steps with `posix_fallocate`. A full tmpfs therefore
  raises a `StoreFullError` that names the bytes; a write to an unreserved page would kill the process
  (SIGBUS).
- The kernel releases the lock on `owner` when its process ends, however it ends. `remove_stale` removes the
  directories whose lock is free; every new server calls it. It does not depend on process ids, which recur.
- A process that has mapped a file keeps its memory until it unmaps it, also after the owner removed the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

import launch
from framework.replay.errors import ServerClosed, StoreFullError
from framework.replay.rows.store import Allocator

PREFIX = "repertory-"

_owned: set[str] = set()
_owned_lock = threading.Lock()


def default_root() -> str:
    """Returns `/dev/shm` if it exists, otherwise the directory for temporary files.

    In a node of a program it is the run's folder, which the launcher removes if the node was killed.
    """
    of_this_run = launch.shared_memory_directory()
    if of_this_run is not None:
        return of_this_run
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


class Column:
    """One column in shared memory; `SharedMemory.allocate` creates it.

    Attributes:
      array: the whole column; only reserved bytes may be read or written.
      path: the file that other processes map with `attach`.
    """

    def __init__(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path = path
        size = max(1, math.prod(shape) * dtype.itemsize)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._reserved = 0
        try:
            os.ftruncate(self._file, size)
            self.array = _map(self._file, size, shape, dtype)
        except BaseException:
            self.close()
            os.unlink(path)
            raise

    def reserve(self, begin: int, end: int) -> None:
        """Backs bytes `[begin, end)` with memory.

        Raises:
          StoreFullError: The machine does not have enough shared memory.
        """
        begin = max(begin, self._reserved)
        if end > begin:
            _reserve(self._file, begin, end - begin, self.path)
            self._reserved = end

    def close(self) -> None:
        """Closes the file; the mapping stays while `array` is referenced."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemory(Allocator):
    """The directory of one server and the columns in it; the `Allocator` of a served `RowStore`.

    Args:
      root: parent of the directory; None uses `default_root()`.
    """

    def __init__(self, root: str | None = None) -> None:
        root = root or default_root()
        remove_stale(root)
        self._lock = threading.Lock()
        self._columns: dict[tuple[str, str], Column] = {}
        self._numbers = itertools.count()
        with _owned_lock:  # keeps remove_stale out between mkdtemp and the file lock
            self.directory = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root)  # mode 0700
            _owned.add(self.directory)
        self._owner = os.open(
            os.path.join(self.directory, "owner"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.lockf(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._owner, str(os.getpid()).encode())
        # Runs at the latest when the interpreter ends. A forked child must not remove its parent's files.
        self._finalizer = weakref.finalize(self, _remove, self.directory, self._owner, os.getpid())

    def allocate(self, stream: str, column: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a zeroed column of its full virtual size; the unnamed column of counts stays private."""
        if not column:
            return super().allocate(stream, column, shape, dtype)
        with self._lock:
            if not self._finalizer.alive:
                raise ServerClosed("the server was stopped; its shared memory is gone")
            made = Column(os.path.join(self.directory, str(next(self._numbers))), shape, np.dtype(dtype))
            self._columns[stream, column] = made
        return made.array

    def reserve(self, stream: str, column: str, begin: int, end: int) -> None:
        """Backs bytes `[begin, end)` of a column with memory.

        Raises:
          StoreFullError: The machine's shared memory is full. The message says how much is needed and free.
        """
        if column:
            if not self._finalizer.alive:
                raise ServerClosed("the server was stopped; its shared memory is gone")
            self._columns[stream, column].reserve(begin, end)

    def free(self, stream: str, column: str) -> None:
        """Removes the file of a column, if there is one."""
        with self._lock:
            made = self._columns.pop((stream, column), None)
        if made is not None:
            made.close()
            os.unlink(made.path)

    def path(self, stream: str, column: str) -> str:
        """Returns the path of a column's file."""
        return self._columns[stream, column].path

    def close(self) -> None:
        """Removes the files. The memory is freed when the last process that maps them unmaps them."""
        with self._lock:
            for column in self._columns.values():
                column.close()
        self._finalizer()


def attach(path: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Maps a column of another process, readable and writable.

    Args:
      path: the column's file.
      shape: `[capacity, ...]`.
      dtype: the column's dtype.

    Raises:
      OSError: The file was removed (its server ended) or belongs to another user.
      ValueError: The file is smaller than the shape.
    """
    dtype, shape = np.dtype(dtype), tuple(shape)
    size = max(1, math.prod(shape) * dtype.itemsize)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file).st_size
        if found < size:
            raise ValueError(f"{path}: got {found} bytes, expected {size} for {shape} of {dtype}.")
        return _map(file, size, shape, dtype)
    finally:
        os.close(file)


def remove_stale(root: str | None = None) -> list[str]:
    """Removes the directories of servers that were killed; returns their paths."""
    root = root or default_root()
    removed = []
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if not name.startswith(PREFIX):
            continue
        with _owned_lock:
            # A lock does not exclude its own process, so this process's directories are excluded by name.
            if path in _owned or not _is_orphan(path):
                continue
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_orphan(path: str) -> bool:
    try:
        if os.stat(path).st_uid != os.getuid():
            return False
        file = os.open(os.path.join(path, "owner"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Its owner is between mkdtemp and the lock, or died there. The name has its process id.
        return not _is_alive(path)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        # The lock is free. A live owner that does not hold its lock yet has not written its id either.
        return os.fstat(file).st_size > 0 or not _is_alive(path)
    finally:
        os.close(file)


def _is_alive(path: str) -> bool:
    pid = os.path.basename(path)[len(PREFIX) :].partition("-")[0]
    return pid.isdigit() and psutil.pid_exists(int(pid))


def _remove(directory: str, owner: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(owner)
    with _owned_lock:
        _owned.discard(directory)


def _map(file: int, size: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    mapping = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    count = math.prod(shape)
    if count * dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(mapping, dtype, count).reshape(shape)


def _reserve(file: int, offset: int, size: int, path: str) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS: only writing shows that the disk is full
        os.pwrite(file, b"\0" * size, offset)
        return
    try:
        os.posix_fallocate(file, offset, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        status = os.statvfs(os.path.dirname(path))
        raise StoreFullError(
            f"shared memory is full: {size} more bytes are needed and "
            f"{status.f_bavail * status.f_frsize} are "
            f"free in {os.path.dirname(os.path.dirname(path))}. Enlarge it (docker run --shm-size, mount -o "
            "remount,size=), make the tables smaller (max_size) or set max_bytes."
        ) from None
