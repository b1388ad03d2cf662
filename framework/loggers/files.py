"""Appends to a file so that a full disk loses only the current row."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from framework.checkpoints.folder import REASONS


class AppendFile:
    """A file for appending texts, each of which is written completely or not at all.

    Args:
      path: the file; its folder is created. If a killed run left an incomplete last line, it is ended first.

    Raises:
      OSError: The file cannot be written; `append` raises it too. The message has the file's name, the reason
        and the fix.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 - closed by close()
            self._end_cut_line()
        except OSError as error:
            raise explained(error, self.path) from error

    @property
    def closed(self) -> bool:
        return self._file.closed

    def append(self, text: str) -> None:
        """Appends `text`; if that fails, removes the part that was written."""
        if self._file.closed:
            raise ValueError(f"{self.path}: write after close.")
        size = self._file.seek(0, os.SEEK_END)
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self._file.truncate(size)
            raise explained(error, self.path) from error

    def close(self) -> None:
        self._file.close()

    def _end_cut_line(self) -> None:
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")


def explained(error: OSError, path: str | os.PathLike) -> OSError:
    """Returns the same error with a message that names the file and the fix."""
    reason = REASONS.get(error.errno or 0, error.strerror or str(error))
    return OSError(
        error.errno,
        f"could not write {os.fspath(path)}: {reason}. What was written before is intact. Free some space "
        "there, or choose another folder with --directory",
    )
