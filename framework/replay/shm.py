"""Columns in shared memory: one sparse file per column, its pages reserved before anybody may touch them.

A server owns one directory of mode 0700 under ``/dev/shm`` (a tmpfs: the files never reach a disk)::

    /dev/shm/repertory-<pid>-<random>/owner      locked for as long as the owner lives
    /dev/shm/repertory-<pid>-<random>/<n>        column n, [capacity, *shape] in C order
    /dev/shm/repertory-<pid>-<random>/control    the server's socket

- A column's file has its full virtual size from the start, so that it is mapped once and never moves, but
  holds no pages. The row store reserves them in growing steps with ``posix_fallocate``: a full tmpfs is a
  `StoreFullError` that names the bytes, where a write to an unreserved page would kill the process (SIGBUS).
- The kernel drops the lock on ``owner`` when its process ends, however it ends. `remove_stale` takes away the
  directories whose lock nobody holds; every new server calls it. A recycled process id cannot confuse it.
- Who has a file mapped keeps its memory until the mapping goes, also after the owner removed the file.
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
from framework.replay.rows.store import MemoryAllocator

PREFIX = "repertory-"

_owned: set[str] = set()
_owned_lock = threading.Lock()


def default_root() -> str:
    """``/dev/shm`` where there is one, otherwise the directory for temporary files.

    In a node of a program it is the run's own folder, which the launcher takes away if nobody else can.
    """
    of_this_run = launch.shared_memory_directory()
    if of_this_run is not None:
        return of_this_run
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


class Column:
    """One column in shared memory; made by `SharedMemory.allocate`.

    Attributes:
      array: the whole column; only what was reserved may be touched.
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
        """Backs the bytes ``[begin, end)`` with memory; StoreFullError if the machine has not got it."""
        begin = max(begin, self._reserved)
        if end > begin:
            _reserve(self._file, begin, end - begin, self.path)
            self._reserved = end

    def close(self) -> None:
        """Closes the file; the mapping stays for as long as somebody looks at ``array``."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemory:
    """The directory of one server and the columns in it; an `Allocator` for a `RowStore`.

    Args:
      root: where to make the directory; `default_root` unless given.
    """

    def __init__(self, root: str | None = None) -> None:
        root = root or default_root()
        remove_stale(root)
        self._lock = threading.Lock()
        self._columns: dict[tuple[str, str], Column] = {}
        self._numbers = itertools.count()
        self._private = MemoryAllocator()
        with _owned_lock:  # nobody looks for stale directories between mkdtemp and the lock
            self.directory = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root)  # mode 0700
            _owned.add(self.directory)
        self._owner = os.open(
            os.path.join(self.directory, "owner"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.lockf(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._owner, str(os.getpid()).encode())
        # Runs at the latest when the interpreter ends; a forked child must leave its parent's files alone.
        self._finalizer = weakref.finalize(self, _remove, self.directory, self._owner, os.getpid())

    def allocate(self, stream: str, column: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A zeroed column of its full virtual size; the nameless column of counts stays private."""
        if not column:
            return self._private.allocate(stream, column, shape, dtype)
        with self._lock:
            if not self._finalizer.alive:
                raise ServerClosed("the server was stopped; its shared memory is gone")
            made = Column(os.path.join(self.directory, str(next(self._numbers))), shape, np.dtype(dtype))
            self._columns[stream, column] = made
        return made.array

    def reserve(self, stream: str, column: str, begin: int, end: int) -> None:
        """Backs bytes ``[begin, end)`` of a column with memory.

        Raises:
          StoreFullError: the shared memory of the machine is used up; it says how much is needed and free.
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
        """The file of a column."""
        return self._columns[stream, column].path

    def close(self) -> None:
        """Removes the files. Memory comes back when the last process that has mapped them lets go."""
        with self._lock:
            for column in self._columns.values():
                column.close()
        self._finalizer()


def attach(path: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Maps a column of another process, readable and writable; ``shape`` has the rows first.

    Raises:
      OSError: the file is gone (its server ended) or belongs to another user.
      ValueError: the file is smaller than the shape says.
    """
    dtype, shape = np.dtype(dtype), tuple(shape)
    size = max(1, math.prod(shape) * dtype.itemsize)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file).st_size
        if found < size:
            raise ValueError(f"{path}: holds {found} bytes, {size} expected for {shape} of {dtype}")
        return _map(file, size, shape, dtype)
    finally:
        os.close(file)


def remove_stale(root: str | None = None) -> list[str]:
    """Removes what servers that were killed have left behind; returns the directories it removed."""
    root = root or default_root()
    removed = []
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if not name.startswith(PREFIX):
            continue
        with _owned_lock:
            # A lock does not keep out its own process, so this process's directories are known by name.
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
        # Its owner is between mkdir and the lock, or died there: the name says who it was.
        return not _is_alive(path)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        # Locked by nobody; a live owner that has not come to its lock yet has not written its id either.
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
    if not hasattr(os, "posix_fallocate"):  # macOS: writing is the only way to learn that the disk is full
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
            f"free in {os.path.dirname(os.path.dirname(path))}; enlarge it (docker run --shm-size, mount -o "
            "remount,size=), make the tables smaller (max_size) or set max_bytes"
        ) from None
