"""Helpers that set the results and errors of futures."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from typing import Any


def settle(future: Future, result: Any = None, error: BaseException | None = None) -> None:
    """Sets the result or the error of `future`, unless the future is done or was canceled."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def expire(future: Future, timeout: float, error: BaseException) -> None:
    """Sets `error` after `timeout` seconds, unless the future is done by then."""
    timer = threading.Timer(timeout, settle, (future, None, error))
    timer.daemon = True
    timer.start()
    future.add_done_callback(lambda _: timer.cancel())
