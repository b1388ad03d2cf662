"""A client's view of the rows of a server on its machine: columns mapped from shared memory."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from framework.replay import shm
from framework.replay.rows.layout import Binding, Layout


class MappedStream:
    """The mapped columns of one stream; has what a `Binding` needs of a `Stream` to gather."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.columns: dict[str, np.ndarray] = {}


class MappedStore:
    """The mapped columns of one server. Several threads may use it.

    Args:
      server: the name of that life.
      directory: where its columns are.

    Attributes:
      local: whether this process can map the server's columns (same machine, same user).
      streams: what was mapped so far.
    """

    def __init__(self, server: str, directory: str) -> None:
        self.server = server
        self.directory = directory
        self.local = False
        with contextlib.suppress(OSError):
            # Without a directory, the server offers no memory.
            self.local = bool(directory) and Path(directory, "proof").read_text() == server
        self.streams: dict[str, MappedStream] = {}
        self._lock = threading.Lock()

    def column(self, stream: str, column: str, path: str, shape: Any, dtype: str) -> np.ndarray:
        """Returns a column, which the first call maps.

        Raises:
          ValueError: the path is not in the server's directory.
        """
        with self._lock:
            mapped = self.streams.setdefault(stream, MappedStream(stream)).columns
            if column not in mapped:
                if os.path.dirname(path) != self.directory:
                    raise ValueError(
                        f"column {column!r}: got {path!r}, expected a file in {self.directory!r}"
                    )
                mapped[column] = shm.attach(path, shape, dtype)
            return mapped[column]

    def bind(self, layout: Layout, files: list[list[Any]], table: str) -> Binding:
        """What gathers items of a layout, whose columns are `[[stream, column, path, shape, dtype]]`."""
        for file in files:
            self.column(*file)
        return Binding(layout, self, table)  # type: ignore[arg-type]
