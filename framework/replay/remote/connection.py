"""A client's connection to a replay server: one socket, one session, one request at a time.

The server keeps what a client holds (leased rows, pinned samples, waiting requests) by connection, and gives
it back when the connection ends. So there is one rule for a lost connection, whether the network blinked,
the server was killed or it was restarted: the old session is gone, a new one begins, and its owner (a
writer, a dataset) brings into it what it still needs. ``Connection.session`` counts them.

A request waits for its answer, for the end of the connection and for ``Channel.interrupt`` at once, so
nothing waits for a server that is not there for longer than ``reconnect_timeout``, and nothing polls.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import zmq
from zmq.utils.monitor import parse_monitor_message

from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost
from launch.rpc import sockets

PROTOCOL = 1
DEFAULT_RECONNECT_TIMEOUT = 30.0
# How much longer than the server's own deadline a client waits for its answer before it calls the server
# hung.
_GRACE = 30.0
# How long a client that was interrupted still looks for its server, to tell it the last things.
_LAST_WORDS = 2.0
# How long a server that has stopped is looked for: it may have been started again.
_COME_BACK = 0.25
# Between two looks, while a server is looked for, at whether it has moved.
_LOOK = 1.0


class Interrupt:
    """Wakes every wait of one client, from any thread, once and for all."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self.is_set = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """A descriptor that is readable from the interrupt on."""
        return self._read

    def set(self) -> None:
        """Wakes the waits of now; later ones do not begin."""
        with self._lock:
            if not self.is_set:
                self.is_set = True
                os.write(self._write, b"!")

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._read)
            os.close(self._write)


class News:
    """What the connections of one client know of their server.

    Attributes:
      stopped: it said that it stops, and has not been seen since.
      address: where it is now, if it has moved; None if nobody said so.
      away: it is known to be nowhere at the moment, and to come back.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.address: str | None = None
        self.away = False


class SessionLost(Exception):
    """The connection ended; what the session held on the server is gone. Handled inside this package."""


