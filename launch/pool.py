"""Threads that are made when they are needed and wait for more work afterwards."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class DaemonPool:
    """Runs functions on daemon threads, at most ``limit`` at once; further ones wait in a queue.

    Unlike ``ThreadPoolExecutor`` a function that never returns does not keep the interpreter from ending.
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
        """Has ``work()`` called on some thread. It must not raise."""
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
