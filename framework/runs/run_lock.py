"""The lock of a run's folder: one process at a time trains in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from framework.loggers.files import explained
from framework.runs import config_file

_CLOCK_S = 5.0  # Seconds by which the time of a process's start may differ.
# What `run.lock` says of the process that has it. A line of an earlier version has no folder.
_LAUNCHER = re.compile(r"(?P<pid>[0-9]{1,9})( (?P<started>[0-9]+) (?P<host>\S+)( (?P<folder>[0-9]+))?)?\s*\Z")
_QUERY = 1.0  # Seconds. `pid` in another process has the lock for a moment; a start waits that long.


class RunError(Exception):
    """Raised for a problem with a run's folder. The text says how to fix it."""


def unwritable(folder: Path, error: OSError, file: Path | None = None) -> RunError:
    """The error for a file that could not be written; has advice on the folder if it is in there.

    Args:
      folder: the folder of the run.
      error: the system's error, or one that `explained` returned.
      file: its file, if the error has none.
    """
    text = str(explained(error, error.filename or file or "a file").strerror)
    is_own = text.startswith((f"could not write {folder}{os.sep}", f"could not write {folder}:"))
    return RunError(f"{text} Or choose another folder with --directory." if is_own else text)


class RunLock:
    """The lock of the folder at `path`, in its file `run.lock`."""

    def __init__(self, path: Path):
        self.path = path

    @contextlib.contextmanager
    def held(self) -> Iterator[IO[str]]:
        """Makes the folder and locks it for this program. Raises RunError if another one trains in it.

        The lock belongs to the file that it gives: it lasts until the block ends, or until all processes that
        have the file have ended.
        """
        lock = self.path / "run.lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = self._open_lock("a+")
        except OSError as error:
            raise unwritable(self.path, error, lock) from error
        with opened as file:
            if not _lock(file, fcntl.LOCK_EX, _QUERY):
                process = "another process" if (pid := self.pid()) is None else f"process {pid}"
                stop = f"repertory stop {shlex.quote(str(self.path))}"
                raise RunError(f"{self.path} is being trained by {process}. Stop it first: {stop}")
            os.ftruncate(file.fileno(), 0)
            started, folder = psutil.Process().create_time(), self.path.stat().st_ino
            try:
                file.write(f"{os.getpid()} {started:.0f} {socket.gethostname()} {folder}\n")
                file.flush()
            except OSError as error:
                raise unwritable(self.path, error, lock) from error
            try:
                yield file
            finally:
                os.ftruncate(file.fileno(), 0)
                fcntl.flock(file, fcntl.LOCK_UN)  # A process that was forked meanwhile has the file, too.

    def pid(self) -> int | None:
        """The process that currently trains in the folder, or None."""
        found = _LAUNCHER.match(self._holder() or "")
        return int(found["pid"]) if found else None

    def _holder(self) -> str | None:
        """What the process that has the lock says of itself; None if none has it, or it begins or ends."""
        try:
            with self._open_lock("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read(1000).strip() or None
        except FileNotFoundError:
            pass
        return None

    def process(self, _looks: int = 3) -> psutil.Process | None:
        """As `pid`. The process has the lock of the folder, so that no other can be named.

        Raises:
          RunError: That process has ended, is not one of this machine, or does not have the lock.
        """
        if (holder := self._holder()) is None:
            return None
        found = _LAUNCHER.match(holder)
        if found is None or not found["host"]:
            raise RunError(f"{self.path}/run.lock: got an altered lock. Stop the process that holds it.")
        pid = int(found["pid"])
        with self._open_lock("r") as file:
            holders = _holders(file, pid)
        if found["host"] != socket.gethostname():
            raise RunError(
                f"{self.path} is being trained by process {pid} of the host {found['host']}, not of this one."
            )
        try:
            process = psutil.Process(pid)
            is_same = pid in holders and abs(process.create_time() - float(found["started"])) < _CLOCK_S
        except psutil.NoSuchProcess:
            is_same = False
        if not is_same:
            # It has ended as it should, or had given the lock back for a moment when its holders were read.
            if self._holder() != holder or _looks > 1:
                return self.process(_looks - 1)
            raise RunError(
                f"{self.path}: process {pid}, which trained in it, is not one of this machine, or has died. "
                "In that case its nodes save what they have, and end by themselves."
            )
        if int(found["folder"] or 0) != self.path.stat().st_ino:
            raise RunError(
                f"{self.path}/run.lock: got the lock of another folder. Stop the run in that one, or move "
                "the files of this one to a new folder."
            )
        return process

    def wait_until_free(self, timeout: float | None) -> bool:
        """Waits until no process trains in the folder; False after `timeout` seconds (None: no limit)."""
        with self._open_lock("r") as file:
            return _lock(file, fcntl.LOCK_SH, timeout)

    def _open_lock(self, mode: str) -> IO[str]:
        """Opens `run.lock`. A link could lead to any file of this user, or to the lock of another run."""
        path = self.path / "run.lock"
        try:
            return open(path, mode, encoding="utf-8", errors="replace", opener=config_file.no_link)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RunError(f"{path}: got a link, expected a file. Remove it.") from error
            raise


def _holders(file: IO[str], pid: int) -> set[int]:
    """The processes that have locked a file for themselves; `pid` if it has the file, without a list."""
    inode = os.fstat(file.fileno()).st_ino
    try:
        # "1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE …"
        with open("/proc/locks", encoding="ascii") as locks:
            rows = [line.split() for line in locks if "->" not in line]
        return {int(row[4]) for row in rows if row[3] == "WRITE" and row[5].endswith(f":{inode}")}
    except FileNotFoundError:
        with contextlib.suppress(psutil.Error):
            opened = [each.path for each in psutil.Process(pid).open_files()]
            if any(os.path.exists(path) and os.stat(path).st_ino == inode for path in opened):
                return {pid}
        return set()


def _lock(file: IO[str], kind: int, timeout: float | None) -> bool:
    """Locks an open file, as `fcntl.flock` does; False after `timeout` seconds (None: no limit)."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        pass
    # The lock belongs to the open file, not to a descriptor. Nothing can end the wait of the thread: if it
    # gets the lock too late, it has the last descriptor, and gives the lock back by closing it.
    descriptor = os.dup(file.fileno())
    locked = []

    def wait() -> None:
        try:
            fcntl.flock(descriptor, kind)
            locked.append(True)
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
    return bool(locked)
