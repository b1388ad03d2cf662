"""A client's connection to a node that may come back somewhere else, as nodes of a cluster do.

`MovingConnection` is a `launch.rpc.client.Connection` whose address is told later, taken back when the node
has died, and told anew. Calls made in between wait; calls that were under way at another address are lost.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import cloudpickle

from launch.errors import CallLost, CallTimeout, ClientClosed, ProgramStopped
from launch.rpc.client import Connection
from launch.rpc.sockets import CurveKeys

_LOOK = 0.5  # seconds between two looks at whether the program stops, while a node is nowhere


class MovingConnection:
    """`call` and `submit` as of `Connection`, safe to use from any thread; `move` says where the node is.

    Args:
      address: where the node is now; None if nowhere yet.
      curve, name, max_in_flight, stopped: as of `Connection`.
    """

    def __init__(
        self,
        address: str | None,
        curve: CurveKeys,
        *,
        name: str,
        max_in_flight: int,
        stopped: threading.Event,
    ) -> None:
        self._curve, self._name = curve, name
        self._max_in_flight, self._stopped = max_in_flight, stopped
        self._changed = threading.Condition()
        self._connection: Connection | None = None  # the newest; stays while the node is away
        self._address: str | None = None  # of that connection
        self._here = False
        self._closed = False
        self._waiting: deque[tuple[Future, Callable[[Connection], None]]] = deque()
        if address is not None:
            self.move(address)

    def move(self, address: str | None) -> None:
        """The node is at ``address`` now, or nowhere."""
        old = None
        with self._changed:
            if self._closed:
                return
            self._here = address is not None
            if address is not None and address != self._address:
                old, self._address = self._connection, address
                self._connection = Connection(
                    address,
                    self._curve,
                    name=self._name,
                    max_in_flight=self._max_in_flight,
                    stopped=self._stopped,
                )
            self._changed.notify_all()
            connection = self._connection
            waiting = list(self._waiting) if self._here else []
            if self._here:
                self._waiting.clear()
        if old is not None:
            old.close()
        for _, send in waiting:
            assert connection is not None
            send(connection)

    def call(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
        """Waits for the node to be somewhere, then for its answer, ``timeout`` seconds in all."""
        deadline = None if timeout is None else time.monotonic() + timeout
        connection = self._where(method, timeout, deadline)
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        try:
            return connection.call(method, args, kwargs, left)
        except ClientClosed:
            self._check_open()
            raise self._lost(method) from None

    def submit(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
        """Returns at once, also while the node is nowhere; the arguments are copied.

        With ``max_in_flight`` futures open it waits for room.
        """
        future: Future = Future()

        def done(inner: Future) -> None:
            error = inner.exception()
            if isinstance(error, ClientClosed) and not self._closed:
                error = self._lost(method)
            _settle(future, inner.result() if error is None else None, error)

        def send(connection: Connection) -> None:
            try:
                connection.submit(method, args, kwargs, timeout).add_done_callback(done)
            except ClientClosed as error:
                _settle(future, None, error if self._closed else self._lost(method))

        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._check_open()
            if not self._here and len(self._waiting) >= self._max_in_flight:
                self._wait_until_here(method, timeout, deadline)
            connection = self._connection if self._here else None
            if connection is None:
                args, kwargs = pickle.loads(cloudpickle.dumps((args, kwargs)))
                self._waiting.append((future, send))
        if connection is not None:
            send(connection)
        elif timeout is not None:
            timer = threading.Timer(timeout, _settle, (future, None, self._too_late(method, timeout)))
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def close(self) -> None:
        """Ends every waiting call with `ClientClosed`."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            connection = self._connection
        if connection is not None:
            connection.close()
        for future, _ in waiting:
            _settle(future, None, ClientClosed(f"the client of node {self._name!r} was closed"))

    def stop(self) -> None:
        """Ends the calls that wait for a node which is nowhere: the program stops and it will not come."""
        with self._changed:
            self._changed.notify_all()
            waiting = list(self._waiting)
            self._waiting.clear()
        for future, _ in waiting:
            _settle(future, None, ProgramStopped(f"node {self._name!r} is not there and the program stops"))

    def _where(self, method: str, timeout: float | None, deadline: float | None) -> Connection:
        with self._changed:
            self._wait_until_here(method, timeout, deadline)
            assert self._connection is not None
            return self._connection

    def _wait_until_here(self, method: str, timeout: float | None, deadline: float | None) -> None:
        """With the condition held. ProgramStopped, ClientClosed or CallTimeout if the node does not come."""
        while not self._here or self._closed:
            self._check_open()
            if self._stopped.is_set():
                raise ProgramStopped(f"{self._name}.{method}: the node is not there and the program stops")
            left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
            if left <= 0:
                assert timeout is not None
                raise self._too_late(method, timeout)
            self._changed.wait(left)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed(f"the client of node {self._name!r} is closed")

    def _too_late(self, method: str, timeout: float) -> CallTimeout:
        return CallTimeout(f"{self._name}.{method} was not answered within {timeout} s")

    def _lost(self, method: str) -> CallLost:
        return CallLost(
            f"{self._name}.{method}: the node was restarted elsewhere while it had this call; it may have "
            "been carried out"
        )


def _settle(future: Future, result: Any, error: BaseException | None) -> None:
    try:
        future.set_result(result) if error is None else future.set_exception(error)
    except InvalidStateError:
        return  # cancelled, or its time had run out
