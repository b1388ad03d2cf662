"""The client's end of `launch.rpc.stream`: a connection for each thread that waits in a call."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from launch.errors import CallTimeout
from launch.rpc import sockets, stream, wire

# A node that does not know of a call may not have noticed its connection yet, if its machine is very busy. So
# it is asked several times; the end of a node is seen at once by the end of its connections.
_ASKED = 5

_everybody: weakref.WeakSet[Callers] = weakref.WeakSet()


class Callers:
    """Makes calls through the door of one node; safe to use from any thread.

    Args:
      address: of the node's `launch.rpc.server.Server`.
      curve: keys of the program.
      name: of the node, for errors.
      interval: seconds of silence after which the node is asked, on the long way, whether it has the call.
      connect: makes a ZeroMQ socket to the node, for asking.
      check_waiting: ``(rounds of silence, method)``, raises if waiting on makes no sense.
    """

    def __init__(
        self,
        address: str,
        curve: sockets.CurveKeys,
        name: str,
        interval: float,
        connect: Callable[[], zmq.Socket],
        check_waiting: Callable[[int, str], None],
    ) -> None:
        self._path = stream.door(address)
        self._token = curve.token
        self._name = name
        self._interval = interval
        self._connect = connect
        self._check_waiting = check_waiting
        self._stock: deque[_Caller] = deque()
        self._closed = False
        _everybody.add(self)

    def call(
        self, method: str, number: int, data: bytes, buffers: Sequence[Any], timeout: float | None
    ) -> tuple[int, Any] | None:
        """``(REPLY or ERROR, its value)``; None if nobody is at the door, or no room: it was not made.

        Raises:
          CallTimeout: after ``timeout`` seconds.
          launch.rpc.wire.Lost: the node was restarted while it had the call.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                caller = self._stock.pop()
            except IndexError:
                caller = self._knock()  # type: ignore[assignment]
                if caller is None:
                    return None
            here = caller.stream
            short = timeout is not None and timeout < self._interval
            try:
                if short:
                    here.set_timeout(timeout)  # type: ignore[arg-type]
                left = here.send(wire.CALL, number, data, buffers)
                if left:
                    self._send_slowly(caller, left, method, timeout, deadline)
            except stream.Gone:  # before it had all of the call: it was not carried out
                full = _is_refusal(here)
                here.close()
                if full:
                    return None
                continue
            except BaseException:
                here.close()
                raise
            try:
                try:
                    kind, answered, body, frames = here.receive()
                except (stream.Silent, stream.Gone) as event:
                    gone = isinstance(event, stream.Gone)
                    kind, answered, body, frames = self._wait(caller, number, method, timeout, deadline, gone)
                if kind == wire.LOST:  # no room for another connection: nothing was read
                    here.close()
                    return None
                if answered != number:
                    raise wire.MalformedMessage(f"an answer to call {answered} instead of {number}")
            except BaseException:
                here.close()  # the answer may be on its way in it
                raise
            try:
                return kind, wire.load(body, frames)
            finally:
                if short:
                    here.set_timeout(self._interval)
                self._stock.append(caller)

    def close(self) -> None:
        """Ends the connections that nobody is using, and makes no more."""
        self._closed = True
        while self._stock:
            try:
                self._stock.pop().stream.close()
            except IndexError:
                return

    def forget(self) -> None:
        """After a fork: the connections are the parent's."""
        self._stock = deque()

    def _knock(self) -> _Caller | None:
        if self._path is None or self._closed:
            return None
        name = os.urandom(8)
        limit = sockets.DEFAULT_MAX_FRAME_BYTES
        here = stream.connect(self._path, self._token, name, limit, self._interval)
        return None if here is None else _Caller(here, name)

    def _send_slowly(
        self,
        caller: _Caller,
        left: list[memoryview],
        method: str,
        timeout: float | None,
        deadline: float | None,
    ) -> None:
        """The node does not read: it hangs, or has much to do."""
        silent = 0
        while left:
            silent += 1
            self._check_waiting(silent, method)
            self._set_remaining(caller, method, timeout, deadline)
            left = caller.stream.send_rest(left)

    def _wait(
        self,
        caller: _Caller,
        number: int,
        method: str,
        timeout: float | None,
        deadline: float | None,
        gone: bool,
    ) -> stream.Message:
        """Waits for an answer that takes long, or learns from the node's next life that it will not come."""
        asking = None
        silent = lost = 0
        try:
            while True:
                self._set_remaining(caller, method, timeout, deadline)
                if asking is None:
                    asking = self._connect()
                said = self._ask(asking, caller, number, gone, deadline)
                if said is None:
                    silent += 1
                    self._check_waiting(silent, method)
                elif said == wire.LOST:
                    # An answer given at this very moment counts; so does a connection not noticed yet.
                    lost += 1
                    if gone or (lost >= _ASKED and not caller.stream.has_news()):
                        raise wire.Lost
                else:
                    silent = lost = 0
                if gone:
                    continue
                try:
                    return caller.stream.receive()
                except stream.Silent:
                    continue
                except stream.Gone:
                    gone = True
        finally:
            if asking is not None:
                asking.close(linger=0)
            if not gone:
                caller.stream.set_timeout(self._interval)

    def _ask(
        self, socket: zmq.Socket, caller: _Caller, number: int, gone: bool, deadline: float | None
    ) -> int | None:
        """Whether the node has the call: PENDING, LOST, or None if it says nothing."""
        patience = self._interval
        if deadline is not None:
            patience = max(0.001, min(patience, deadline - time.monotonic()))
        socket.rcvtimeo = max(1, int(patience * 1000))
        try:
            socket.send(wire.head(wire.PROBE, number) + (b"" if gone else caller.name))
            while True:
                kind, answered, _, _ = wire.receive(socket)
                if answered == number:
                    return kind
        except zmq.Again:
            return None

    def _set_remaining(
        self, caller: _Caller, method: str, timeout: float | None, deadline: float | None
    ) -> None:
        if deadline is None:
            return
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise CallTimeout(f"{self._name}.{method} was not answered within {timeout} s")
        caller.stream.set_timeout(min(remaining, self._interval))


class _Caller:
    """A connection, and its name at the node."""

    def __init__(self, here: stream.Stream, name: bytes) -> None:
        self.stream = here
        self.name = name


def _is_refusal(here: stream.Stream) -> bool:
    """Whether the last word of a connection that has ended is that there is no room for it."""
    try:
        return here.receive()[0] == wire.LOST
    except (stream.Gone, stream.Silent, wire.MalformedMessage):
        return False


def _forget_all() -> None:
    for callers in list(_everybody):
        callers.forget()


os.register_at_fork(after_in_child=_forget_all)
