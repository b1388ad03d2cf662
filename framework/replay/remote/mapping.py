"""A client's view of the rows of a server: columns mapped from shared memory, layouts bound to them."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from framework.replay import shm
from framework.replay.rows.binding import Binding
from framework.replay.rows.layout import Layout


class MirrorStream:
    """The mapped columns of one stream; has of a `Stream` what a `Binding` needs to gather."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.columns: dict[str, np.ndarray] = {}


class Mirror:
    """The store of one life of a server. May be used by several threads.

    Attributes:
      local: whether this process can map the server's columns (same machine, same user).
      streams: what was mapped so far.
    """

    def __init__(self, server: str, directory: str) -> None:
        self.server = server
        self.directory = directory
        self.local = _is_local(server, directory)
        self.streams: dict[str, MirrorStream] = {}
        self._paths: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def add(self, stream: str, files: dict[str, list[Any]]) -> MirrorStream:
        """Maps the columns ``{name: [path, shape, dtype]}`` of a stream that are not mapped yet."""
        with self._lock:
            mirrored = self.streams.setdefault(stream, MirrorStream(stream))
            for name, (path, shape, kind) in files.items():
                if name in mirrored.columns:
                    continue
                if os.path.dirname(path) != self.directory:
                    raise ValueError(f"column {name!r}: {path!r} is not in the server's directory")
                mirrored.columns[name] = shm.attach(path, shape, kind)
            return mirrored

    def bind(self, layout: Layout, columns: dict[str, dict[str, list[Any]]], table: str) -> Binding:
        """What can gather the items of a layout."""
        for stream, files in columns.items():
            self.add(stream, files)
        return Binding(layout, self, table)  # type: ignore[arg-type]


def _is_local(server: str, directory: str) -> bool:
    """Whether this process sees the server's directory: who can read the proof in it may use its memory."""
    if not directory:
        return False  # the server offers none
    try:
        with open(os.path.join(directory, "proof")) as file:
            return file.read() == server
    except OSError:
        return False
