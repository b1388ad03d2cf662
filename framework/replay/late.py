"""Calls methods a moment later, in one thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable


class LateFlush:
    """Runs methods after a delay, in a thread that lives no longer than `owner`.

    A writer stages small pieces until they make a block, but an actor may wait for parameters that the
    learner makes only from what is staged. So what is staged is written after a delay at the latest, even if
    the actor makes no further call.

    Methods are referenced weakly: a method whose object is gone is not called. An error that a method raises
    is kept for `check`.
    """

    def __init__(self, owner: object):
        """Args: owner: the object that keeps this one; when it is collected, the thread ends."""
        self._schedule = _Schedule()
        self._thread: threading.Thread | None = None
        weakref.finalize(owner, self._schedule.close)

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        """Calls `method` once, after `delay` seconds; a call that is due earlier stays as it is."""
        self._schedule.add(weakref.WeakMethod(method), delay)
        if self._thread is None:
            self._thread = threading.Thread(target=self._schedule.run, name="replay-late-flush", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises the error of the last late call that failed, once."""
        error, self._schedule.error = self._schedule.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread after the call it is in; does not wait for it."""
        self._schedule.close()


class _Schedule:
    """The methods that are due, and the loop that calls them."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._due: dict[weakref.WeakMethod[Callable[[], object]], float] = {}
        self._changed = threading.Condition()
        self._closed = False

    def add(self, method: weakref.WeakMethod[Callable[[], object]], delay: float) -> None:
        if method in self._due:
            return
        with self._changed:
            self._due[method] = time.monotonic() + min(delay, threading.TIMEOUT_MAX / 2)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def run(self) -> None:
        while (reference := self._next()) is not None:
            method = reference()
            if method is None:
                continue
            try:
                method()
            except Exception as error:  # raised by the owner's next call
                self.error = error
            del method  # the object may be collected while this thread waits

    def _next(self) -> weakref.WeakMethod[Callable[[], object]] | None:
        """Waits until a method is due; None after `close`."""
        with self._changed:
            while not self._closed:
                if not self._due:
                    self._changed.wait()
                    continue
                method = min(self._due, key=self._due.__getitem__)
                left = self._due[method] - time.monotonic()
                if left <= 0:
                    del self._due[method]
                    return method
                self._changed.wait(left)
        return None
