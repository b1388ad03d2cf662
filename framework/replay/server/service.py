"""The server's event loop: one thread owns the socket, and no request blocks it.

A request that has to wait for a rate limiter is kept with its deadline and tried again whenever a table may
have changed: after every round of messages, and when another thread of this process has used a table
(`Service.wake`). Requests of one line (for samples of one table, for inserts of one client) go through in the
order in which they came.

What a client holds belongs to its `Session`, and a session ends with its connection: ZeroMQ's monitor reports
that some connection has ended, then all sessions are probed, and one whose peer cannot be reached is closed.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Protocol

import zmq

from framework.replay import wire
from framework.replay.errors import ReverbError, ServerClosed, ServerLost
from framework.replay.server.sessions import Reply, Session, Waiting
from framework.replay.wake import Wake
from launch.rpc import sockets

_LOG = logging.getLogger(__name__)
_ROUND = 64  # messages that are taken before the waiting requests are tried
# Seconds after a connection has ended at which the peers are probed: one may look reachable for a moment.
_PROBE_DELAYS = (0.02, 1.0)
_LONGEST_POLL = 3600.0  # seconds
# Requests of one client that may wait, and large answers that it may leave unread, before it is cut off.
_MAX_WAITING = 1 << 14
_MAX_UNREAD = 16


class Handler(Protocol):
    """What a `Service` serves; its methods run on the service's thread."""

    def open(self, session: Session) -> Reply:
        """A client said hello; the answer tells it about the server."""
        ...

    def handle(self, session: Session, message: dict[str, Any]) -> Reply | Waiting | None:
        """Answers a message; None for a message without an answer."""
        ...

    def close(self, session: Session) -> None:
        """A session has ended: takes back what it held."""
        ...


