"""The writers of a client."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from typing import Any


class Writers:
    """The writers of a client, or of a row store, which insert what they hold back before something is read.

    A writer that was dropped without `close` is ended then, because garbage collection must wait for neither
    locks nor servers.

    Attributes:
      dropped: the writers that were dropped and have not been ended.
    """

    def __init__(self) -> None:
        self.dropped: collections.deque[Any] = collections.deque()
        self._live: tuple[weakref.ref[Any], ...] = ()
        self._lock = threading.Lock()

    def add(self, writer: Any) -> None:
        """Adds a `BatchWriter`."""
        with self._lock:
            self._live = (*self._live, weakref.ref(writer))

    def remove(self, writer: Any) -> None:
        """Removes a writer that is closed."""
        with self._lock:
            self._live = tuple(each for each in self._live if each() not in (writer, None))

    def show(self) -> None:
        """Has the writers insert what they hold back. Dropped ones whose items wait for room stay."""
        for _ in range(len(self.dropped)):
            with contextlib.suppress(IndexError):  # another thread was faster
                writer = self.dropped.popleft()
                if not writer.end():
                    self.dropped.append(writer)
        for reference in self._live:
            writer = reference()
            if writer is not None:
                writer.show()

    def call_all(self, method: str, *arguments: Any) -> None:
        """Calls a method of each writer, even if one raises an error."""
        with contextlib.ExitStack() as stack:
            for reference in self._live:
                writer = reference()
                if writer is not None:
                    stack.callback(getattr(writer, method), *arguments)
