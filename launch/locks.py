"""A condition for threads in which a signal handler may raise an exception."""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections.abc import Callable


class InterruptSafeCondition(RLock):  # type: ignore[misc]  # It may be inherited from on every Python.
    """A `threading.Condition` that an interrupt leaves usable, such as a `KeyboardInterrupt`.

    The `with` of `threading.Condition` is written in Python. If its thread is interrupted in there, the lock
    stays taken, and every other thread that needs it waits without an end. Here it is the lock's.
    """

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return InterruptSafeCondition, ()  # A copy, as of a program's state, is a new one.

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for `notify_all`; returns False after `timeout` seconds. The lock must be held once."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        state = None
        try:
            try:
                state = self._release_save()  # type: ignore[attr-defined]
                return waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
            finally:
                self._take_back(state)
        finally:  # The first may have been interrupted.
            self._take_back(state)
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _take_back(self, state: tuple[int, int] | None) -> None:
        if not self._is_owned():  # type: ignore[attr-defined]
            self._acquire_restore(state or (1, threading.get_ident()))  # type: ignore[attr-defined]

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until `predicate()` is true; returns False after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not predicate():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify_all(self) -> None:
        """Wakes all threads that wait. The lock must be held."""
        while self._waiters:
            waiter = self._waiters[-1]
            if waiter.locked():  # It is not if an interrupt came before the next line.
                waiter.release()
            self._waiters.remove(waiter)
