"""A call in another thread, and waiting for what another thread or process causes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


class Background:
    """Runs ``function(*args)`` in a thread; ``result`` returns its value or raises its error."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error

    def running(self, seconds: float = 0.0) -> bool:
        """Returns whether the call still runs ``seconds`` from now."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def done(self) -> bool:
        return not self.running()

    def exception(self, timeout: float = PATIENCE_S) -> BaseException | None:
        assert not self.running(timeout), "still waiting"
        return self._error

    def result(self, timeout: float = PATIENCE_S) -> Any:
        assert not self.running(timeout), "still waiting"
        if self._error is not None:
            raise self._error
        return self._value


def until(condition: Callable[[], Any], timeout: float = PATIENCE_S) -> None:
    """Waits for something that another thread or process causes."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        threading.Event().wait(0.005)
