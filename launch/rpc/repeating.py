"""Calls that are made again when a restart of the node has swallowed them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from launch.errors import CallLost

Call = Callable[[str, tuple, dict[str, Any], float | None], Any]
Submit = Callable[[str, tuple, dict[str, Any], float | None], Future]


def repeating(call: Call, submit: Submit) -> tuple[Call, Submit]:
    """The same two functions, for a node whose methods may be carried out twice.

    A call that raises `CallLost` is made again, with the same arguments and the same timeout; the node's
    restarts bound how often.
    """

    def call_again(method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
        while True:
            try:
                return call(method, args, kwargs, timeout)
            except CallLost:
                continue

    def submit_again(method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
        outer: Future = Future()

        def send() -> None:
            try:
                submit(method, args, kwargs, timeout).add_done_callback(done)
            except Exception as error:
                settle(error)

        def done(inner: Future) -> None:
            if inner.cancelled():
                outer.cancel()
            elif isinstance(inner.exception(), CallLost) and not outer.cancelled():
                # On a thread of its own: this is the one that keeps the connection, and sending may wait.
                threading.Thread(target=send, name="launch-repeat", daemon=True).start()
            else:
                settle(inner.exception(), inner)

        def settle(error: BaseException | None, inner: Future | None = None) -> None:
            try:
                if error is not None:
                    outer.set_exception(error)
                elif inner is not None:
                    outer.set_result(inner.result())
            except InvalidStateError:
                return  # cancelled by the caller

        send()
        return outer

    return call_again, submit_again
