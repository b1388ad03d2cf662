"""Calls the methods of an object that another process serves.

A call and the answers of futures each have a *line*: a socket, and the calls on it that are open. One thread
at a time works on a line. The line of futures has a thread of its own; a call takes one that is idle, and its
thread sends and receives by itself. ZeroMQ reconnects when a node is restarted. While calls are open, a line
asks the node every second which of them it does not know: those were lost in a restart.

A signal handler may raise `KeyboardInterrupt` in the main thread at any bytecode. The line of a call that was
interrupted is closed, because anything may be left on it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from launch.errors import CallLost, CallTimeout, ClientClosed, LaunchError, ProgramStopped
from launch.futures import settle
from launch.locks import InterruptSafeCondition
from launch.rpc import sockets, wire

_SILENT_PROBES_AFTER_STOP = 2


class _Call(Future):
    """A call, and the future of its answer."""

    def __init__(
        self, line: _Line, method: str, data: bytes, buffers: Sequence[Any], timeout: float | None
    ) -> None:
        super().__init__()
        self._condition = InterruptSafeCondition()  # type: ignore[assignment]  # Another thread needs it to answer.
        self.line = line
        self.method = method
        self.number = 0  # among the line's calls
        self.data = data
        self.buffers = [zmq.Frame(buffer, copy=True) for buffer in buffers]  # The caller may change them.
        self.deadline = math.inf if timeout is None else time.monotonic() + timeout
        self.sent = False
        self.after_probe = 0  # probes sent before it: their answers say nothing about this call

    def result(self, timeout: float | None = None) -> Any:
        self.line.work_for(self, timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.line.work_for(self, timeout)
        return super().exception(timeout)


class Connection:
    """The client side of one served node; all methods are safe to use from any thread.

    A future can be canceled until its answer arrives; the node may still carry out the call.

    Args:
      address: address of the node's `launch.rpc.server.RpcServer`; None if `move` sets it later.
      curve: keys of the program.
      name: name of the node, for errors.
      max_in_flight: number of futures that may be open; the next `submit` waits until one is done, except in
        a callback of a future, on the thread that receives the answers.
      stopped: event that is set when the program stops; then calls do not wait for a node that does not
        answer.
      repeat_lost: whether to repeat a call that was lost in a restart of the node; if not, it raises
        `CallLost`.
      max_frame_bytes: largest frame of an answer.

    Attributes:
      address: as given, or set by `move`.
      here: whether the node is at `address`.
      closed: whether the client is closed.
      probe_interval_s: seconds between two probes, while calls are open.
    """

    probe_interval_s = 1.0

    def __init__(
        self,
        address: str | None,
        curve: sockets.CurveKeys,
        *,
        name: str = "node",
        max_in_flight: int = 1024,
        stopped: threading.Event | None = None,
        repeat_lost: bool = False,
        max_frame_bytes: int = sockets.DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        self.address, self.here = address, address is not None
        self.curve, self.name, self.max_frame_bytes = curve, name, max_frame_bytes
        self.repeat_lost = repeat_lost
        self.stopped = threading.Event() if stopped is None else stopped
        self.closed = False
        self._max_in_flight = max_in_flight
        self._begin()

    def _begin(self) -> None:
        """Creates the objects that a forked child must not share with its parent."""
        self._lock = InterruptSafeCondition()  # Notified when there is room for a future.
        self._lines: set[_Line] = set()
        self._idle: list[_Line] = []  # lines for calls
        self._line: _Line | None = None  # the futures' line
        self._futures: set[Future] = set()  # those that are open
        self._pid = os.getpid()

    def call(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
        """Calls `method` in the node and waits for the answer.

        Raises:
          CallTimeout: There was no answer within `timeout` seconds.
          CallLost: The node was restarted while it had the call.
          ProgramStopped: The program stops and the node does not answer.
          ClientClosed: This client was closed.
          LaunchError: The node belongs to another program.
        """
        data, buffers = wire.encode((method, args, kwargs))
        line = self._take_line()
        try:
            call = _Call(line, method, data, buffers, timeout)
            line.new.append(call)
            while not call.done():
                line.work()
        except BaseException:
            line.close()
            raise
        with self._lock:
            closed = self.closed
            if not closed:
                self._idle.append(line)
        if closed:
            line.close()
        return call.result()

    def submit(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
        """Copies the arguments and returns a future of the answer; waits while `max_in_flight` are open.

        The errors are `call`'s; this method or the future raises them.
        """
        data, buffers = wire.encode((method, args, kwargs))
        line = self._take_line(for_futures=True)
        call = _Call(line, method, data, buffers, timeout)
        try:
            with self._lock:
                if not line.is_mine() and not self._lock.wait_for(self._has_room, timeout):
                    late = f"was not sent within {timeout} s: too many open futures."
                    raise CallTimeout(f"{self.name}.{method} {late}")
                self._check_open()
                self._futures.add(call)
                call.add_done_callback(self._forget)
                line.new.append(call)
                line.wake()
        except BaseException:
            self._forget(call)
            raise
        return call

    def _take_line(self, for_futures: bool = False) -> _Line:
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._check_open()
            if self._idle and not for_futures:
                line = self._idle.pop()
            elif self._line is not None and for_futures:
                line = self._line
            else:
                line = _Line(self)
                self._lines.add(line)
                if for_futures:
                    name = f"futures-{self.name}"
                    threading.Thread(target=self._run, args=(line,), name=name, daemon=True).start()
                    self._line = line
        return line

    def _check_open(self) -> None:
        if self.closed:
            raise ClientClosed(f"The client of node {self.name!r} is closed.")

    def _has_room(self) -> bool:
        """Whether `submit` can go on without waiting; also True once it must fail."""
        gone = self.stopped.is_set() and not self.here
        return self.closed or gone or len(self._futures) < self._max_in_flight

    def _forget(self, call: Future) -> None:
        """Is called when a future is done in any way, including a cancel."""
        with self._lock:
            self._futures.discard(call)
            self._lock.notify_all()
        if call.cancelled():
            call.set_running_or_notify_cancel()  # `concurrent.futures.wait` requires it

    def _run(self, line: _Line) -> None:
        """Runs on the thread of the futures' line."""
        try:
            with contextlib.suppress(zmq.ContextTerminated):
                while not self.closed:
                    line.work()
        finally:
            self.close()
            line.close()

    def forget(self, line: _Line) -> None:
        """Is called when a line is closed."""
        with self._lock:
            self._lines.discard(line)

    def move(self, address: str | None) -> None:
        """Sets the node's address; None if it has none now. Calls at the previous address are lost."""
        idle: list[_Line] = []
        with self._lock:
            if address != self.address:  # Idle lines would try to connect there again and again.
                idle, self._idle = self._idle, []
            self.address, self.here = address or self.address, address is not None
        self.stop()
        for line in idle:
            line.close()

    def stop(self) -> None:
        """Ends the calls to a node without an address: the program stops, and the node will not start."""
        with self._lock:
            self._lock.notify_all()
            for line in self._lines:
                line.wake()

    def close(self) -> None:
        """Ends every call that has no answer yet with `ClientClosed`."""
        if os.getpid() != self._pid:
            self._begin()  # The lines are the parent's.
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        self.stop()
        for line in idle:
            line.close()


