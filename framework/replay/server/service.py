"""The server's event loop: one thread owns all sockets, and nothing ever blocks it.

A request that has to wait for a rate limiter is parked with its deadline, and tried again whenever a table
may have changed: after every round of messages, and when a thread of this process has used a table directly
(`Service.wake`). Requests for one table wait in line: the first in, the first tried.

What a client holds hangs on its `Session`, and a session ends with its connection: ZeroMQ's monitor reports
that a connection has ended, then the sessions are probed, and a peer that cannot be reached has gone.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost
from launch.rpc import sockets

_LOG = logging.getLogger(__name__)
_ROUND = 64  # messages of one socket before the others and the parked requests have their turn
# A peer whose connection ended may look reachable for a moment; look twice.
_PROBE_DELAYS = (0.02, 1.0)

Reply = dict[str, Any]


@dataclass(eq=False)
class Session:
    """One client connection and what it holds.

    Attributes:
      hello: what the client said of itself.
      closing: run, in reverse order, when the session ends.
    """

    identity: bytes
    socket: zmq.Socket
    hello: dict[str, Any]
    closing: list[Callable[[], None]] = field(default_factory=list)
    parked: dict[int, Parked] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Parked:
    """A request that cannot be answered yet.

    Attributes:
      line: requests of one line are tried in order, and the first that must wait holds up the others.
      attempt: the answer, or None if it must wait on.
      timeout: seconds it may wait; None: for ever; 0: not at all.
      expired: the answer when the time is over; DeadlineExceededError if not given.
      entered: called with 1 when the request begins to wait and with -1 when it has ended.
    """

    line: Hashable
    attempt: Callable[[], Reply | None]
    timeout: float | None = None
    expired: Callable[[], Reply] | None = None
    entered: Callable[[int], None] | None = None
    session: Session | None = None
    request: int = 0
    number: int = 0


class Handler(Protocol):
    """What a `Service` serves. Called on the service's thread only."""

    def open(self, session: Session) -> Reply:
        """A client said hello; the answer tells it about the server."""

    def handle(self, session: Session, message: dict[str, Any]) -> Reply | Parked | None:
        """Answers a message, or parks it; None for a message without an answer."""


