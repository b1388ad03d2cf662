"""What the writers of a process share: the list of them, and calls that are made late."""

from __future__ import annotations

import atexit
import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_LATE_NAME = "replay-late-flush"  # of a thread
_EXIT_S = 10.0  # for which the end of the interpreter waits for writers that were not closed


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
        """Has the writers insert what they hold back; ends the dropped ones."""
        if self.dropped:
            self.end_dropped()
        for reference in self._live:
            writer = reference()
            if writer is not None:
                writer.show()

    def end_dropped(self) -> None:
        """Ends the dropped writers, but for those whose items wait for room."""
        for _ in range(len(self.dropped)):
            with contextlib.suppress(IndexError):  # another thread was faster
                writer = self.dropped.popleft()
                if not writer.end():
                    self.dropped.append(writer)

    def call_all(self, method: str, *arguments: Any) -> None:
        """Calls a method of each writer, even if one raises an error."""
        with contextlib.ExitStack() as stack:
            for reference in self._live:
                writer = reference()
                if writer is not None:
                    stack.callback(getattr(writer, method), *arguments)


class _Hurry(threading.local):
    """Whether the calling thread reads without waiting for writers, because they may wait for it."""

    on = False


hurry = _Hurry()


@atexit.register
def end_late_threads() -> None:
    """Ends the threads of writers that were not closed: native code would abort the interpreter's end."""
    LateFlush.over = True
    until = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.name == _LATE_NAME:
            thread.cancel()
            thread.join(max(0.0, until - time.monotonic()))


class LateFlush:
    """Calls methods after a delay, in timer threads that live no longer than their owner.

    A writer stages small pieces until they fill a block, but an actor may wait for parameters that the
    learner can make only from the staged pieces. These are therefore written after a delay at the latest,
    even if the actor makes no further call.

    Methods are referenced weakly: a method whose object is gone is not called.

    Args:
      owner: the object that keeps this one; when it is collected, the threads end.
      errors: takes the errors that methods raise.

    Attributes:
      over: whether the interpreter ends: no thread begins.
    """

    over = False

    def __init__(self, owner: object, errors: collections.deque[BaseException]) -> None:
        self._errors = errors
        self._timers: dict[weakref.WeakMethod[Callable[..., object]], threading.Timer] = {}
        weakref.finalize(owner, self.close)

    def call_later(self, method: Callable[..., object], delay: float, *arguments: Any) -> None:
        """Calls `method` once, after `delay` seconds; a call that is already scheduled keeps its time."""
        reference = weakref.WeakMethod(method)
        timer = self._timers.get(reference)
        if (timer is None or timer.ident is None) and not self.over:  # None: its start was interrupted
            timer = threading.Timer(min(delay, threading.TIMEOUT_MAX), self._call, [reference, *arguments])
            timer.name, timer.daemon = _LATE_NAME, True
            self._timers[reference] = timer
            timer.start()

    def close(self) -> None:
        """Cancels the calls that have not begun; does not wait for others."""
        for timer in list(self._timers.values()):
            timer.cancel()

    def _call(self, reference: weakref.WeakMethod[Callable[..., object]], *arguments: Any) -> None:
        self._timers.pop(reference, None)  # first: the method may ask for another call
        method = reference()
        try:
            if method is not None:
                method(*arguments)
        except Exception as error:  # raised by the owner's next call
            self._errors.append(error)
