"""Calls the methods of an object that another process serves.

All calls of a client share one socket. The calling thread sends its call. One thread at a time receives: a
thread that waits for the only open call, and otherwise the client's own thread. ZeroMQ reconnects when a node
is restarted. While calls are open, the client asks the node every second which of them it does not know:
those were lost in a restart.

A signal handler may raise `KeyboardInterrupt` in the main thread at any bytecode. What a call takes, it gives
back in two nested `finally` blocks, in steps that may be repeated. No thread runs callbacks of futures while
it has the right to receive.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import zmq

from launch.errors import CallLost, CallTimeout, ClientClosed, LaunchError, ProgramStopped
from launch.futures import settle
from launch.locks import InterruptSafeCondition
from launch.rpc import sockets, wire
from launch.rpc.shared_socket import SharedSocket

_SILENT_PROBES_AFTER_STOP = 2
_LATE_S = 1.0  # after a deadline, for a thread that is busy with the callback of another future


class _Call(Future):
    """A call, and the future of its answer."""

    def __init__(self, client: Connection, method: str, timeout: float | None, awaited: bool) -> None:
        super().__init__()
        self._condition = InterruptSafeCondition()  # type: ignore[assignment]  # Another thread needs it to answer.
        self.client = client
        self.method = method
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.awaited = awaited  # whether a thread waits for the answer in `call`
        self.number = 0  # among the client's calls; 0 before it is open
        self.frames: list[Any] = []
        self.sent = False
        self.after_probe = 0  # probes sent before it: their answers say nothing about this call

    def result(self, timeout: float | None = None) -> Any:
        self.client._receive_for(self, timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.client._receive_for(self, timeout)
        return super().exception(timeout)


class Connection:
    """The client side of one served node; all methods are safe to use from any thread.

    A future can be canceled until its answer arrives; the node may still carry out the call.

    Args:
      address: address of the node's `launch.rpc.server.RpcServer`; None if `move` sets it later.
      curve: keys of the program.
      name: name of the node, for errors.
      max_in_flight: number of futures that may be open; the next `submit` waits until one is done, except in
        a callback on the client's own thread, which receives the answers.
      stopped: event that is set when the program stops; then calls do not wait for a node that does not
        answer.
      repeat_lost: whether to repeat a call that was lost in a restart of the node; if not, it raises
        `CallLost`.
      max_frame_bytes: largest frame of an answer.

    Attributes:
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
        self._address = address
        self._curve = curve
        self._name = name
        self._max_in_flight = max_in_flight
        self._stopped = threading.Event() if stopped is None else stopped
        self._repeat_lost = repeat_lost
        self._max_frame_bytes = max_frame_bytes
        self._here = address is not None
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Creates the objects that a forked child must not share with its parent."""
        self._pid = os.getpid()
        # Notified when there is room for a future, or the own thread must receive, which both are rare.
        self._lock = InterruptSafeCondition()
        self._receiver: object = None  # a call, or any object, whose thread receives
        self._own: set[int] = set()  # the client's own thread; two if the start of the first was interrupted
        self._busy = False  # whether the own thread handles what it has received
        self._futures: set[int] = set()  # open calls that no thread waits for
        self._open: dict[int, _Call] = {}  # in order of submission
        self._numbers = itertools.count(1)
        self._socket = SharedSocket()
        self._connected = False
        self._silent_probes = 0
        self._probes = 0  # sent so far
        self._probe_at = self._look_at = 0.0

    def call(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
        """Calls `method` in the node and waits for the answer.

        Raises:
          CallTimeout: There was no answer within `timeout` seconds.
          CallLost: The node was restarted while it had the call.
          ProgramStopped: The program stops and the node does not answer.
          ClientClosed: This client was closed.
          LaunchError: The node belongs to another program.
        """
        call = _Call(self, method, timeout, awaited=True)
        try:
            try:
                self._begin_call(call, args, kwargs)
                while self._receiver is call and self._may_receive() and not (call.done() or self._closed):
                    self._receive(call)
                if not call.done():
                    self._release(call)
                    if self._closed:
                        self.close()  # The own thread may be busy.
                    if call.deadline is not None:
                        with contextlib.suppress(concurrent.futures.TimeoutError):
                            call.exception(max(0.0, call.deadline - time.monotonic()) + _LATE_S)
                        settle(call, error=self._late(call))  # unless it is done
                return call.result()
            finally:
                self._leave(call)
        finally:
            if self._receiver is call or call.number in self._open:
                self._leave(call)

    def submit(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
        """Copies the arguments and returns a future of the answer; waits while `max_in_flight` are open.

        The errors are `call`'s; this method or the future raises them.
        """
        call = _Call(self, method, timeout, awaited=False)
        try:
            self._begin_call(call, args, kwargs)
        except BaseException:
            self._leave(call)
            raise
        return call

    def _begin_call(self, call: _Call, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._pid != os.getpid():
            self._begin()
        data, buffers = wire.encode((call.method, args, kwargs))
        # Calls that a thread waits for need no room, and the own thread would wait for itself.
        unbounded = call.awaited or threading.get_ident() in self._own
        with self._lock:
            if not (unbounded or self._has_room()):
                self._futures &= self._open.keys()  # An interrupt may have left others.
                if not self._lock.wait_for(self._has_room, call.timeout):
                    raise CallTimeout(
                        f"{self._name}.{call.method} was not sent within {call.timeout} s: too many open "
                        "futures."
                    )
            if self._closed:
                raise ClientClosed(f"The client of node {self._name!r} is closed.")
            if self._stopped.is_set() and not self._here:
                raise self._gone(call.method)
            if not self._connected:
                self._connect()
            call.number = next(self._numbers)
            call.frames = [wire.head(wire.CALL, call.number, len(buffers)) + data, *buffers]
            if not call.awaited:
                self._futures.add(call.number)
                call.add_done_callback(self._forget)
            self._open[call.number] = call
            if self._here:
                self._send(call)
            if self._repeat_lost or not call.sent:
                call.frames = [bytes(frame) for frame in call.frames]  # the caller may change its arrays
            else:
                call.frames = []
            if self._receiver is None and call.awaited and self._may_receive():
                self._receiver = call
            elif self._receiver is None:
                self._lock.notify_all()
            elif isinstance(self._receiver, _Call):
                self._socket.wake()  # Its thread leaves the rest to the own thread.
            if call.deadline is not None and call.deadline < self._look_at:
                self._look_at = call.deadline
                self._socket.wake()

    def _may_receive(self) -> bool:
        """Whether a thread that waits for its call may receive. An interrupt can lose what it receives."""
        return len(self._open) == 1 or self._busy

    def _release(self, receiver: object) -> None:
        """Gives up the right to receive. The thread may not have it."""
        with self._lock:
            if self._receiver is receiver:
                self._receiver = None
            self._lock.notify_all()

    def _leave(self, call: _Call) -> None:
        """Forgets a call that is done or was interrupted."""
        with self._lock:
            self._open.pop(call.number, None)
            if self._receiver is call:
                self._receiver = None
            self._futures.discard(call.number)
            if self._open or self._busy or self._closed or not call.awaited:
                self._lock.notify_all()

    def move(self, address: str | None) -> None:
        """Sets the node's address; None if it has none now. Calls at the previous address are lost."""
        with self._lock:
            if self._closed:
                return
            self._here = address is not None
            if address is None:
                return
            if address == self._address:
                lost = self._lose(())
            else:
                self._address = address
                if self._connected:
                    self._open_socket()
                lost = self._lose(self._open.values())
        self._fail_lost(lost)

    def stop(self) -> None:
        """Ends the calls to a node without an address: the program stops, and the node will not start."""
        with self._lock:
            self._look_at = 0.0
            self._lock.notify_all()
        self._socket.wake()

    def close(self) -> None:
        """Ends every call that has no answer yet with `ClientClosed`."""
        closing = object()
        try:
            with self._lock:
                self._closed = True
                self._lock.notify_all()
                if self._receiver is None:
                    self._receiver = closing
            if self._receiver is closing:
                self._end()
            else:
                self._socket.wake()  # The thread that receives, or the own thread, calls `_end`.
        finally:
            self._release(closing)

    def _end(self) -> None:
        """Takes the answers that have arrived, then fails the other calls; the last to receive."""
        try:
            while (frames := self._socket.receive(0.0)) is not None:
                self._hear(frames)
        finally:
            self._socket.close()
            for call in list(self._open.values()):
                error = f"The client of node {self._name!r} was closed during a call of {call.method!r}."
                settle(call, error=ClientClosed(error))

    def _has_room(self) -> bool:
        """Whether `submit` can go on without waiting; also True once it must fail."""
        gone = self._stopped.is_set() and not self._here
        return self._closed or gone or len(self._futures) < self._max_in_flight

    def _connect(self) -> None:
        self._open_socket()
        self._probe_at = self._look_at = time.monotonic() + self.probe_interval_s
        threading.Thread(target=self._run, name=f"futures-{self._name}", daemon=True).start()
        self._connected = True

    def _open_socket(self) -> None:
        if self._address is not None:
            limit = self._max_frame_bytes
            self._socket.replace(
                sockets.make_client_socket(self._address, self._curve, max_frame_bytes=limit)
            )

    def _transmit(self, frames: list[Any]) -> None:
        if self._socket.cut:  # The node then does not know the calls of other threads, as after a restart.
            self._open_socket()
        self._socket.send(frames)

    def _send(self, call: _Call) -> None:
        """Sends a call with the lock held. If the node refused the connection, `_look` fails the call."""
        with contextlib.suppress(zmq.Again):
            self._transmit(call.frames)
            call.sent, call.after_probe = True, self._probes

    def _forget(self, call: Future) -> None:
        """Is called when a future is done in any way, including a cancel."""
        assert isinstance(call, _Call)
        self._leave(call)
        if call.cancelled():
            call.set_running_or_notify_cancel()  # `concurrent.futures.wait` requires it

    # Receiving, on one thread at a time.

    def _run(self) -> None:
        """Runs on the client's own thread: receives while calls are open and no other thread receives."""
        self._own.add(threading.get_ident())
        turn = object()
        try:
            while not self._closed:
                with self._lock:
                    self._busy = False
                    self._lock.wait_for(lambda: not self._receiver and (self._closed or self._open))
                    self._busy = True
                    self._receiver = turn
                try:
                    if not self._closed:
                        self._receive(turn)
                finally:
                    self._release(turn)
        except zmq.ContextTerminated:
            return
        except Exception:
            self.close()
            raise
        self.close()

    def _receive_for(self, call: _Call, timeout: float | None) -> None:
        """Receives until a call is done, if this is the own thread: no other thread might, in a callback."""
        if call.done() or threading.get_ident() not in self._own:
            return
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not (call.done() or self._closed) and (now := time.monotonic()) < until:
            with self._lock:
                left = None if timeout is None else until - now
                if not self._lock.wait_for(lambda: call.done() or not self._receiver, left) or call.done():
                    return
                self._receiver = call
            try:
                if not self._closed:
                    self._receive(call, until)
            finally:
                self._release(call)
        if self._closed and not call.done():
            self.close()

    def _receive(self, receiver: object, until: float = float("inf")) -> None:
        """Receives one message, if one comes in time. Only the receiver's own answer leaves it the right."""
        frames = self._socket.receive(min(self._look_at, until) - time.monotonic())
        if frames is not None:
            self._hear(frames, receiver)
        if time.monotonic() >= self._look_at:
            self._look(receiver)

    def _hear(self, frames: list[zmq.Frame], receiver: object = None) -> None:
        try:
            kind, number, body, buffers = wire.parse(frames)
        except wire.MalformedMessage:
            return  # its call stays open until its timeout, and the probes include it
        answered = self._open.get(number) if kind != wire.UNKNOWN else None
        if answered is not receiver or receiver is None:
            self._release(receiver)
        self._silent_probes = 0
        if kind == wire.UNKNOWN:
            with self._lock:
                unknown = struct.unpack(f"<{len(body) // 8}Q", body)
                calls = [self._open[n] for n in unknown if n in self._open]
                # A node that was away answers each probe that waited for it. A call that was sent again
                # after the probe is not lost.
                lost = self._lose(call for call in calls if call.after_probe < number)
            self._fail_lost(lost)
            return
        if answered is None:
            return
        try:
            result = wire.load(body, buffers)
            error = wire.rebuild_error(result, self._name) if kind == wire.ERROR else None
        except Exception as failure:  # a class that cannot be imported here
            error = failure
        settle(answered, None if error is not None else result, error)
        if self._receiver is answered and answered is not receiver:
            self._socket.wake()  # The own thread waits for it in a callback.

    def _look(self, receiver: object) -> None:
        """Fails calls that are overdue or cannot be answered, and probes the others."""
        now = time.monotonic()
        failed: list[tuple[_Call, LaunchError]] = []
        refused = False
        with self._lock:
            probing = now >= self._probe_at
            if probing:
                self._probe_at = now + self.probe_interval_s
            asked = [number for number, call in self._open.items() if call.sent]
            if probing and asked:
                self._silent_probes += 1
                self._probes += 1
                try:
                    probe = wire.head(wire.PROBE, self._probes)
                    self._transmit([probe + struct.pack(f"<{len(asked)}Q", *asked)])
                except zmq.Again:
                    refused = True
            elif not asked:
                self._silent_probes = 0
            absent = self._silent_probes > _SILENT_PROBES_AFTER_STOP
            for call in self._open.values():
                if call.deadline is not None and call.deadline <= now:
                    failed.append((call, self._late(call)))
                elif self._stopped.is_set() and (absent if call.sent else not self._here):
                    failed.append((call, self._gone(call.method)))
                elif refused or (self._here and not call.sent):
                    error = (
                        f"Node {self._name!r} refused this client: it belongs to another program, or an "
                        f"array of an answer is larger than max_frame_bytes={self._max_frame_bytes}."
                    )
                    failed.append((call, LaunchError(error)))
            deadlines = [call.deadline for call in self._open.values() if call.deadline is not None]
            self._look_at = min([self._probe_at, *(deadline for deadline in deadlines if deadline > now)])
        if failed:
            self._release(receiver)
        for call, failure in failed:
            settle(call, error=failure)

    def _lose(self, calls: Iterable[_Call]) -> list[_Call]:
        """Sends the lost calls again, and those that were not sent; returns those not to be repeated."""
        # The thread of a call that has its answer may not have taken it from the open ones yet.
        lost = [call for call in calls if call.sent and not call.done()]
        for call in lost:
            call.sent = not self._repeat_lost
        for call in self._open.values():
            if not call.sent:
                self._send(call)
        return [] if self._repeat_lost else lost

    def _fail_lost(self, calls: list[_Call]) -> None:
        for call in calls:
            text = "The node was restarted while it had this call, which may have been carried out."
            settle(call, error=CallLost(f"{self._name}.{call.method}: {text}"))

    def _gone(self, method: str) -> ProgramStopped:
        return ProgramStopped(f"{self._name}.{method}: the program stopped, and the node does not answer.")

    def _late(self, call: _Call) -> CallTimeout:
        return CallTimeout(f"{self._name}.{call.method} was not answered in time.")