class Service(threading.Thread):
    """Runs a `Handler` on bound ROUTER sockets until `stop`.

    Attributes:
      error: what ended the loop, if it was not `stop`.
      messages: how many were taken in.
      malformed: how many messages were not of this protocol and were ignored.
    """

    def __init__(self, handler: Handler, listeners: list[zmq.Socket], name: str = "replay-server") -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self.messages = 0
        self.malformed = 0
        self._handler = handler
        self._listeners = listeners
        self._sessions: dict[tuple[zmq.Socket, bytes], Session] = {}
        self._lines: OrderedDict[Hashable, list[Parked]] = OrderedDict()
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._probes: list[float] = []
        self._numbers = itertools.count(1)
        self._waiting = 0
        self._stopping = False
        self._reason: BaseException = ServerClosed("the replay server has stopped")
        self._calls: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._woken = False
        self._bell = threading.Lock()

    def wake(self) -> None:
        """Some table was changed by another thread of this process: parked requests are tried again."""
        if self._waiting and not self._woken:
            self._ring()

    def stop(self, reason: BaseException | None = None) -> None:
        """Answers every parked request with ServerClosed, tells all clients, and ends the loop."""
        if reason is not None:
            self._reason = reason
        self._stopping = True
        self._ring()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function on the loop's thread, soon."""
        self._calls.append(function)
        self._ring()

    def run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.error = error
            self._reason = ServerLost(f"the replay server failed: {type(error).__name__}: {error}")
            _LOG.exception("the replay server failed")
        finally:
            self._end()

    def _ring(self) -> None:
        self._woken = True
        with self._bell, contextlib.suppress(BlockingIOError):  # full is as good as rung
            if self._wake_write >= 0:
                os.write(self._wake_write, b"!")

    def _loop(self) -> None:
        poller = zmq.Poller()
        monitors = []
        for listener in self._listeners:
            poller.register(listener, zmq.POLLIN)
            monitors.append(listener.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            poller.register(monitors[-1], zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll(self._time_left()))
                if self._wake_read in ready:
                    self._woken = False  # before the bell is emptied: what comes later rings again
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    while self._calls:
                        self._calls.pop(0)()
                for monitor in monitors:
                    if monitor in ready:
                        self._drain(monitor)
                for listener in self._listeners:
                    if listener in ready:
                        self._receive(listener)
                if self._waiting:
                    self._try_parked()
                    self._expire()
                if self._probes and self._probes[0] <= time.monotonic():
                    self._probe()
        finally:
            for listener, monitor in zip(self._listeners, monitors, strict=True):
                listener.disable_monitor()
                monitor.close(linger=0)

    def _time_left(self) -> int | None:
        moments = [entry[0] for entry in self._deadlines[:1]] + self._probes[:1]
        if not moments:
            return None
        return max(0, int((min(moments) - time.monotonic()) * 1000 + 0.999))

    def _receive(self, listener: zmq.Socket) -> None:
        for _ in range(_ROUND):
            try:
                identity, *frames = listener.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = identity.bytes
            self.messages += 1
            try:
                message = wire.decode(frames)
                self._answer(listener, peer, message)
            except wire.MalformedMessage as error:
                self.malformed += 1
                if self.malformed & (self.malformed - 1) == 0:  # the 1st, 2nd, 4th …: a flood fills no log
                    _LOG.warning("ignored a malformed message (%d so far): %s", self.malformed, error)

    def _answer(self, listener: zmq.Socket, peer: bytes, message: dict[str, Any]) -> None:
        number = message.get("id")
        if number is not None and not isinstance(number, int):
            raise wire.MalformedMessage(f"id {number!r}; expected an integer")
        session = self._sessions.get((listener, peer))
        greeting = message.get("op") == "hello"
        if session is None and not greeting:
            self._send(listener, peer, {"notice": "lost"})
            return
        answer: Reply | Parked | None
        try:
            if greeting:
                if session is not None:
                    self._close(session)
                session = Session(peer, listener, message)
                answer = self._handler.open(session)
                self._sessions[listener, peer] = session
            else:
                assert session is not None
                answer = self._handler.handle(session, message)
            if isinstance(answer, Parked):
                answer = self._park(session, answer, number)
        except wire.MalformedMessage:
            raise
        except Exception as error:
            # The caller is told; the server and everybody else go on.
            if not isinstance(error, (ValueError, KeyError, MemoryError, DeadlineExceededError, TypeError)):
                _LOG.exception("request %r failed", message.get("op"))
            answer = {"error": wire.pack_error(error)}
            if number is None:
                answer["notice"] = "failed"
        if answer is not None:
            if number is not None:
                answer["id"] = number
            self._send(listener, peer, answer)

    def _park(self, session: Session, parked: Parked, number: int | None) -> Reply | None:
        line = self._lines.get(parked.line)
        answer = None if line else parked.attempt()
        if answer is None and parked.timeout is not None and parked.timeout <= 0:
            answer = self._late(parked)
        if answer is not None:
            return answer
        parked.session, parked.request, parked.number = session, number or 0, next(self._numbers)
        self._lines.setdefault(parked.line, []).append(parked)
        session.parked[parked.number] = parked
        if parked.timeout is not None:
            heapq.heappush(self._deadlines, (time.monotonic() + parked.timeout, parked.number, parked))
        # From here on a change rings the bell; what changed since the attempt is seen by the next, in this
        # round.
        self._waiting += 1
        if parked.entered is not None:
            parked.entered(1)
        return None

    def _late(self, parked: Parked) -> Reply:
        if parked.expired is not None:
            return parked.expired()
        raise DeadlineExceededError(f"{parked.line!r} did not go through within {parked.timeout:g} s")

    def _try_parked(self) -> None:
        """Tries the first of every line for as long as anything goes through.

        An answer may free what another line waits for (a sample makes room for an insert), hence the rounds.
        """
        moved = True
        while moved:
            moved = False
            for line in list(self._lines.values()):
                while line:
                    parked = line[0]
                    answer = self._result(parked.attempt)
                    if answer is None:
                        break
                    moved = True
                    self._finish(parked, answer)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            parked = heapq.heappop(self._deadlines)[2]
            if parked.session is not None and parked.number in parked.session.parked:
                late = self._result(lambda parked=parked: self._late(parked))  # type: ignore[misc]
                self._finish(parked, late or {})

    @staticmethod
    def _result(attempt: Callable[[], Reply | None]) -> Reply | None:
        try:
            return attempt()
        except Exception as error:  # goes to whoever asked
            return {"error": wire.pack_error(error)}

    def _finish(self, parked: Parked, answer: Reply) -> None:
        session = parked.session
        assert session is not None
        self._forget(parked)
        if parked.request:
            answer["id"] = parked.request
        elif "error" in answer:
            answer["notice"] = "failed"
        self._send(session.socket, session.identity, answer)

    def _forget(self, parked: Parked) -> None:
        assert parked.session is not None
        parked.session.parked.pop(parked.number, None)
        line = self._lines[parked.line]
        line.remove(parked)
        if line:
            self._lines.move_to_end(parked.line)  # others next
        else:
            del self._lines[parked.line]
        self._waiting -= 1
        if parked.entered is not None:
            parked.entered(-1)

    def _send(self, listener: zmq.Socket, peer: bytes, answer: Reply) -> bool:
        try:
            wire.send(listener, [peer, *wire.encode(answer)], zmq.NOBLOCK)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            session = self._sessions.get((listener, peer))
            if session is not None:
                self._close(session)
            return False

    def _drain(self, monitor: zmq.Socket) -> None:
        while monitor.poll(0):
            monitor.recv_multipart()
        now = time.monotonic()
        self._probes = sorted([*self._probes, *(now + delay for delay in _PROBE_DELAYS)])[:8]

    def _probe(self) -> None:
        now = time.monotonic()
        self._probes = [moment for moment in self._probes if moment > now]
        for session in list(self._sessions.values()):
            self._send(session.socket, session.identity, {"notice": "ping"})

    def _close(self, session: Session) -> None:
        """Gives back what a session held."""
        self._sessions.pop((session.socket, session.identity), None)
        for parked in list(session.parked.values()):
            self._forget(parked)
        while session.closing:
            session.closing.pop()()

    def _end(self) -> None:
        answer = {"error": wire.pack_error(self._reason)}
        for session in list(self._sessions.values()):
            for parked in list(session.parked.values()):
                if parked.request and (session.socket, session.identity) in self._sessions:
                    self._send(session.socket, session.identity, {**answer, "id": parked.request})
            if (session.socket, session.identity) in self._sessions:
                self._send(session.socket, session.identity, {"notice": "stopped"})
            self._close(session)
        for listener in self._listeners:
            # The address is free at once; what was said last is still delivered.
            with contextlib.suppress(zmq.ZMQError):
                listener.unbind(sockets.bound_address(listener))
            listener.close(linger=1000)
        with self._bell:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1
