"""Rows in files: one JSON object per line, or a table for spreadsheets.

Every row reaches the operating system before `write` returns, and a full disk loses only the current row.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from framework.checkpoints.checkpointer import explain, remedy
from framework.loggers.base import Logger, Row, to_scalars

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
            if self.path.is_symlink() and self.path.is_file():
                # In somebody's folder, it could lead to any file of this user.
                raise OSError(errno.ELOOP, "got a link to a file, expected a file", str(self.path))
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 - closed by close()
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            raise explained(error, self.path) from error

    def __getstate__(self) -> tuple[Path, int]:
        return self.path, self._file.seek(0, os.SEEK_END)

    def __setstate__(self, state: tuple[Path, int]) -> None:
        """Continues after the rows that were there; later ones are removed, since they are written again."""
        path, size = state
        if path.exists():
            os.truncate(path, min(size, path.stat().st_size))
        self.__init__(path)  # type: ignore[misc]

    def append(self, text: str) -> None:
        """Appends `text`; if that fails, removes the part that was written."""
        if self._file.closed:
            raise ValueError(f"{self.path}: write after close.")
        size = self._file.seek(0, os.SEEK_END)
        rest = memoryview(text.encode(errors="backslashreplace"))  # A name of a file need not be UTF-8.
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # The first error is the one to report.
                self._file.truncate(size)
            raise explained(error, self.path) from error

    def close(self) -> None:
        self._file.close()


class JSONLLogger(Logger):
    """Appends rows to `path` as JSON lines. Columns may appear at any time.

    NaN and infinities become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, so that every line is valid
    JSON; `read_jsonl` converts them back.

    Args:
      path: the file; its folder is created. An existing file is continued.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = AppendFile(path)

    def write(self, row: Mapping[str, Any]) -> None:
        plain = to_scalars(row)
        for name, value in plain.items():
            if isinstance(value, float) and not math.isfinite(value):
                plain[name] = "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        self._file.append(json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | os.PathLike) -> Iterator[Row]:
    """Yields the rows of a file. Skips invalid lines with a warning that gives the line number."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                warnings.warn(f"{path}:{number}: left out a line that is not JSON ({error}).")
                continue
            if not isinstance(row, dict):
                warnings.warn(f"{path}:{number}: left out a line that is not a row ({type(row).__name__}).")
                continue
            for name, value in row.items():
                if isinstance(value, str):
                    row[name] = _NOT_FINITE.get(value, value)
            yield row


class CSVLogger(Logger):
    """Appends rows to the table in `path`; a column that appears later is added to the whole table.

    A row with new columns writes a new file with the longer header and then replaces the old file atomically,
    so that a crash leaves one of them intact. Missing values are empty fields.

    Args:
      path: the file; its folder is created. An existing file is continued, with its columns.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = AppendFile(path)
        if self._file.path.read_bytes().count(b'"') % 2:  # A killed run left an incomplete row within quotes.
            self._file.append('"\n')
        with open(self._file.path, newline="", encoding="utf-8") as file:
            table = csv.reader(file)
            self._columns = next(table, [])
            self._num_rows = sum(1 for _ in table)

    def __getstate__(self) -> tuple[Path, list[str], int]:
        return self._file.path, self._columns, self._num_rows

    def __setstate__(self, state: tuple[Path, list[str], int]) -> None:
        """Continues after the rows that were there; later ones are removed, since they are written again."""
        path, columns, num_rows = state
        self.__init__(path)  # type: ignore[misc]
        self._num_rows = num_rows
        self._rewrite(columns)

    def write(self, row: Mapping[str, Any]) -> None:
        plain = to_scalars(row)
        new = [name for name in plain if name not in self._columns]
        line = _line(self._columns + new, plain)
        if new:
            self._rewrite(self._columns + new)
        self._file.append(line)
        self._num_rows += 1

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, columns: list[str]) -> None:
        """Replaces the file by a table with these columns and the first `_num_rows` rows."""
        self._file.append("")  # Raises if the logger is closed.
        path = self._file.path
        beside = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            with (
                open(path, newline="", encoding="utf-8") as old,
                open(beside, "w", newline="", encoding="utf-8") as file,
            ):
                file.write(_line(columns, dict(zip(columns, columns, strict=True))))
                rows = itertools.islice(csv.DictReader(old), self._num_rows)
                file.writelines(_line(columns, row) for row in rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError as error:
            raise explained(error, path) from error
        finally:
            beside.unlink(missing_ok=True)
        self._file.close()  # The old table, which was replaced.
        self._file, self._columns = AppendFile(path), columns


def _line(columns: list[str], row: Mapping[str, Any]) -> str:
    line = io.StringIO()
    # Python before 3.13 quotes only characters of the line's end, and a bare CR would end the row, too.
    csv.DictWriter(line, columns, "", "ignore", lineterminator="\r\n").writerow(row)
    return line.getvalue()[:-2] + "\n"


def is_explained(error: OSError) -> bool:
    """Whether `explained` returned the error, maybe in another process."""
    return str(error.strerror).startswith("could not write ")


def explained(error: OSError, path: str | os.PathLike) -> OSError:
    """Returns the same error with a message that names the file and the fix, unless it has one."""
    if is_explained(error):
        return error
    reason = explain(OSError(error.errno, error.strerror or str(error), os.fspath(path)))
    return OSError(
        error.errno,
        f"could not write {reason}. What was written before is intact. {remedy(error)}.",
    )