class Service(threading.Thread):
    """Runs a `Handler` on a bound ROUTER socket until `stop`.

    Attributes:
      error: what ended the loop, if it was not `stop`.
      messages: how many messages were taken in.
      malformed: how many of them were not of this protocol and were ignored.
    """

    def __init__(self, handler: Handler, listener: zmq.Socket, name: str = "replay-server") -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self.messages = 0
        self.malformed = 0
        self._handler = handler
        self._socket = listener
        self._sessions: dict[bytes, Session] = {}
        self._lines: OrderedDict[Hashable, list[Waiting]] = OrderedDict()
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._probes: list[float] = []
        self._numbers = itertools.count(1)
        self._stopping = False
        self._reason: Exception = ServerClosed("the replay server has stopped")
        self._wake = Wake()

    # --- called by other threads ---

    def wake(self) -> None:
        """Has the waiting requests tried again: another thread of this process has changed a table."""
        if self._lines:
            self._wake.set()

    def stop(self, reason: Exception | None = None) -> None:
        """Answers every waiting request with ServerClosed, tells all clients, and ends the loop."""
        self._reason = reason or self._reason
        self._stopping = True
        self._wake.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    # --- the loop ---

    def run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.error = error
            self._reason = ServerLost(f"the replay server failed: {type(error).__name__}: {error}")
            _LOG.exception("the replay server failed")
        finally:
            self._end()

    def _loop(self) -> None:
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for source in (self._socket, monitor, self._wake.descriptor):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._stopping:
                due = [entry[0] for entry in self._deadlines[:1]] + self._probes[:1]
                left = min(_LONGEST_POLL, max(0.0, min(due) - time.monotonic())) if due else None
                ready = dict(poller.poll(None if left is None else int(1000 * left + 0.999)))
                if self._wake.descriptor in ready:
                    self._wake.clear()
                if monitor in ready:
                    while monitor.poll(0):
                        monitor.recv_multipart()
                    now = time.monotonic()
                    self._probes = sorted([*self._probes, *(now + delay for delay in _PROBE_DELAYS)])[:8]
                if self._socket in ready:
                    self._receive()
                if self._lines:
                    self._try_waiting()
                if self._probes and self._probes[0] <= time.monotonic():
                    self._probe()
        finally:
            self._socket.disable_monitor()
            monitor.close(linger=0)

    # --- messages ---

    def _receive(self) -> None:
        for _ in range(_ROUND):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.messages += 1
            try:
                self._handle(identity.bytes, wire.decode(frames))
            except Exception as error:
                # Whatever a peer sends, the others are served.
                self.malformed += 1
                if self.malformed & (self.malformed - 1) == 0:  # the 1st, 2nd, 4th …: a flood fills no log
                    _LOG.warning("ignored a malformed message (%d so far): %s", self.malformed, error)

    def _handle(self, identity: bytes, message: dict[str, Any]) -> None:
        op, number = message.get("op"), message.get("id")
        if type(op) is not str or not (number is None or type(number) is int):
            raise wire.MalformedMessage(f"op {op!r}, id {number!r}; expected a string and an integer")
        session = self._sessions.get(identity)
        if op == "hello":
            if session is not None:
                self._close(session)
            session = Session(identity, message)
        elif session is None:
            self._send(identity, {"notice": "lost"})
            return
        answer: Reply | Waiting | Exception | None
        try:
            if op == "hello":
                answer = self._handler.open(session)
                self._sessions[identity] = session
            elif op == "cancel":
                answer = None
                for waiting in list(session.waiting.values()):
                    self._end_waiting(waiting, ServerClosed("the request was canceled by its client"))
            else:
                answer = self._handler.handle(session, message)
                if isinstance(answer, Waiting):
                    answer.session, answer.id = session, number
                    answer = self._try_or_wait(answer)
        except Exception as error:
            # The client is told; the server goes on.
            if not isinstance(error, (ValueError, TypeError, KeyError, MemoryError, ReverbError)):
                _LOG.exception("request %r failed", op)
            answer = error
        if answer is not None:
            self._send(identity, answer, number)

    def _send(self, identity: bytes, answer: Reply | Exception, number: int | None = None) -> None:
        """Answers a client's message `number`, or sends a notice.

        Only an error answers a message without a number. Ends the session of a client that has gone, or that
        does not read its answers.
        """
        if isinstance(answer, Exception):
            answer = {"error": wire.pack_error(answer), "id": number}
        elif number is not None:
            answer = {**answer, "id": number}
        elif "notice" not in answer:
            return
        session = self._sessions.get(identity)
        try:
            tracker = wire.send(self._socket, answer, zmq.NOBLOCK, identity)
            if tracker is None or session is None:
                return
            while session.unsent and session.unsent[0].done:
                session.unsent.popleft()
            session.unsent.append(tracker)
            if len(session.unsent) <= _MAX_UNREAD:
                return
            _LOG.warning("a client leaves %d large answers unread: its session ends", _MAX_UNREAD)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EAGAIN and "notice" in answer:
                return  # an idle client need not read what nobody asked for
        if session is not None:
            self._close(session)

    # --- requests that wait ---

    def _try_or_wait(self, waiting: Waiting) -> Reply | None:
        """The answer of a new request, or None if it waits from now on."""
        session, line = waiting.session, self._lines.get(waiting.line)
        answer = None if line else waiting.attempt()
        if answer is not None:
            return answer
        if waiting.timeout == 0 or len(session.waiting) >= _MAX_WAITING:
            waiting.drop()
            if waiting.timeout == 0:
                raise waiting.late()
            raise ValueError(
                f"requests that wait: got more than {_MAX_WAITING} of one client. Wait for answers first."
            )
        waiting.number = next(self._numbers)
        session.waiting[waiting.number] = waiting
        self._lines.setdefault(waiting.line, []).append(waiting)
        if waiting.timeout is not None:
            heapq.heappush(self._deadlines, (time.monotonic() + waiting.timeout, waiting.number, waiting))
        # From here on a change of a table wakes the loop; a change since the attempt is seen in this round.
        waiting.count(1)
        return None

    def _try_waiting(self) -> None:
        """Tries the first request of every line for as long as any goes through; ends those that are late.

        One that goes through may free what another line waits for: a sample makes room for an insert.
        """
        moved = True
        while moved:
            moved = False
            for line in list(self._lines.values()):
                while line:
                    answer: Reply | Exception | None
                    try:
                        answer = line[0].attempt()
                    except Exception as error:
                        answer = error
                    if answer is None:
                        break
                    moved = True
                    self._end_waiting(line[0], answer)
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            waiting = heapq.heappop(self._deadlines)[2]
            self._end_waiting(waiting, waiting.late())

    def _end_waiting(self, waiting: Waiting, answer: Reply | Exception | None) -> None:
        """Ends a request that has waited, if it has not ended yet, and answers it unless `answer` is None."""
        if waiting.session.waiting.pop(waiting.number, None) is None:
            return
        line = self._lines[waiting.line]
        line.remove(waiting)
        if line:
            self._lines.move_to_end(waiting.line)  # the other lines are next
        else:
            del self._lines[waiting.line]
        if len(self._deadlines) > 64 + 2 * sum(map(len, self._lines.values())):
            # Requests that ended early must not be kept until their deadline.
            self._deadlines = [each for each in self._deadlines if each[1] in each[2].session.waiting]
            heapq.heapify(self._deadlines)
        waiting.count(-1)
        waiting.drop()
        if answer is not None:
            self._send(waiting.session.identity, answer, waiting.id)

    # --- ends ---

    def _probe(self) -> None:
        now = time.monotonic()
        self._probes = [moment for moment in self._probes if moment > now]
        for identity in list(self._sessions):
            self._send(identity, {"notice": "ping"})

    def _close(self, session: Session) -> None:
        """Ends a session: the client has gone, or has said hello again."""
        if self._sessions.get(session.identity) is session:
            del self._sessions[session.identity]
        for waiting in list(session.waiting.values()):
            self._end_waiting(waiting, None)
        self._handler.close(session)

    def _end(self) -> None:
        for session in list(self._sessions.values()):
            for waiting in list(session.waiting.values()):
                self._end_waiting(waiting, self._reason)
            if session.identity in self._sessions:
                self._send(session.identity, {"notice": "stopped"})
            if session.identity in self._sessions:
                self._close(session)
        # The address is free at once; what was said last is still delivered.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.unbind(sockets.bound_address(self._socket))
        self._socket.close(linger=1000)
