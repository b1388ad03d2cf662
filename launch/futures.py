"""Helpers that carry out calls and set the results and errors of their futures."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

_IDLE_S = 0.1  # After which a thread without a call ends.


def settle(future: Future, result: Any = None, error: BaseException | None = None) -> None:
    """Sets the result or the error of `future`, unless the future is done or was canceled."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def fulfil(future: Future, function: Callable[..., Any], *args: Any) -> None:
    """Calls a function and sets its result, or its error."""
    try:
        settle(future, function(*args))
    except BaseException as error:
        settle(future, error=error)


def expire(future: Future, timeout: float, error: BaseException) -> None:
    """Sets `error` after `timeout` seconds, unless the future is done by then."""
    timer = threading.Timer(timeout, settle, (future, None, error))
    timer.daemon = True
    timer.start()
    future.add_done_callback(lambda _: timer.cancel())


class CallThreads:
    """Carries out calls in their order, `limit` at once, in threads that end soon when no call is left."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._num_threads = 0
        self._num_idle = 0
        self._changed = threading.Condition()
        self._mine = threading.local()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return CallThreads, (self._limit,)  # A copy, as of a program's state, is a new one.

    def is_mine(self) -> bool:
        """Returns whether the calling thread carries out a call."""
        return getattr(self._mine, "value", False)

    def submit(self, call: Callable[[], None]) -> None:
        """Appends a call, which must not raise."""
        with self._changed:
            self._calls.append(call)
            if len(self._calls) <= self._num_idle or self._num_threads >= self._limit:
                self._changed.notify()
                return
            self._num_threads += 1
        try:
            threading.Thread(target=self._run, name="launch-call", daemon=True).start()
        except RuntimeError:  # The system gives no further thread.
            with self._changed:
                self._num_threads -= 1
                if call not in self._calls:  # Another thread has taken it.
                    return
                self._calls.remove(call)
            raise

    def _run(self) -> None:
        self._mine.value = True
        while True:
            with self._changed:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._calls, _IDLE_S)
                self._num_idle -= 1
                if not self._calls:
                    self._num_threads -= 1
                    return
                call = self._calls.popleft()
            call()
            del call  # An idle thread keeps no object.
