"""The lock of a run's folder: one process at a time trains in it. A file in the folder asks it to stop."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from framework.loggers.files import explained
from framework.runs import config_file

_LOOK_S = 0.2  # The system tells neither of a free lock nor of a new file, so they are looked for.
_QUERY_S = 1.0  # `pid` in another process has the lock for a moment. A start waits that long.


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
    """The lock of the folder at `path`, in its file `run.lock`.

    The lock belongs to the open file. The nodes of a program have the file, too, so that none trains in the
    folder before the last of them has ended.
    """

    def __init__(self, path: Path):
        self.path = path

    @contextlib.contextmanager
    def held(self) -> Iterator[IO[str]]:
        """Makes the folder and locks it for this program. Raises RunError if another one trains in it.

        The lock lasts until the block ends, or until all processes that have the file that it gives have
        ended. `ask_to_stop` sends this process a SIGTERM meanwhile.
        """
        lock = self.path / "run.lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = self._open_lock("a+")
        except OSError as error:
            raise unwritable(self.path, error, lock) from error
        with opened as file:
            if not _lock(file, fcntl.LOCK_EX, _QUERY_S):
                process = "another process" if (pid := self.pid()) is None else f"process {pid}"
                stop = f"repertory stop {shlex.quote(str(self.path))}"
                raise RunError(f"{self.path} is being trained by {process}. Stop it first: {stop}")
            os.ftruncate(file.fileno(), 0)
            try:
                self._stop.unlink(missing_ok=True)
                file.write(f"{os.getpid()}\n")
                file.flush()
            except OSError as error:
                raise unwritable(self.path, error, lock) from error
            over = threading.Event()
            watch = threading.Thread(target=self._watch, args=(over,), name="run-stop", daemon=True)
            watch.start()
            try:
                yield file
            finally:
                over.set()
                watch.join()
                os.ftruncate(file.fileno(), 0)
                fcntl.flock(file, fcntl.LOCK_UN)  # A process that was forked meanwhile has the file, too.

    def pid(self) -> int | None:
        """The process that launched the program that trains in the folder, or None."""
        try:
            with self._open_lock("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = file.read(1000).split()
                    return int(text[0]) if text and text[0].isdecimal() else None
        except FileNotFoundError:
            pass
        return None

    def ask_to_stop(self) -> None:
        """Asks the program that trains in the folder to stop, on whatever host it runs."""
        try:
            open(self._stop, "w", opener=config_file.no_link).close()
        except OSError as error:
            raise unwritable(self.path, error, self._stop) from error

    def wait_until_free(self, timeout: float | None) -> bool:
        """Waits until no process trains in the folder; False after `timeout` seconds (None: no limit)."""
        with self._open_lock("r") as file:
            return _lock(file, fcntl.LOCK_SH, timeout)

    @property
    def _stop(self) -> Path:
        return self.path / "run.stop"

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_S):
            with contextlib.suppress(FileNotFoundError):
                self._stop.unlink()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _open_lock(self, mode: str) -> IO[str]:
        """Opens `run.lock`. A link could lead to any file of this user, or to the lock of another run."""
        path = self.path / "run.lock"
        try:
            return open(path, mode, encoding="utf-8", errors="replace", opener=config_file.no_link)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RunError(f"{path}: got a link, expected a file. Remove it.") from error
            raise


def _lock(file: IO[str], kind: int, timeout: float | None) -> bool:
    """Locks an open file, as `fcntl.flock` does; False after `timeout` seconds (None: no limit)."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if end is not None and time.monotonic() >= end:
                return False
        threading.Event().wait(_LOOK_S / 4)
