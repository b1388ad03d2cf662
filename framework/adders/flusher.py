"""Writes what an adder has staged when nobody else does."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class Flusher:
    """Calls ``adder.flush_late()`` a moment after the adder said that something is staged.

    An actor may wait for newer parameters which the learner makes only from what the actor has staged; so it
    cannot be left to the next ``add``. The thread ends with ``close()`` or with the adder.
    """

    def __init__(self, adder: Any, delay: float):
        """``delay``: seconds between ``notify`` and the call."""
        self._staged = threading.Event()
        self._closed = threading.Event()
        weakref.finalize(adder, _end, self._staged, self._closed)
        thread = threading.Thread(
            target=_run,
            args=(weakref.ref(adder), self._staged, self._closed, delay),
            name="adder-flusher",
            daemon=True,
        )
        thread.start()

    def notify(self) -> None:
        """Something is staged."""
        self._staged.set()

    def close(self) -> None:
        """Ends the thread; a call under way is not waited for."""
        _end(self._staged, self._closed)


def _end(staged: threading.Event, closed: threading.Event) -> None:
    closed.set()
    staged.set()


def _run(adder_of: Any, staged: threading.Event, closed: threading.Event, delay: float) -> None:
    while True:
        staged.wait()
        if closed.wait(delay):
            return
        staged.clear()
        adder = adder_of()
        if adder is None:
            return
        if adder.flush_late():
            staged.set()  # a table had no room for all; once more after the delay
        del adder
