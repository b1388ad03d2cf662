"""Daemon threads that run queued functions, and the one way to settle a future."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any


class DaemonPool:
    """Runs functions on daemon threads, at most `limit` at once; further ones wait in a queue.

    Unlike `ThreadPoolExecutor`, a function that never returns does not keep the interpreter from ending.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._work: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Calls `work()` on some thread. It must not raise."""
        with self._condition:
            if self._closed:
                raise RuntimeError(f"pool {self._name!r} is closed")
            self._work.append(work)
            if len(self._work) <= self._idle:
                self._condition.notify()
                return
            if self._threads >= self._limit:
                return
            self._threads += 1
            name = f"{self._name}-{self._threads}"
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def close(self) -> None:
        """Lets the threads end once nothing is queued; does not wait for them."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _loop(self) -> None:
        while True:
            with self._condition:
                while not self._work:
                    if self._closed:
                        self._threads -= 1
                        return
                    self._idle += 1
                    try:
                        self._condition.wait()
                    finally:
                        self._idle -= 1
                work = self._work.popleft()
            work()


def settle(future: Future, result: Any = None, error: BaseException | None = None) -> None:
    """Sets the result or the error of `future`, unless the future is done or was canceled."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def follow(future: Future, other: Future) -> None:
    """Gives `future` the result or the error of `other`."""

    def done(other: Future) -> None:
        error = other.exception()
        settle(future, other.result() if error is None else None, error)

    other.add_done_callback(done)


def expire(future: Future, timeout: float, error: BaseException) -> None:
    """Sets `error` after `timeout` seconds unless the future is done by then."""
    timer = threading.Timer(timeout, settle, (future, None, error))
    timer.daemon = True
    timer.start()
    future.add_done_callback(lambda _: timer.cancel())
