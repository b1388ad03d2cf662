"""A client's connections to a replay server: one socket, one session, one waiting request each.

The server keeps what a client holds (leased rows, samples, waiting requests) by connection, and takes it back
when the connection ends. So there is one rule for a lost connection, whether the network failed, the server
was killed or it was restarted: the old session is gone. A writer ends with it; everything else opens a new
session and asks again. `Connection.session` counts the sessions.

A request waits for its answer, for the end of the connection and for an interrupt of the client in one poll.
A server that is not there is waited for up to `reconnect_timeout` seconds.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import zmq
from zmq.utils.monitor import parse_monitor_message

from framework.nest import Pack
from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost
from framework.replay.remote.mapping import MappedStore
from framework.replay.rows.layout import Binding
from framework.replay.wake import Wake
from launch.rpc import sockets

DEFAULT_RECONNECT_TIMEOUT = 30.0
# Seconds beyond the server's own deadline after which a client calls the server hung.
_GRACE = 30.0
# Seconds for which a client that was interrupted still looks for its server, for last messages.
_LAST_WORDS = 2.0
# Seconds for which a server that has stopped is looked for: it may have been started again.
_COME_BACK = 0.25
# Seconds between two looks at whether a server that is looked for has moved.
_LOOK = 1.0


class SessionLost(Exception):
    """The connection has ended, and what the session held on the server is gone. Internal to this package."""


class Interrupted(ServerClosed):
    """The client was interrupted while a call waited."""

    def __init__(self) -> None:
        super().__init__("this client was interrupted: its program stops")


class ServerState:
    """What the connections of one client know of their server.

    Attributes:
      address: where it is: `tcp://host:port` or `ipc://path`.
      away: it is known to be nowhere at the moment, and to come back.
      stopped: it said that it stops, and has not answered since.
    """

    def __init__(
        self, address: str, curve: sockets.CurveKeys | None, reconnect_timeout: float, local: bool
    ) -> None:
        self.address = address
        self.curve = curve
        self.reconnect_timeout = reconnect_timeout
        self.away = False
        self.stopped = False
        self._local = local
        self._mapped: MappedStore | None = None
        self._lock = threading.Lock()

    def mapped(self, welcome: dict[str, Any]) -> MappedStore:
        """The rows of the server that sent this greeting, as far as they are mapped."""
        server = welcome.get("server", "")
        with self._lock:
            if self._mapped is None or self._mapped.server != server:
                self._mapped = MappedStore(server, welcome.get("directory", "") if self._local else "")
            return self._mapped


class Connection:
    """One session with a server. Not for two threads at once.

    Args:
      server: shared by all connections of a client.
      interrupts: any of them ends waits.

    Attributes:
      welcome: what the server said of itself.
      session: number of sessions so far; 0 before the first.
      mapped: the rows of this session's server, as far as this process has mapped them.
      layouts: how samples of each layout that the server has defined in this session are put together.
      done: deliveries whose rows were read; the next message tells the server. Any thread may append.
    """

    def __init__(self, server: ServerState, *interrupts: Wake) -> None:
        self.welcome: dict[str, Any] = {}
        self.session = 0
        self.mapped: MappedStore
        self.layouts: dict[int, Binding | Pack] = {}
        self.done: collections.deque[int] = collections.deque()
        self._server = server
        self._interrupts = interrupts
        self._address = ""
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._said_hello = False
        self._greeted = False
        self._next_id = 0
        self._answers: dict[int | None, dict[str, Any]] = {}  # that were received and not taken yet

    # --- the session ---

    def open(self, timeout: float | None = None) -> None:
        """Makes sure that a session is open.

        Raises:
          ServerClosed: the server said that it stops, or did not answer within `reconnect_timeout`.
          DeadlineExceededError: `timeout` seconds passed first.
        """
        server = self._server
        if self._greeted and self._address == server.address:
            return
        interrupted, stopped = self.interrupted, server.stopped
        last = float("inf") if timeout is None else time.monotonic() + timeout
        limit = _COME_BACK if stopped else server.reconnect_timeout
        limit = min(limit, _LAST_WORDS) if interrupted else limit
        limit = limit if timeout is None else min(limit, timeout)
        deadline = time.monotonic() + limit
        while True:
            if self._socket is None or not self._said_hello:
                self.close()
                self._connect()
            elif self._address != server.address:  # it has moved
                self.close()
                self._connect()
                deadline = max(deadline, min(last, time.monotonic() + server.reconnect_timeout))
            away = server.away and not interrupted
            until = min(time.monotonic() + _LOOK, last if away else deadline)
            if self._receive(until, not interrupted, connecting=True):
                answer = self._answers.pop(self._next_id, None)
                if answer is not None:
                    return self._begin(answer)
                continue
            now, moved = time.monotonic(), self._address != server.address and not interrupted
            if now >= last or (now >= deadline and not (server.away and not interrupted) and not moved):
                break
        self.close()
        if stopped:
            raise ServerClosed(f"the replay server at {server.address} has stopped")
        if timeout is not None and (timeout <= server.reconnect_timeout or server.away):
            raise DeadlineExceededError(f"no replay server answered at {server.address} within {limit:g} s")
        raise ServerLost(
            f"no replay server answered at {server.address} within {limit:g} s. Is it running, and does this "
            "client have its keys?"
        )

    def _begin(self, answer: dict[str, Any]) -> None:
        """Begins a session with the server's answer to hello."""
        if "error" in answer:
            self.close()
            raise wire.unpack_error(answer["error"])
        self.welcome = answer
        self.session += 1
        self.mapped = self._server.mapped(answer)
        self.layouts = {}
        self.done.clear()
        self._answers = {}
        self._greeted = True
        self._server.stopped = False

    def close(self) -> None:
        """Ends the session; the server takes back what it held."""
        if self._socket is not None:
            self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
            self._socket.close(linger=100)  # the last message may still be on its way
            self._socket = self._monitor = None
        self._greeted = False

    def __del__(self) -> None:
        with contextlib.suppress(
            AttributeError, TypeError, zmq.ZMQError
        ):  # half made, or the interpreter ends
            self.close()

    # --- messages ---

    @property
    def interrupted(self) -> bool:
        """Whether the client was interrupted."""
        return any(interrupt.is_set for interrupt in self._interrupts)

    def post(self, message: dict[str, Any]) -> int:
        """Sends a message without waiting for its answer, which `poll` returns; the number of the message.

        Raises:
          SessionLost: the connection has ended.
        """
        if self._socket is None or self._monitor is None or not self._greeted:
            raise SessionLost
        if self._monitor.poll(0) and self._lost():
            self._end()
        self._next_id += 1
        message["id"] = self._next_id
        if self.done and message["op"] != "cancel":  # the service itself takes that one
            done = message["done"] = []
            while self.done:
                done.append(self.done.popleft())
        try:
            wire.send(self._socket, message, zmq.NOBLOCK)
        except zmq.Again:  # nothing to send to any more
            self._end()
        return self._next_id

    def poll(self, timeout: float | None = 0.0) -> list[dict[str, Any]]:
        """The answers that have come to messages that were posted; waits up to `timeout` seconds for one.

        Raises:
          SessionLost: the connection has ended.
          ServerClosed: the server stops, or the client was interrupted while this call waited.
        """
        if not self._greeted:
            raise SessionLost
        watch = timeout != 0.0 and not self.interrupted
        until = None if timeout is None else time.monotonic() + timeout
        if not self._answers:
            while self._receive(until, watch):
                until, watch = 0.0, False  # the others that are there
        answers, self._answers = self._answers, {}
        return list(answers.values())

    def request(
        self, message: dict[str, Any], timeout: float | None = None, wait: bool = True
    ) -> dict[str, Any]:
        """Sends a message and returns the server's answer.

        Args:
          message: see `framework.replay.server.operations`.
          timeout: seconds for which the *server* may hold the request back (None: without limit, 0: not at
            all) if `wait`, and otherwise seconds in which it must answer.
          wait: whether a rate limiter may hold the request back.

        Raises:
          SessionLost: the connection ended before the answer.
          Whatever the server answered: see `wire.unpack_error`.
        """
        # An interrupt ends waits only: a program that stops still writes its last checkpoint and metrics.
        watch = wait and not self.interrupted
        if wait:
            message["timeout"] = timeout if watch else 0.0
            limit = None if message["timeout"] is None else message["timeout"] + _GRACE
        else:
            limit = _GRACE if timeout is None else timeout
        number = self.post(message)
        deadline = None if limit is None else time.monotonic() + limit
        while number not in self._answers:
            try:
                if not self._receive(deadline, watch):
                    break
            except Interrupted:
                # The server lets go of the request, and says so, or has answered it already.
                self.post({"op": "cancel"})
                deadline, watch = time.monotonic() + _LAST_WORDS, False
            except (SessionLost, ServerClosed):
                raise
            except BaseException:  # of a signal handler, say
                self.close()  # the request still waits on the server: end its session
                raise
        answer = self._answers.pop(number, None)
        if answer is None:
            self.close()
            error: BaseException = DeadlineExceededError(
                f"the replay server at {self._address} did not answer in time"
            )
        elif "error" in answer:
            error = wire.unpack_error(answer["error"])
            if watch and isinstance(error, ServerClosed):
                self._note_stop()
        else:
            return answer
        if wait and not watch and isinstance(error, (DeadlineExceededError, ServerClosed)):
            raise Interrupted
        raise error

    def _note_stop(self) -> None:
        """This connection's server has stopped: not the one that has taken its place elsewhere."""
        if self._address == self._server.address:
            self._server.stopped = True

    # --- the socket ---

    def _connect(self) -> None:
        self._address = self._server.address
        self._socket = sockets.make_client_socket(self._address, self._server.curve)
        if self._address.startswith("tcp://"):
            # A machine that vanishes is noticed within 20 s.
            self._socket.heartbeat_ivl = 5000
            self._socket.heartbeat_timeout = 20000
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._greeted = False
        self._greet()

    def _greet(self) -> None:
        """Says hello; if the server is not there yet, the message is delivered when it comes.

        A peer that refused the keys is taken away by ZeroMQ: then there is nothing to send to until `open`
        connects again.
        """
        self._next_id += 1
        hello = {"op": "hello", "protocol": wire.PROTOCOL, "pid": os.getpid(), "id": self._next_id}
        assert self._socket is not None
        try:
            wire.send(self._socket, hello, zmq.NOBLOCK)
            self._said_hello = True
        except zmq.Again:
            self._said_hello = False

    def _receive(self, deadline: float | None, watch: bool, connecting: bool = False) -> bool:
        """Takes one message, an answer or a notice; False if none comes before the deadline.

        Raises:
          SessionLost: the connection has ended.
          ServerClosed: the server stops, or the client was interrupted and `watch` is true.
        """
        assert self._socket is not None
        watched: list[Any] = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        if watch:  # an interrupt from before the call does not end it; such a call must not wait for long
            watched += [(interrupt.descriptor, zmq.POLLIN) for interrupt in self._interrupts]
        while True:
            left = -1 if deadline is None else max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
            ready = dict(zmq.zmq_poll(watched, left))
            if self._socket in ready:
                message = wire.decode(self._socket.recv_multipart(copy=False))
                notice = message.get("notice")
                if notice is None:
                    self._answers[message.get("id")] = message
                elif notice in ("stopped", "lost") and not connecting:
                    self.close()
                    if notice == "lost":
                        raise SessionLost
                    self._note_stop()
                    raise ServerClosed(f"the replay server at {self._address} has stopped")
                return True
            if self._monitor in ready and self._lost():
                if not connecting:
                    self._end()
                self._greet()  # ZeroMQ connects again by itself
            if watch and self.interrupted:
                raise Interrupted
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _lost(self) -> bool:
        """Whether the connection has ended since the last look; takes the monitor's events."""
        assert self._monitor is not None
        lost = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            lost |= event == zmq.EVENT_DISCONNECTED
        return lost

    def _end(self) -> NoReturn:
        """Raises SessionLost for a connection that has ended; notes whether its server said that it stops."""
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):
            while True:
                # That it stopped may be old news: the next session finds out whether the server is back.
                message = wire.decode(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
                if message.get("notice") == "stopped":
                    self._note_stop()
        self.close()
        raise SessionLost


class Channel:
    """All connections of one client to one server; a thread borrows one that no other thread uses.

    Args:
      address: where the server is.
      curve: the keys of the program, if the server has any.
      reconnect_timeout: seconds for which calls wait for a server that is not there.
      local: whether to map the rows of a server on this machine.
    """

    def __init__(
        self,
        address: str,
        curve: sockets.CurveKeys | None = None,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT,
        local: bool = True,
    ) -> None:
        self.server = ServerState(address, curve, reconnect_timeout, local)
        self.interrupted = Wake()
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def connection(self, *interrupts: Wake) -> Connection:
        """A new connection, for an object that keeps it; it is opened by its first use."""
        return Connection(self.server, self.interrupted, *interrupts)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Connection]:
        """An idle connection, or a new one, for the length of a block."""
        with self._lock:
            if self._closed:
                raise ServerClosed("this client is closed")
            connection = self._idle.pop() if self._idle else self.connection()
        try:
            yield connection
        finally:
            with self._lock:
                if self._closed:
                    connection.close()  # type: ignore[unreachable]  # by another thread
                else:
                    self._idle.append(connection)

    def call(
        self, message: dict[str, Any], timeout: float | None = None, wait: bool = False
    ) -> dict[str, Any]:
        """One request and its answer on any connection; asked again if the connection ended in between."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.borrow() as connection:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                # A poll (timeout 0) waits a moment for a server that is not there: it could be answered soon.
                connection.open(None if left is None else left + 1.0)
                with contextlib.suppress(SessionLost):
                    return connection.request(message, left, wait)

    def close(self) -> None:
        """Ends every idle session, and the others when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