class _Line:
    """A socket and the calls on it that are open. Only `new`, `wake` and `is_mine` are for other threads.

    Attributes:
      new: calls that are to be sent.
    """

    def __init__(self, client: Connection) -> None:
        self._client = client
        self.new: collections.deque[_Call] = collections.deque()
        self._thread = 0  # which works on it
        self._open: dict[int, _Call] = {}  # in order of submission
        self._numbers = itertools.count(1)
        self._silent_probes = 0
        self._probes = 0  # sent so far
        self._probe_at = self._look_at = 0.0
        self._poller = zmq.Poller()
        # The line works with these: another thread may have moved the client since.
        self._address, self._here = client.address, client.here
        self._socket: zmq.Socket | None = None
        self._open_socket()  # First, because it may fail.
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._poller.register(self._bell, zmq.POLLIN)

    def is_mine(self) -> bool:
        """Whether the calling thread works on this line, now in a callback of a future."""
        return self._thread == threading.get_ident()

    def wake(self) -> None:
        """Ends the current or the next wait of `work`."""
        with contextlib.suppress(OSError):  # It wakes anyway, or is closed.
            self._ring.send(b"\0")

    def work_for(self, call: _Call, timeout: float | None) -> None:
        """Works until a call is done, in a callback of a future: no other thread would."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while self.is_mine() and not call.done() and time.monotonic() < until:
            self.work(until)

    def work(self, until: float = math.inf) -> None:
        """Sends what is to be sent, and takes messages if some come before the time `until`."""
        client, self._thread = self._client, threading.get_ident()
        if client.closed:
            self.close()
            return
        if (self._address, self._here) != (client.address, client.here):
            self._move()
            return  # What the caller waits for may have been lost.
        while self.new:
            self._begin(self.new.popleft())
        seconds = min(self._look_at if self._open else math.inf, until) - time.monotonic()
        ready = dict(self._poller.poll(None if seconds == math.inf else max(0, math.ceil(1000 * seconds))))
        if self._bell.fileno() in ready:
            self._bell.recv(4096)
        if self._socket in ready:
            self._hear_all()
        if time.monotonic() >= self._look_at or (client.stopped.is_set() and not self._here):
            self._look()

    def _begin(self, call: _Call) -> None:
        if not self._open:
            self._silent_probes = 0
            self._probe_at = self._look_at = time.monotonic() + self._client.probe_interval_s
        self._look_at = min(self._look_at, call.deadline)
        call.number = next(self._numbers)
        self._open[call.number] = call
        if self._here:
            self._send(call)
        elif self._client.stopped.is_set():
            self._look_at = 0.0  # It fails at once.

    def _send(self, call: _Call) -> None:
        """Sends a call. If the node refused the connection, `_look` fails the call."""
        if call.done():
            return  # It was canceled.
        head = wire.head(wire.CALL, call.number, len(call.buffers))
        with contextlib.suppress(zmq.Again):
            self._transmit([zmq.Frame(head + call.data, copy=True), *call.buffers])
            call.sent, call.after_probe = True, self._probes
            if not self._client.repeat_lost:
                call.buffers = []

    def _transmit(self, frames: list[Any]) -> None:
        assert self._socket is not None
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _open_socket(self) -> None:
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
            self._socket = None
        if self._address is not None:
            curve, limit = self._client.curve, self._client.max_frame_bytes
            self._socket = sockets.make_client_socket(self._address, curve, max_frame_bytes=limit)
            self._poller.register(self._socket, zmq.POLLIN)

    def _move(self) -> None:
        """Follows the node. What was sent to where it was before is lost; what waited for it is sent."""
        before = self._address
        self._address, self._here = self._client.address, self._client.here
        lost = []
        if self._address != before:
            self._open_socket()
            lost = [call for call in self._open.values() if call.sent]
        if self._here:
            for call in [call for call in self._open.values() if not call.sent]:
                self._send(call)
        self._lose(lost)

    def _hear_all(self) -> None:
        """Takes the messages that have arrived."""
        with contextlib.suppress(zmq.Again, zmq.ContextTerminated):
            while self._socket is not None:
                self._hear(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def _hear(self, frames: list[zmq.Frame]) -> None:
        try:
            kind, number, body, buffers = wire.parse(frames)
        except wire.MalformedMessage:
            return  # its call stays open until its timeout, and the probes include it
        self._silent_probes = 0
        if kind == wire.UNKNOWN:
            unknown = struct.unpack(f"<{len(body) // 8}Q", body)
            calls = [self._open[n] for n in unknown if n in self._open]
            # A node that was away answers each probe that waited for it. A call that was sent again after the
            # probe is not lost.
            self._lose([call for call in calls if call.after_probe < number])
            return
        call = self._open.pop(number, None)
        if call is None:
            return
        try:
            result = wire.load(body, buffers)
            error = wire.rebuild_error(result, self._client.name) if kind == wire.ERROR else None
        except Exception as failure:  # a class that cannot be imported here
            error = failure
        settle(call, None if error is not None else result, error)

    def _lose(self, calls: list[_Call]) -> None:
        """Repeats calls that were lost, or fails them."""
        for call in calls:
            if self._client.repeat_lost:
                self._send(call)
            else:
                text = "The node was restarted while it had this call, which may have been carried out."
                self._fail(call, CallLost(f"{self._client.name}.{call.method}: {text}"))

    def _look(self) -> None:
        """Fails calls that are overdue or cannot be answered, and probes the others."""
        client, now, refused = self._client, time.monotonic(), False
        self._open = {number: call for number, call in self._open.items() if not call.done()}
        if now >= self._probe_at:
            self._probe_at = now + client.probe_interval_s
            asked = [number for number, call in self._open.items() if call.sent]
            if asked:
                self._silent_probes += 1
                self._probes += 1
                probe = wire.head(wire.PROBE, self._probes)
                try:
                    self._transmit([probe + struct.pack(f"<{len(asked)}Q", *asked)])
                except zmq.Again:
                    refused = True
        absent = self._silent_probes > _SILENT_PROBES_AFTER_STOP
        self._look_at = self._probe_at
        for call in list(self._open.values()):
            what = f"{client.name}.{call.method}"
            if call.deadline <= now:
                self._fail(call, CallTimeout(f"{what} was not answered in time."))
            elif client.stopped.is_set() and (absent if call.sent else not self._here):
                text = "the program stopped, and the node does not answer."
                self._fail(call, ProgramStopped(f"{what}: {text}"))
            elif refused or (self._here and not call.sent):
                text = (
                    f"Node {client.name!r} refused this client: it belongs to another program, or an array "
                    f"of an answer is larger than max_frame_bytes={client.max_frame_bytes}."
                )
                self._fail(call, LaunchError(text))
            else:
                self._look_at = min(self._look_at, call.deadline)

    def _fail(self, call: _Call, error: LaunchError) -> None:
        self._open.pop(call.number, None)
        settle(call, error=error)

    def close(self) -> None:
        """Takes the answers that have arrived, then fails the other calls."""
        self._hear_all()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._client.forget(self)  # From here on, no other thread wakes it.
        self._bell.close()
        self._ring.close()
        for call in [*self._open.values(), *self.new]:
            text = f"The client of node {self._client.name!r} was closed during a call of {call.method!r}."
            self._fail(call, ClientClosed(text))
