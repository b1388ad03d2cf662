"""The files that the launcher writes while a program runs: `status.json`, and logs from other machines."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("launch")


class Files:
    """Writes the files of a run. A failure is logged and does not end the program.

    A full disk, or a file server that is briefly unavailable, must not end a run. The first failure to write
    a file is logged. Later ones are logged only if a write succeeded in between.
    """

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def write_status(self, path: str, status: dict[str, Any]) -> None:
        """Replaces the file atomically, so that a reader never sees a part of it."""
        with self._writing(path):
            try:
                with open(f"{path}.new", "w") as file:
                    json.dump(status, file, indent=1)
                os.replace(file.name, path)
            finally:
                with contextlib.suppress(OSError):  # it is in its place, or was never there
                    os.unlink(f"{path}.new")

    def append(self, path: str, data: bytes) -> None:
        """Appends to a log. Output that cannot be written is lost."""
        with self._writing(path), open(path, "ab") as file:
            file.write(data)

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if path not in self._failing:
                self._failing.add(path)
                _log.warning("%s cannot be written: %s. The program goes on without it.", path, error)
        else:
            self._failing.discard(path)
