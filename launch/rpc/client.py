"""Calls the methods of an object that another process serves.

A call that waits uses a connection of its own, taken from a small stock: the calling thread writes and
reads it itself. To a node of this machine that is a stream (`launch.rpc.caller`), else, and as long as a node
is not there, a ZeroMQ socket. Futures share one connection, kept by one thread. Both connect again by
themselves when the node comes back after a restart; a call that it had before is then reported as `CallLost`,
because the node may or may not have carried it out.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import zmq

from launch.errors import (
    CallLost,
    CallTimeout,
    ClientClosed,
    LaunchError,
    ProgramStopped,
    RemoteError,
    RemoteTraceback,
)
from launch.rpc import sockets, wire
from launch.rpc.caller import Callers

# While a call waits, the client asks every so often whether the node still has it (seconds).
PROBE_INTERVAL = 1.0
_SILENT_PROBES_AFTER_STOP = 2
# What is sent waits inside the socket for a node that is not there (yet). Sending itself waits only on a
# socket that was refused.
_REFUSED_AFTER_MS = 2000


class Connection:
    """The client side of one served node; `Connection.call` and `.submit` are safe to use from any thread.

    Args:
      address: of the node's `launch.rpc.server.Server`.
      curve: keys of the program.
      name: of the node, for errors.
      max_in_flight: futures that may be open; the next ``submit`` waits until one is done.
      stopped: set when the program stops; from then on a node that does not answer is not waited for.
    """

    def __init__(
        self,
        address: str,
        curve: sockets.CurveKeys,
        *,
        name: str = "node",
        max_in_flight: int = 1024,
        stopped: threading.Event | None = None,
    ) -> None:
        self._address = address
        self._curve = curve
        self._name = name
        self._max_in_flight = max_in_flight
        self._stopped = threading.Event() if stopped is None else stopped
        self._numbers = itertools.count(1)
        self._stock: deque[zmq.Socket] = deque()
        self._lock = threading.Lock()
        self._sender: _FutureCalls | None = None
        self._closed = False
        self._callers = Callers(address, curve, name, PROBE_INTERVAL, self._connect, self._check_waiting)

    def call(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
        """Calls ``method`` over there and waits for the answer, at most ``timeout`` seconds."""
        data, buffers = wire.encode((method, args, kwargs))
        number = next(self._numbers)
        try:
            answer = self._callers.call(method, number, data, buffers, timeout)
        except wire.Lost:
            raise _lost(self._name, method) from None
        if answer is not None:
            if self._closed:
                self._callers.close()
            if answer[0] == wire.REPLY:
                return answer[1]
            raise _error(answer[1], self._name)
        # Nobody is at the door (yet, or any more), or there is none.
        try:
            socket = self._stock.pop()
        except IndexError:
            socket = self._connect()
        try:
            _send(socket, wire.head(wire.CALL, number, len(buffers)) + data, buffers, self._name)
            kind, body, frames = self._receive(socket, number, method, timeout)
        except BaseException:
            socket.close(linger=0)  # an answer may be on its way in it
            raise
        self._stock.append(socket)
        if self._closed:
            self._close_stock()
        if kind == wire.REPLY:
            return wire.decode(body, frames)
        raise _error(wire.decode(body, frames), self._name)

    def submit(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
        """Calls ``method`` over there; the arguments are copied before this returns."""
        sender = self._sender
        if sender is None:
            with self._lock:
                sender = self._sender
                if sender is None:
                    socket = self._connect()
                    sender = _FutureCalls(socket, self._name, self._max_in_flight, self._stopped)
                    self._sender = sender
        return sender.submit(method, args, kwargs, timeout)

    def close(self) -> None:
        """Ends every waiting call with `ClientClosed`."""
        with self._lock:
            self._closed = True
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        self._close_stock()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _connect(self) -> zmq.Socket:
        if self._closed:
            raise ClientClosed(f"the client of node {self._name!r} is closed")
        socket = sockets.make_client_socket(self._address, self._curve)
        socket.rcvtimeo = int(PROBE_INTERVAL * 1000)
        socket.sndtimeo = _REFUSED_AFTER_MS
        return socket

    def _close_stock(self) -> None:
        self._callers.close()
        while self._stock:
            try:
                self._stock.pop().close(linger=0)
            except IndexError:
                return

    def _receive(
        self, socket: zmq.Socket, number: int, method: str, timeout: float | None
    ) -> tuple[int, memoryview, Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        silent = 0
        try:
            while True:
                if deadline is not None:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise CallTimeout(f"{self._name}.{method} was not answered within {timeout} s")
                    socket.rcvtimeo = max(1, int(min(remaining, PROBE_INTERVAL) * 1000))
                try:
                    kind, answered, body, buffers = wire.receive(socket)
                except zmq.Again:
                    silent += 1
                    self._check_waiting(silent, method)
                    _send(socket, wire.head(wire.PROBE, number), (), self._name)
                    continue
                if answered == number and kind <= wire.ERROR:
                    return kind, body, buffers
                silent = 0
                if answered != number or kind == wire.PENDING:
                    continue
                raise _lost(self._name, method)
        finally:
            if deadline is not None:
                socket.rcvtimeo = int(PROBE_INTERVAL * 1000)

    def _check_waiting(self, silent: int, method: str) -> None:
        if self._closed:
            raise ClientClosed(f"the client of node {self._name!r} was closed during a call of {method!r}")
        _check_stopped(silent, self._name, method, self._stopped)


class _FutureCalls:
    """One connection, and the thread that keeps it, for all futures of a client."""

    def __init__(self, socket: zmq.Socket, name: str, max_in_flight: int, stopped: threading.Event) -> None:
        self._socket = socket
        self._name = name
        self._max_in_flight = max_in_flight
        self._numbers = itertools.count(1)
        self._outbox: deque[tuple[int, bytes, list[Any]]] = deque()
        self._open: dict[int, tuple[Future, str, float | None]] = {}
        self._room = threading.Condition()
        self._waiting_for_room = 0
        self._closed = False
        self._sleeping = False
        self._stopped = stopped
        door = f"inproc://launch-futures-{id(self)}"
        self._woken = sockets.context().socket(zmq.PULL)
        self._woken.bind(door)
        self._wake = sockets.context().socket(zmq.PUSH)
        self._wake.linger = 0
        self._wake.connect(door)
        self._wake_lock = threading.Lock()
        threading.Thread(target=self._run, name=f"futures-{name}", daemon=True).start()

    def submit(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
        data, buffers = wire.encode((method, args, kwargs))
        future: Future = Future()
        # The caller may change its arrays right away, so the buffers are copied now.
        frames = [zmq.Frame(bytes(buffer.raw())) for buffer in buffers]
        deadline = None if timeout is None else time.monotonic() + timeout
        if len(self._open) >= self._max_in_flight:
            self._wait_for_room()
        number = next(self._numbers)
        self._open[number] = (future, method, deadline)
        self._outbox.append((number, wire.head(wire.CALL, number, len(frames)) + data, frames))
        if self._sleeping or self._closed:
            self._sleeping = False
            self._ring()
        return future

    def close(self) -> None:
        self._closed = True
        with self._room:
            self._room.notify_all()
        self._ring()

    def _wait_for_room(self) -> None:
        with self._room:
            self._waiting_for_room += 1
            try:
                self._room.wait_for(lambda: self._closed or len(self._open) < self._max_in_flight)
            finally:
                self._waiting_for_room -= 1

    def _ring(self) -> None:
        with self._wake_lock:
            over = self._wake.closed
            if not over:
                self._wake.send(b"")
        if over:
            self._fail_all(ClientClosed(f"the client of node {self._name!r} is closed"))

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        silent, last_probe = 0, time.monotonic()
        try:
            while not self._closed:
                self._send_all()
                if self._receive():
                    silent = 0
                    continue
                self._sleeping = True
                if self._outbox:  # came after the last look, when nobody knew that a wake was needed
                    self._sleeping = False
                    continue
                events = dict(poller.poll(self._pause_ms()))
                self._sleeping = False
                if self._woken in events:
                    while _readable(self._woken):
                        self._woken.recv()
                now = time.monotonic()
                if now - last_probe >= PROBE_INTERVAL and self._open:
                    last_probe, silent = now, silent + 1
                    self._look_after(now, silent)
        except zmq.ContextTerminated:
            return
        finally:
            with self._wake_lock:
                self._wake.close(linger=0)
            self._woken.close(linger=0)
            self._socket.close(linger=0)
            self._fail_all(ClientClosed(f"the client of node {self._name!r} was closed during a call"))

    def _pause_ms(self) -> int:
        """How long the thread may sleep: until the next probe, or the first deadline."""
        if not self._open:
            return 60_000
        deadlines = [deadline for _, _, deadline in list(self._open.values()) if deadline is not None]
        pause = PROBE_INTERVAL
        if deadlines:
            pause = min(pause, min(deadlines) - time.monotonic())
            if pause <= 0:
                self._expire(time.monotonic())
                return 0
        return max(1, int(pause * 1000))

    def _send_all(self) -> None:
        while self._outbox:
            number, body, frames = self._outbox.popleft()
            entry = self._open.get(number)
            if entry is None:
                continue
            if not entry[0].set_running_or_notify_cancel():
                self._done(number)
                continue
            try:
                _send(self._socket, body, frames, self._name)
            except LaunchError as error:
                _fail(self._done(number)[0], error)

    def _receive(self) -> bool:
        """Takes one message, if there is one; whether there was."""
        try:
            kind, number, body, buffers = wire.receive(self._socket, zmq.NOBLOCK)
        except zmq.Again:
            return False
        if kind == wire.PENDING or number not in self._open:
            return True
        future, method, _ = self._done(number)
        if kind == wire.LOST:
            future.set_exception(_lost(self._name, method))
            return True
        try:
            result = wire.decode(body, buffers)
            error = _error(result, self._name) if kind == wire.ERROR else None
        except Exception as failure:  # of a class that cannot be imported here
            error = failure
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        return True

    def _done(self, number: int) -> tuple[Future, str, float | None]:
        entry = self._open.pop(number)
        if self._waiting_for_room:
            with self._room:
                self._room.notify()
        return entry

    def _expire(self, now: float) -> None:
        for number, (future, method, deadline) in list(self._open.items()):
            if deadline is not None and deadline <= now:
                self._done(number)
                _fail(future, CallTimeout(f"{self._name}.{method} was not answered in time"))

    def _look_after(self, now: float, silent: int) -> None:
        """Asks for every open call whether the node still has it."""
        self._expire(now)
        for number, (future, method, _) in list(self._open.items()):
            try:
                _check_stopped(silent, self._name, method, self._stopped)
                if future.running():
                    _send(self._socket, wire.head(wire.PROBE, number), (), self._name)
            except LaunchError as error:  # stopped or refused
                self._done(number)
                _fail(future, error)

    def _fail_all(self, error: LaunchError) -> None:
        for number in list(self._open):
            _fail(self._open.pop(number)[0], error)


def _readable(socket: zmq.Socket) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    return bool(int(events) & zmq.POLLIN)


def _send(socket: zmq.Socket, body: bytes, buffers: Any, name: str) -> None:
    """Sends a message without copying its buffers."""
    try:
        if not buffers:
            if len(body) < 65536:
                socket.send(body)
            else:
                socket.send(body, copy=False)
            return
        socket.send(body, zmq.SNDMORE)
        for buffer in buffers[:-1]:
            socket.send(buffer, zmq.SNDMORE, copy=False)
        socket.send(buffers[-1], copy=False)
    except zmq.Again:
        raise LaunchError(f"node {name!r} refused this client: it belongs to another program") from None


def _error(failure: Any, name: str) -> BaseException:
    error = wire.rebuild_error(failure)
    if error is None:
        error = RemoteError(failure["kind"], failure["message"])
    error.__cause__ = RemoteTraceback(name, failure["traceback"])
    return error


def _lost(name: str, method: str) -> CallLost:
    return CallLost(
        f"{name}.{method}: the node was restarted while it had this call; it may have been carried out"
    )


def _fail(future: Future, error: BaseException) -> None:
    if future.running() or future.set_running_or_notify_cancel():
        future.set_exception(error)


def _check_stopped(silent: int, name: str, method: str, stopped: threading.Event) -> None:
    """A node that does not answer is waited for, unless the program is stopping: then nobody restarts it."""
    if silent > _SILENT_PROBES_AFTER_STOP and stopped.is_set():
        raise ProgramStopped(f"{name}.{method}: the program stopped and the node no longer answers")
