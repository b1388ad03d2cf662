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

    def __init__(self, owner: object) -> None:
        """Args: owner: the object that keeps this one; when it is collected, the thread ends."""
        self._schedule = _Schedule()
        self._thread: threading.Thread | None = None
        weakref.finalize(owner, self._schedule.close)

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        """Calls `method` once, after `delay` seconds; a call that is due earlier stays as it is."""
        schedule, reference = self._schedule, weakref.WeakMethod(method)
        if reference in schedule.due:
            return
        with schedule.changed:
            schedule.due[reference] = time.monotonic() + min(delay, threading.TIMEOUT_MAX / 2)
            schedule.changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=schedule.run, name="replay-late-flush", daemon=True)
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
    """The methods that are due, and the loop that calls them. The thread keeps this object alive, and no
    other."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.due: dict[weakref.WeakMethod[Callable[[], object]], float] = {}
        self.changed = threading.Condition()
        self._closed = False

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                if self._closed:
                    return
                reference = min(self.due, key=self.due.__getitem__, default=None)
                left = None if reference is None else self.due[reference] - time.monotonic()
                if reference is None or left is None or left > 0:
                    self.changed.wait(left)
                    continue
                del self.due[reference]
            method = reference()
            try:
                if method is not None:
                    method()
            except Exception as error:  # raised by the owner's next call
                self.error = error
            del method  # the object may be collected while this thread waits
