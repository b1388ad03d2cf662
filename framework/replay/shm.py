"""Columns in shared memory: one sparse file per column, its pages reserved before anybody may touch them.

A server owns one directory of mode 0700 under ``/dev/shm`` (a tmpfs: the files never reach a disk)::

    /dev/shm/repertory-<pid>-<random>/owner      locked for as long as the owner lives
    /dev/shm/repertory-<pid>-<random>/<n>        column n, [capacity, *shape] in C order
    /dev/shm/repertory-<pid>-<random>/control    the server's socket

- A column's file has its full virtual size from the start, so that it is mapped once and never moves, but holds no
  pages. ``Column.reserve`` takes pages in growing steps with ``posix_fallocate``: a full tmpfs is a `MemoryError` that
  names the bytes, where a write to an unreserved page would kill the process with SIGBUS.
- The kernel drops the lock on ``owner`` when its process ends, however it ends. `remove_stale` takes away the
  directories whose lock nobody holds; every new server calls it. A recycled process id cannot confuse it.
- Who has a file mapped keeps its memory until the mapping goes, also after the owner removed the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

PREFIX = "repertory-"
_STEP_BYTES = 1 << 20  # the smallest step in which pages are taken
_GROWTH = 8  # a column grows by at least 1/8 of what it holds: few calls, at most 12.5% to spare

_owned: set[str] = set()
_owned_lock = threading.Lock()


def default_root() -> str:
    """``/dev/shm`` where there is one, otherwise the directory for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


class Column:
    """One column ``[capacity, *shape]`` in shared memory; made by `SharedMemory.column`.

    Attributes:
      array: the whole column; only rows below ``reserved_rows`` may be touched.
      path: the file that other processes map with `attach`.
    """

    def __init__(
        self, memory: SharedMemory, path: str, capacity: int, shape: Sequence[int], dtype: Any
    ) -> None:
        self._memory = memory
        self.path = path
        self.row_bytes = int(np.prod(tuple(shape), dtype=np.int64)) * np.dtype(dtype).itemsize
        self.capacity = capacity
        self._reserved = 0
        size = max(1, capacity * self.row_bytes)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, size)
        self.array = _map(self._file, size, (capacity, *shape), dtype)

    @property
    def reserved_bytes(self) -> int:
        """How many bytes of memory this column holds."""
        return self._reserved

    @property
    def reserved_rows(self) -> int:
        """How many rows, from row 0, may be touched."""
        return self.capacity if self.row_bytes == 0 else min(self.capacity, self._reserved // self.row_bytes)

    def reserve(self, rows: int) -> None:
        """Makes sure that rows ``0 … rows - 1`` have memory.

        Raises:
          MemoryError: the shared memory of the machine, or the budget of the server, is used up. Nothing changed.
        """
        if rows > self.capacity:
            raise MemoryError(f"{self.path}: {rows} rows asked for, its capacity is {self.capacity}")
        need = rows * self.row_bytes
        if need <= self._reserved:
            return
        whole = self.capacity * self.row_bytes
        least = need - self._reserved
        step = max(least, _STEP_BYTES, self._reserved // _GROWTH)
        step = self._memory.take(min(step, whole - self._reserved), least)
        for size in (step, least):  # a machine that is nearly full may still have what is needed now
            try:
                _allocate(self._file, self._reserved, size, self.path)
                break
            except MemoryError:
                if size == least:
                    self._memory.take_back(step)
                    raise
        self._memory.take_back(step - size)
        self._reserved += size

    def close(self) -> None:
        """Closes the file; the mapping stays for as long as somebody looks at ``array``."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemory:
    """The directory of one server and the columns in it.

    Args:
      max_bytes: budget of all columns together; None leaves it to the machine.
      root: where to make the directory; `default_root` unless given.
    """

    def __init__(self, max_bytes: int | None = None, root: str | None = None) -> None:
        root = root or default_root()
        remove_stale(root)
        self.max_bytes = max_bytes
        self._used = 0
        self._lock = threading.Lock()
        self._columns: list[Column] = []
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

    def column(self, capacity: int, shape: Sequence[int], dtype: Any) -> Column:
        """A new column of ``capacity`` rows without memory yet."""
        with self._lock:
            path = os.path.join(self.directory, str(len(self._columns)))
            column = Column(self, path, capacity, shape, dtype)
            self._columns.append(column)
        return column

    @property
    def used_bytes(self) -> int:
        """How many bytes all columns hold."""
        return self._used

    def take(self, wanted: int, least: int) -> int:
        """Books up to ``wanted`` and at least ``least`` bytes of the budget; MemoryError if they are not there."""
        with self._lock:
            left = wanted if self.max_bytes is None else self.max_bytes - self._used
            if left < least:
                raise MemoryError(
                    f"the replay store needs {least} more bytes: it holds {self._used} of max_bytes="
                    f"{self.max_bytes}; raise max_bytes or make the tables smaller (max_size)"
                )
            step = min(wanted, left)
            self._used += step
            return step

    def take_back(self, step: int) -> None:
        """Undoes a `take` whose memory the machine refused."""
        with self._lock:
            self._used -= step

    def close(self) -> None:
        """Removes the files. Memory comes back when the last process that has mapped them lets go."""
        with self._lock:
            for column in self._columns:
                column.close()
            self._columns.clear()
        self._finalizer()


def attach(path: str, capacity: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Maps a column of another process, readable and writable: ``[capacity, *shape]``.

    Raises:
      OSError: the file is gone (its server ended) or belongs to another user.
      ValueError: the file is smaller than the shape says.
    """
    dtype = np.dtype(dtype)
    size = max(1, capacity * int(np.prod(tuple(shape), dtype=np.int64)) * dtype.itemsize)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file).st_size
        if found < size:
            raise ValueError(
                f"{path}: holds {found} bytes, {size} expected for {(capacity, *shape)} of {dtype}"
            )
        return _map(file, size, (capacity, *shape), dtype)
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
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _remove(directory: str, owner: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(owner)
    with _owned_lock:
        _owned.discard(directory)


def _map(file: int, size: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    mapping = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if count * dtype.itemsize == 0:
        return np.zeros(shape, dtype)
    return np.frombuffer(mapping, dtype, count).reshape(shape)


def _allocate(file: int, offset: int, size: int, path: str) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS: writing is the only way to learn that the disk is full
        os.pwrite(file, b"\0" * size, offset)
        return
    try:
        os.posix_fallocate(file, offset, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        status = os.statvfs(os.path.dirname(path))
        raise MemoryError(
            f"shared memory is full: {size} more bytes are needed and {status.f_bavail * status.f_frsize} are free "
            f"in {os.path.dirname(os.path.dirname(path))}; enlarge it (docker run --shm-size, mount -o "
            "remount,size=), make the tables smaller (max_size) or set max_bytes"
        ) from None