class Connection:
    """One session with a server. Not for two threads at once.

    Args:
      address: ``tcp://host:port`` or ``ipc://path``.
      curve: the keys of the program, or None.
      interrupt: shared by all connections of a client.
      hello: what this client says of itself in the first message of a session.
      reconnect_timeout: seconds for which a server that is not there is waited for.
      news: shared by all connections of a client.
    """

    def __init__(
        self,
        address: str,
        curve: sockets.CurveKeys | None,
        interrupt: Interrupt,
        hello: dict[str, Any] | None = None,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT,
        news: News | None = None,
    ) -> None:
        self.address = address
        self._news = news or News()
        self.welcome: dict[str, Any] = {}  # what the server said of itself
        self.state: dict[str, Any] = {}  # what its user remembers of a session; emptied when a new one begins
        self.session = 0  # 0 before the first one
        self._curve = curve
        self._interrupt = interrupt
        self._hello = {"op": "hello", "protocol": PROTOCOL, "pid": os.getpid(), **(hello or {})}
        self._reconnect_timeout = reconnect_timeout
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._greeted = False
        self._next_id = 0
        self.notices: Callable[[dict[str, Any]], None] = lambda message: None

    def open(self, timeout: float | None = None) -> None:
        """Makes sure that a session is open.

        Raises:
          ServerClosed: the server said that it stops, or did not answer within ``reconnect_timeout``.
          DeadlineExceededError: ``timeout`` seconds passed first.
        """
        if self._greeted:
            return
        if self._socket is None:
            self._connect()
        assert self._socket is not None
        limit = self._reconnect_timeout if timeout is None else min(timeout, self._reconnect_timeout)
        stopped = self._news.stopped
        if stopped:
            limit = min(limit, _COME_BACK)
        watch = not self._interrupt.is_set
        if not watch:
            limit = min(limit, _LAST_WORDS)
        deadline = time.monotonic() + limit
        last = float("inf") if timeout is None else time.monotonic() + timeout
        while self._wait_for_greeting(deadline, watch, last):
            answer = wire.decode(self._socket.recv_multipart(copy=False))
            if "error" in answer:
                self.close()
                raise wire.unpack_error(answer["error"])
            if answer.get("id") == self._next_id:
                self.welcome = answer
                self._greeted = True
                self._news.stopped = False
                self.session += 1
                self.state = {}
                return
            self._take(answer)
        self.close()
        if stopped:
            raise ServerClosed(f"the replay server at {self.address} has stopped")
        if timeout is not None and (timeout <= self._reconnect_timeout or self._news.away):
            raise DeadlineExceededError(f"no replay server answered at {self.address} within {limit:g} s")
        raise ServerLost(
            f"no replay server answered at {self.address} within {limit:g} s; is it running, and does this "
            "client have its keys?"
        )

    def _wait_for_greeting(self, deadline: float, watch: bool, last: float) -> bool:
        """Whether there is a message before the deadline; goes to where the server has moved meanwhile.

        A server that is away, and is to come back, is waited for until ``last``.
        """
        while True:
            if self._news.address not in (None, self.address):
                self.close()
                self._connect()
                deadline = max(deadline, min(last, time.monotonic() + self._reconnect_timeout))
            # After an interrupt nobody waits for a server that is away.
            away = watch and self._news.away
            look = time.monotonic() + _LOOK
            if self._wait(min(look, last if away else deadline), watch, connecting=True):
                return True
            moved = watch and self._news.address not in (None, self.address)
            now = time.monotonic()
            if now >= last or (now >= deadline and not away and not moved):
                return False

    @property
    def interrupted(self) -> bool:
        """Whether the client was interrupted."""
        return self._interrupt.is_set

    def request(
        self, message: dict[str, Any], timeout: float | None = None, wait: bool = True
    ) -> dict[str, Any]:
        """Sends a message and returns the server's answer; the message must stand by itself (no session
        state).

        Args:
          message: see `framework.replay.server.service` for the operations.
          timeout: seconds the *server* may hold the request back (None: for ever, 0: not at all); only
            ``wait`` requests are ever held back.
          wait: whether the request may be held back by a rate limiter.

        Raises:
          SessionLost: the connection ended before the answer; the caller decides what that means.
          Whatever the server answered: see `wire.unpack_error`.
        """
        # Only a wait is interrupted: a program that stops still writes its last checkpoint and metrics.
        watch = wait and not self._interrupt.is_set
        if wait:
            message["timeout"] = timeout if watch else 0.0
            deadline = None if message["timeout"] is None else time.monotonic() + message["timeout"] + _GRACE
        else:
            deadline = time.monotonic() + (_GRACE if timeout is None else timeout)
        try:
            return self._exchange(message, deadline, watch)
        except DeadlineExceededError:
            if wait and not watch:
                raise ServerClosed("this client was interrupted: its program stops") from None
            raise

    def post(self, message: dict[str, Any]) -> None:
        """Sends a message that has no answer; raises SessionLost if the connection has ended."""
        if self._socket is None or not self._greeted or self._lost():
            self._end()
        wire.send(self._socket, wire.encode(message))

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Waits up to ``timeout`` seconds for a notice and hands all that are there to ``notices``.

        Returns whether there was any.

        Raises:
          SessionLost: the connection ended.
          ServerClosed: the server stops, or the client was interrupted (not if ``timeout`` is 0).
        """
        if self._socket is None or not self._greeted:
            raise SessionLost
        watch = timeout != 0.0 and not self._interrupt.is_set
        if not self._wait(None if timeout is None else time.monotonic() + timeout, watch):
            return False
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self._take(wire.decode(frames))

    def close(self) -> None:
        """Ends the session; the server gives back what it held."""
        if self._socket is not None:
            self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
            # What was sent last (the end of a session, a commit) may still be on its way to the server's
            # queue.
            self._socket.close(linger=100)
            self._socket = self._monitor = None
        self._greeted = False

    def __del__(self) -> None:
        with contextlib.suppress(
            AttributeError, TypeError, zmq.ZMQError
        ):  # half made, or the interpreter ends
            self.close()

    def _connect(self) -> None:
        self.address = self._news.address or self.address
        self._socket = sockets.make_client_socket(self.address, self._curve)
        if self.address.startswith("tcp://"):
            # A machine that vanishes without a word is noticed within 20 s.
            self._socket.heartbeat_ivl = 5000
            self._socket.heartbeat_timeout = 20000
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._greeted = False
        self._greet()

    def _greet(self) -> None:
        """Says hello; what is sent before the server is there is delivered when it comes."""
        self._next_id += 1
        wire.send(self._socket, wire.encode({**self._hello, "id": self._next_id}))

    def _exchange(self, message: dict[str, Any], deadline: float | None, watch: bool) -> dict[str, Any]:
        if self._socket is None or not self._greeted or self._lost():
            self._end()
        assert self._socket is not None
        self._next_id += 1
        message["id"] = self._next_id
        try:
            wire.send(self._socket, wire.encode(message))
            while self._wait(deadline, watch):
                answer = wire.decode(self._socket.recv_multipart(copy=False))
                if answer.get("id") != self._next_id:
                    self._take(answer)
                    continue
                if "error" in answer:
                    error = wire.unpack_error(answer["error"])
                    self._news.stopped |= isinstance(error, ServerClosed)
                    raise error
                return answer
        except (ServerClosed, KeyboardInterrupt):
            self.close()  # the request is still waiting over there: end its session
            raise
        self.close()
        raise DeadlineExceededError(
            f"the replay server at {self.address} did not answer {message['op']!r} in time"
        )

    def _end(self) -> NoReturn:
        """The connection has ended: was it stopped, with a last word, or lost?"""
        if self._socket is not None and self._greeted:
            # The word that it stopped may be old: the next session sees whether the server has come back.
            with contextlib.suppress(zmq.Again, SessionLost, ServerClosed):
                while self._socket is not None:
                    self._take(wire.decode(self._socket.recv_multipart(zmq.NOBLOCK, copy=False)))
        self.close()
        raise SessionLost

    def _take(self, message: dict[str, Any]) -> None:
        """A message that nobody asked for."""
        kind = message.get("notice")
        if kind == "stopped":
            self.close()
            self._news.stopped = True
            raise ServerClosed(f"the replay server at {self.address} has stopped")
        if kind == "lost":
            self.close()
            raise SessionLost
        self.notices(message)

    def _wait(self, deadline: float | None, watch: bool, connecting: bool = False) -> bool:
        """Whether there is a message before the deadline; raises if there will be none."""
        assert self._socket is not None
        watched: list[Any] = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        if watch:  # an interrupt that came before the call does not end it: it must not wait for long, though
            watched.append((self._interrupt.fileno(), zmq.POLLIN))
        while True:
            left = -1 if deadline is None else max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
            ready = dict(zmq.zmq_poll(watched, left))
            if self._socket in ready:
                return True
            if self._monitor in ready and self._lost():
                if not connecting:
                    self._end()
                self._greet()  # ZeroMQ connects again by itself
            if self._interrupt.fileno() in ready:
                raise ServerClosed("this client was interrupted: its program stops")
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _lost(self) -> bool:
        """Whether the connection has ended since it was greeted; takes the events that are there."""
        assert self._monitor is not None
        lost = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            lost |= event == zmq.EVENT_DISCONNECTED
        return lost
