"""Calls the methods of an object that another process serves.

All calls of a client share one socket. The calling thread sends its call. One thread at a time receives: a
thread that waits for its answer, or the client's own thread while only futures are open. ZeroMQ reconnects
when a node is restarted. While calls are open, the client asks the node every second which of them it does
not know: those were lost in a restart.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import zmq

from launch.errors import CallLost, CallTimeout, ClientClosed, LaunchError, ProgramStopped
from launch.futures import settle
from launch.rpc import sockets, wire
from launch.rpc.shared_socket import SharedSocket

_SILENT_PROBES_AFTER_STOP = 2


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has no answer yet."""

    method: str
    frames: list[Any]
    deadline: float | None
    awaited: bool  # whether a thread waits for the answer and receives in the meantime
    future: Future = field(default_factory=Future)
    sent: bool = False
    after_probe: int = 0  # probes sent before it: their answers say nothing about this call


class Connection:
    """The client side of one served node; all methods are safe to use from any thread.

    A future can be canceled until its answer arrives; the node may still carry out the call.

    Args:
      address: address of the node's `launch.rpc.server.Server`; None if `move` sets it later.
      curve: keys of the program.
      name: name of the node, for errors.
      max_in_flight: number of futures that may be open; the next `submit` waits until one is done.
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
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)  # a call is done, or the client is closed or stopped
        self._turn = threading.Condition(self._lock)  # for callers: a call is done, or no thread receives
        self._futures = threading.Condition(self._lock)  # for the client's own thread: it must receive
        self._receiving = False
        self._receiver: int | None = None  # the thread that receives
        self._num_futures = 0  # open calls that no thread waits for
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
        future = self._begin_call(method, args, kwargs, timeout, awaited=True)
        while not future.done():
            with self._lock:
                # A callback of a future runs on the receiving thread, and may call in turn.
                is_nested = self._receiver == threading.get_ident()
                if not is_nested:
                    self._turn.wait_for(lambda: future.done() or not self._receiving)
                    if future.done():
                        break
                    self._receiving = True
            if is_nested and self._closed:  # The calls below this one on the stack cannot end before it.
                self._end()
            elif is_nested:
                self._receive_message()
            else:
                self._receive()
        return future.result()

    def submit(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
        """Copies the arguments and returns a future of the answer; waits while `max_in_flight` are open.

        The errors are those of `call`; this method or the future raises them.
        """
        return self._begin_call(method, args, kwargs, timeout, awaited=False)

    def _begin_call(
        self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None, *, awaited: bool
    ) -> Future:
        if self._pid != os.getpid():
            self._begin()
        data, buffers = wire.encode((method, args, kwargs))
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            # Calls that a thread waits for need no room.
            if not (awaited or self._room.wait_for(self._has_room, timeout)):
                raise CallTimeout(
                    f"{self._name}.{method} was not sent within {timeout} s: too many open futures."
                )
            if self._closed:
                raise ClientClosed(f"The client of node {self._name!r} is closed.")
            if self._stopped.is_set() and not self._here:
                raise self._gone(method)
            if not self._connected:
                self._connect()
            number = next(self._numbers)
            frames: list[Any] = [wire.head(wire.CALL, number, len(buffers)) + data, *buffers]
            call = self._open[number] = _Call(method, frames, deadline, awaited)
            call.future.add_done_callback(lambda future: self._forget(number, future))
            if self._here:
                self._send(call)
            if self._repeat_lost or not call.sent:
                call.frames = [bytes(frame) for frame in frames]  # the caller may change its arrays
            else:
                call.frames = []
            if not awaited:
                self._num_futures += 1
                self._futures.notify()
            if deadline is not None and deadline < self._look_at:
                self._look_at = deadline
                self._socket.wake()
        return call.future

    def move(self, address: str | None) -> None:
        """Sets the node's address; None if it has none now. Calls at the previous address are lost."""
        lost: list[_Call] = []
        with self._lock:
            if self._closed:
                return
            self._here = address is not None
            if address is None:
                return
            if address != self._address:
                self._address = address
                if self._connected:
                    self._open_socket(address)
                lost = self._lose(self._open.values())
            for call in self._open.values():
                if not call.sent:
                    self._send(call)
        self._fail_lost(lost)

    def stop(self) -> None:
        """Ends the calls to a node without an address: the program stops, and the node will not start."""
        with self._lock:
            self._look_at = 0.0
            self._room.notify_all()
        self._socket.wake()

    def close(self) -> None:
        """Ends every call that has no answer yet with `ClientClosed`."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._futures.notify()
            if self._receiving:
                self._socket.wake()  # The receiving thread calls `_end`.
                return
            self._receiving = True
        self._end()

    def _end(self) -> None:
        """Takes the answers that have arrived, then fails the other calls; the last to receive."""
        try:
            while (frames := self._socket.receive(0.0)) is not None:
                self._hear(frames)
        finally:
            self._socket.close()
            for call in list(self._open.values()):
                error = f"The client of node {self._name!r} was closed during a call of {call.method!r}."
                settle(call.future, error=ClientClosed(error))

    def _has_room(self) -> bool:
        """Whether `submit` can go on without waiting; also True once it must fail."""
        gone = self._stopped.is_set() and not self._here
        return self._closed or gone or self._num_futures < self._max_in_flight

    def _connect(self) -> None:
        if self._address is not None:
            self._open_socket(self._address)
        self._probe_at = self._look_at = time.monotonic() + self.probe_interval_s
        threading.Thread(target=self._run, name=f"futures-{self._name}", daemon=True).start()
        self._connected = True

    def _open_socket(self, address: str) -> None:
        limit = self._max_frame_bytes
        self._socket.replace(sockets.make_client_socket(address, self._curve, max_frame_bytes=limit))

    def _send(self, call: _Call) -> None:
        """Sends a call with the lock held. If the node refused the connection, `_look` fails the call."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(call.frames)
            call.sent, call.after_probe = True, self._probes

    def _forget(self, number: int, future: Future) -> None:
        """Is called when a call is done in any way, including a cancel."""
        with self._lock:
            call = self._open.pop(number, None)
            if call is not None and not call.awaited:
                self._num_futures -= 1
            self._room.notify()
            self._turn.notify_all()
        if future.cancelled():
            future.set_running_or_notify_cancel()  # `concurrent.futures.wait` requires it

    # Receiving, on one thread at a time.

    def _run(self) -> None:
        """Runs on the client's own thread: receives while futures are open and no other thread receives."""
        try:
            while True:
                with self._lock:
                    self._futures.wait_for(
                        lambda: self._closed or (self._num_futures > 0 and not self._receiving)
                    )
                    if self._closed:
                        return
                    self._receiving = True
                self._receive()
        except zmq.ContextTerminated:
            return
        except Exception:
            self.close()
            raise

    def _receive(self) -> None:
        """Receives one message, if one arrives in time, and lets another thread receive."""
        self._receiver = threading.get_ident()
        try:
            self._receive_message()
        finally:
            with self._lock:
                self._receiver, closed = None, self._closed
                self._receiving = closed
                self._turn.notify()
                if self._num_futures:
                    self._futures.notify()
            if closed:
                self._end()

    def _receive_message(self) -> None:
        frames = self._socket.receive(self._look_at - time.monotonic())
        if frames is not None:
            self._hear(frames)
        if time.monotonic() >= self._look_at:
            self._look()

    def _hear(self, frames: list[zmq.Frame]) -> None:
        try:
            kind, number, body, buffers = wire.parse(frames)
        except wire.MalformedMessage:
            return  # its call stays open until its timeout, and the probes include it
        self._silent_probes = 0
        if kind == wire.UNKNOWN:
            with self._lock:
                unknown = struct.unpack(f"<{len(body) // 8}Q", body)
                calls = [self._open[n] for n in unknown if n in self._open]
                # A node that was away answers each probe that waited for it. A call that was sent again
                # after the probe is not lost.
                lost = self._lose(call for call in calls if call.after_probe < number)
                for call in self._open.values():
                    if not call.sent:
                        self._send(call)
            self._fail_lost(lost)
            return
        call_of_answer = self._open.get(number)
        if call_of_answer is None:
            return
        try:
            result = wire.load(body, buffers)
            error = wire.rebuild_error(result, self._name) if kind == wire.ERROR else None
        except Exception as failure:  # a class that cannot be imported here
            error = failure
        settle(call_of_answer.future, None if error is not None else result, error)

    def _look(self) -> None:
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
                    self._socket.send(
                        [wire.head(wire.PROBE, self._probes) + struct.pack(f"<{len(asked)}Q", *asked)]
                    )
                except zmq.Again:
                    refused = True
            elif not asked:
                self._silent_probes = 0
            absent = self._silent_probes > _SILENT_PROBES_AFTER_STOP
            for call in self._open.values():
                if call.deadline is not None and call.deadline <= now:
                    error = f"{self._name}.{call.method} was not answered in time."
                    failed.append((call, CallTimeout(error)))
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
        for call, failure in failed:
            settle(call.future, error=failure)

    def _lose(self, calls: Iterable[_Call]) -> list[_Call]:
        """Marks the lost calls to be sent again; returns those that must not be repeated."""
        lost = [call for call in calls if call.sent]
        if self._repeat_lost:
            for call in lost:
                call.sent = False
            return []
        return lost

    def _fail_lost(self, calls: list[_Call]) -> None:
        for call in calls:
            text = "The node was restarted while it had this call, which may have been carried out."
            settle(call.future, error=CallLost(f"{self._name}.{call.method}: {text}"))

    def _gone(self, method: str) -> ProgramStopped:
        return ProgramStopped(f"{self._name}.{method}: the program stopped, and the node does not answer.")
