"""A client's connection to a node that may come back somewhere else, as nodes of a cluster do.

`MovingConnection` is a `launch.rpc.client.Connection` whose address is told later, taken back when the node
has died, and told anew. Calls made in between wait; calls that were under way at another address are lost.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A call for a node that is nowhere."""

    future: Future
    send: Callable[[Connection], None]


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
        # Futures that are not done at the node, those that wait for it included. Counted here, so that a
        # connection never has more than it takes without waiting.
        self._open = 0
        self._waiting: deque[_Waiting] = deque()
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
            # Before anybody is told: who comes now must not overtake those that waited.
            while self._here and self._waiting:
                assert self._connection is not None
                call = self._waiting.popleft()
                try:
                    call.send(self._connection)
                except Exception as error:  # arguments that cannot be sent
                    _settle(call.future, None, error)
            self._changed.notify_all()
        if old is not None:
            old.close()

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

        With ``max_in_flight`` futures open it waits for room, ``timeout`` seconds at most.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._check_open()
            self._wait_for_room(method, timeout, deadline)
            future: Future = Future()
            connection = self._connection if self._here else None
            if connection is None:
                args, kwargs = pickle.loads(cloudpickle.dumps((args, kwargs)))
                waiting = _Waiting(future, lambda at: self._send(at, future, method, args, kwargs, timeout))
                self._waiting.append(waiting)
            self._open += 1
        if connection is not None:
            self._send(connection, future, method, args, kwargs, timeout)
            return future
        future.add_done_callback(lambda _: self._forget(waiting))
        if timeout is not None:
            timer = threading.Timer(timeout, _settle, (future, None, self._too_late(method, timeout)))
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def _send(
        self,
        connection: Connection,
        future: Future,
        method: str,
        args: tuple,
        kwargs: dict[str, Any],
        timeout: float | None,
    ) -> None:
        """``future`` becomes the answer of the node. Does not wait: there is room."""

        def done(inner: Future) -> None:
            error = inner.exception()
            if isinstance(error, ClientClosed) and not self._closed:
                error = self._lost(method)
            self._make_room()
            _settle(future, inner.result() if error is None else None, error)

        if not future.set_running_or_notify_cancel():
            self._make_room()
            return
        try:
            connection.submit(method, args, kwargs, timeout).add_done_callback(done)
        except Exception as error:
            self._make_room()
            if not isinstance(error, ClientClosed):
                raise
            _settle(future, None, error if self._closed else self._lost(method))

    def _forget(self, waiting: _Waiting) -> None:
        """A call that waited for the node is done: sent and answered, or cancelled, or its time ran out."""
        with self._changed:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._make_room()

    def _make_room(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

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
        for call in waiting:
            _settle(call.future, None, ClientClosed(f"the client of node {self._name!r} was closed"))

    def stop(self) -> None:
        """Ends the calls that wait for a node which is nowhere: the program stops and it will not come."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            self._open -= len(waiting)
            self._changed.notify_all()
        for call in waiting:
            _settle(
                call.future, None, ProgramStopped(f"node {self._name!r} is not there and the program stops")
            )

    def _where(self, method: str, timeout: float | None, deadline: float | None) -> Connection:
        with self._changed:
            self._wait_until_here(method, timeout, deadline)
            assert self._connection is not None
            return self._connection

    def _wait_until_here(self, method: str, timeout: float | None, deadline: float | None) -> None:
        """With the condition held. ProgramStopped, ClientClosed or CallTimeout if the node does not come."""
        while not self._here or self._closed:
            self._wait_a_little(method, timeout, deadline)

    def _wait_for_room(self, method: str, timeout: float | None, deadline: float | None) -> None:
        """With the condition held; the errors of `_wait_until_here`."""
        while self._open >= self._max_in_flight:
            self._wait_a_little(method, timeout, deadline)
        self._check_coming(method)

    def _wait_a_little(self, method: str, timeout: float | None, deadline: float | None) -> None:
        self._check_open()
        self._check_coming(method)
        left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
        if left <= 0:
            assert timeout is not None
            raise self._too_late(method, timeout)
        self._changed.wait(left)
        self._check_open()

    def _check_coming(self, method: str) -> None:
        if self._stopped.is_set() and not self._here:
            raise ProgramStopped(f"{self._name}.{method}: the node is not there and the program stops")

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
