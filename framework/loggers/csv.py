"""Rows as a table for spreadsheets; a column that appears later is added to the whole table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.loggers.base import Logger, to_scalars
from framework.loggers.files import AppendFile, explained


class CSVLogger(Logger):
    """Appends rows to `path`; every row reaches the operating system before `write` returns.

    A row with new columns writes a new file with the longer header and then replaces the old file atomically,
    so that a crash leaves one of them intact. Missing values are empty fields.

    Args:
      path: the file; its folder is created. An existing file is continued, with its columns.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._file = AppendFile(path)
        with open(self._path, newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file), [])

    def write(self, row: Mapping[str, Any]) -> None:
        if self._file.closed:
            raise ValueError(f"{self._path}: write after close.")
        plain = to_scalars(row)
        new = [name for name in plain if name not in self._columns]
        if new:
            self._add_columns(new)
        line = io.StringIO()
        csv.DictWriter(line, self._columns, restval="", lineterminator="\n").writerow(plain)
        self._file.append(line.getvalue())

    def close(self) -> None:
        self._file.close()

    def _add_columns(self, new: list[str]) -> None:
        columns = self._columns + new
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            with (
                open(self._path, newline="", encoding="utf-8") as old,
                open(beside, "w", newline="", encoding="utf-8") as file,
            ):
                writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(csv.DictReader(old))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._path)
        except OSError as error:
            raise explained(error, self._path) from error
        finally:
            beside.unlink(missing_ok=True)
        self._file.close()  # the old table, which was replaced
        self._file = AppendFile(self._path)
        self._columns = columns
