"""A connection of a client to its server.

A connection is one socket, one session and one waiting request. The server keeps what a client holds (leased
rows, samples, waiting requests) by connection, and takes it back when the connection ends. One rule therefore
covers every lost connection, whether the network failed, the server was killed or it was restarted: the old
session is gone. A writer ends with it; everything else opens a new session and asks again.
`ReplayConnection.session` counts the sessions. A connection that a forked child inherits is lost, too.

A request waits for its answer, for the end of the connection and for an interrupt of the client in one poll.
Calls wait up to `reconnect_timeout` seconds for a server that does not answer.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import time
from typing import Any, NamedTuple

import zmq

from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost
from framework.replay.remote.channel import ReplayChannel
from framework.replay.rows.layout import Binding
from framework.replay.shm import MappedStore
from framework.replay.wire import PROTOCOL, Wake, decode, encode, unpack_error
from launch.rpc import sockets

# Seconds for which an interrupted client still tries to reach its server with its last messages.
LAST_WORDS_S = 2.0
# Seconds for which a client looks for a server that has stopped: it may have been started again.
_COME_BACK_S = 0.25
_PAUSE_MS = 50  # before the next attempt if a connection ends at once, as with wrong keys
_LONGEST_POLL_MS = 1e9
_LOOK_S = 0.05  # after which a call that waits has this client's writers write again
# A request is not repeated if this many sessions in a row have ended within these seconds.
_MAX_LOST, _AT_ONCE_S = 5, 5.0


class SessionLost(Exception):
    """The connection and its session have ended. Internal to this package."""


class Interrupted(ServerClosed):
    """The client was interrupted while a call waited."""

    def __init__(self) -> None:
        super().__init__("this client was interrupted: its program stops")


class OpenRequest(NamedTuple):
    """A request that was sent.

    Attributes:
      session: the number of its session.
      number: the number of the message.
      deadline: when the server must have answered; None for no limit.
      wait: whether a rate limiter may hold it back.
      watch: whether an interrupt ends the wait for the answer.
    """

    session: int
    number: int
    deadline: float | None
    wait: bool
    watch: bool


class ReplayConnection:
    """One session with a server. One thread at a time may use it.

    Args:
      channel: the channel of the client.

    Attributes:
      grace_s: seconds after the server's own deadline at which the client assumes that the server hangs.
      wake: ends the waits of this connection.
      welcome: the server's answer to hello, which describes it.
      session: number of sessions so far; 0 before the first.
      is_open: whether the session is open, as far as this side knows.
      mapped: the columns of the server that this process has mapped.
      layouts: the layouts that the server has defined in this session, bound to mapped rows, by number.
      answers: those that were received and not taken yet, by number.
      done: deliveries whose rows were read; the next message reports them. Any thread may append.
    """

    grace_s = 30.0

    def __init__(self, channel: ReplayChannel) -> None:
        self.wake = Wake()
        self.welcome: dict[str, Any] = {}
        self.session = 0
        self.mapped: MappedStore
        self.layouts: dict[int, Binding] = {}
        self.done: collections.deque[int] = collections.deque()
        self._channel = channel
        self._address = ""
        self._pid = 0
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None  # readable once the connection has ended
        self.is_open = False
        self._next_id = 0
        self.answers: dict[int, dict[str, Any]] = {}

    # --- the session ---

    def open(self, timeout: float | None = None) -> None:
        """Opens a session if none is open.

        Raises:
          ServerClosed: the server said that it stops, or did not answer within `reconnect_timeout`.
          DeadlineExceededError: `timeout` seconds passed first.
        """
        if self.is_open:
            return
        channel, interrupted = self._channel, self.wake.is_set
        last = time.monotonic() + (float("inf") if timeout is None else timeout)
        address, stopped, limit, give_up = "", False, 0.0, 0.0
        while True:
            if address != channel.address:  # at first, and when the server has moved
                address, stopped = channel.address, channel.stopped
                limit = _COME_BACK_S if stopped else channel.reconnect_timeout
                limit = min(limit, LAST_WORDS_S) if interrupted else limit
                give_up = min(last, time.monotonic() + limit)
            until = last if channel.away and not interrupted else give_up
            try:
                if self._socket is None or self._address != address:
                    self.close()
                    self._address, self._pid = address, os.getpid()
                    self._socket = sockets.make_client_socket(address, channel.curve)
                    self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                    self._next_id += 1
                    hello = {"op": "hello", "protocol": PROTOCOL, "id": self._next_id}
                    # It is sent once the server is there, if it is not yet.
                    self._socket.send_multipart(encode(hello), zmq.NOBLOCK)
                while self.receive(min(until, time.monotonic() + channel.look_s), not interrupted):
                    answer = self.answers.pop(self._next_id, None)
                    if answer is not None:
                        return self._begin(answer)
            except (SessionLost, zmq.Again):  # A server that refuses the keys may do so before the hello.
                self.close()
                zmq.zmq_poll([] if interrupted else [(self.wake.descriptor, zmq.POLLIN)], _PAUSE_MS)
            except BaseException as error:
                self.end_if_interrupted(error)
                raise
            away = channel.away and not interrupted
            if time.monotonic() >= (last if away else give_up) and address == channel.address:
                break
        self.close()
        if stopped:
            raise ServerClosed(f"the replay server at {address} has stopped")
        limit = limit if timeout is None else min(limit, timeout)
        text = f"no replay server answered at {address} within {limit:g} s"
        if timeout is not None and (timeout <= channel.reconnect_timeout or channel.away):
            raise DeadlineExceededError(text)
        raise ServerLost(f"{text}. Is it running, and does this client have its keys?")

    def _begin(self, answer: dict[str, Any]) -> None:
        """Begins a session with the server's answer to hello."""
        if "error" in answer:
            self.close()
            raise unpack_error(answer["error"])
        self.welcome = answer
        self.session += 1
        self.mapped = self._channel.mapped(answer)
        self.layouts = {}
        self.done.clear()
        self.answers = {}
        self.is_open = True
        self._channel.stopped = False

    def close(self) -> None:
        """Ends the session; the server takes back what it held."""
        self.is_open = False  # first: an interrupt may end this
        if self._socket is not None and self._pid == os.getpid():  # not the parent's
            self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
            self._socket.close(linger=100)  # milliseconds to deliver the last message
        self._socket = self._monitor = None

    def __del__(self) -> None:
        # The constructor has failed, or the interpreter ends.
        with contextlib.suppress(AttributeError, TypeError, zmq.ZMQError):
            self.close()

    # --- messages ---

    def post(self, message: dict[str, Any]) -> int:
        """Sends a message and returns its number; `answers` will have its answer. The caller ends interrupts.

        Raises:
          SessionLost: there is no session, or it is of another process or another server.
        """
        if not self.is_open or self._address != self._channel.address or self._pid != os.getpid():
            self.close()
            raise SessionLost
        assert self._socket is not None
        self._next_id += 1
        message["id"] = self._next_id
        try:
            if self.done and message["op"] != "cancel":  # which does not report them
                done = message["done"] = []
                while self.done:
                    done.append(self.done.popleft())
            frames = encode(message)
            most = self.welcome.get("max_message_bytes", 0)
            if len(frames) > 1 and (size := sum(frame.nbytes for frame in frames[1:])) > most:
                raise ValueError(
                    f"message {message['op']!r}: got {size} bytes of arrays, expected at most {most}. Send "
                    "fewer at a time, or give the server a larger max_message_bytes."
                )
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # the connection is gone
            self.close()
            raise SessionLost from None
        return self._next_id

    def ask(
        self, message: dict[str, Any], timeout: float | None = None, wait: bool = False
    ) -> OpenRequest | None:
        """Sends a message whose answer `answer` or `call` then waits for; None if there is no session.

        Adds the field `local`: whether this process reads rows in place.

        Args:
          message: see `framework.replay.server.operations`.
          timeout: seconds for which the *server* may hold the request back (None: without limit, 0: not at
            all) if `wait`, and otherwise seconds in which it must answer.
          wait: whether a rate limiter may hold the request back.
        """
        if not self.is_open:
            return None
        message["local"] = self.mapped.local
        # An interrupt ends waits only: a program that stops still writes its last checkpoint and metrics.
        watch = wait and not self.wake.is_set
        if wait:
            message["timeout"] = timeout if watch else 0.0
            limit = None if message["timeout"] is None else message["timeout"] + self.grace_s
        else:
            limit = self.grace_s if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        try:
            return OpenRequest(self.session, self.post(message), deadline, wait, watch)
        except SessionLost:
            return None
        except BaseException as error:
            self.end_if_interrupted(error)
            raise

    def call(
        self,
        message: dict[str, Any],
        timeout: float | None = None,
        wait: bool = False,
        asked: OpenRequest | None = None,
    ) -> dict[str, Any]:
        """Makes a `request`, in a new session if none is open or if the connection ends before the answer.

        `asked` is what `ask` has returned for the same arguments, if that was called before.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        lost = 0  # sessions in a row that ended at once
        while True:
            begin = time.monotonic()
            left = None if deadline is None else max(0.0, deadline - begin)
            with contextlib.suppress(SessionLost):
                if asked is None:
                    # A call with timeout 0 waits a moment for the server, too: it may be about to start.
                    self.open(None if left is None else left + 1.0)
                    asked = self.ask(message, left, wait)
                return self.answer(asked)
            asked = None
            lost = lost + 1 if time.monotonic() - begin < _AT_ONCE_S else 1
            if lost > _MAX_LOST:
                raise ServerLost(
                    f"{message['op']}: the replay server at {self._address} ended {_MAX_LOST} sessions in a "
                    "row at this request. It may be larger than the server takes."
                )
            if lost > 1 and not self.wake.is_set:
                pause = _PAUSE_MS << lost
                pause = pause if left is None else min(pause, int(left * 1000))
                zmq.zmq_poll([(self.wake.descriptor, zmq.POLLIN)], pause)

    def request(
        self, message: dict[str, Any], timeout: float | None = None, wait: bool = False
    ) -> dict[str, Any]:
        """Sends a message and returns the server's answer; see `ask` for the arguments and `answer`."""
        return self.answer(self.ask(message, timeout, wait))

    def answer(self, asked: OpenRequest | None) -> dict[str, Any]:
        """Waits for the answer to what `ask` has sent.

        Raises:
          SessionLost: the connection ended before the answer.
          Whatever the server answered: see `unpack_error`.
        """
        if asked is None or asked.session != self.session:
            raise SessionLost
        _, number, deadline, wait, watch = asked
        try:
            while number not in self.answers:
                # A rate limiter may hold it back until an adder of this process writes more.
                look = time.monotonic() + _LOOK_S if wait else math.inf
                try:
                    if not self.receive(look if deadline is None else min(look, deadline), watch):
                        if deadline is not None and deadline <= look:
                            break
                        self._channel.writers.show()
                except Interrupted:
                    # The server ends the request with an error, or has answered it already.
                    self.post({"op": "cancel"})
                    deadline, watch = time.monotonic() + LAST_WORDS_S, False
            answer = self.answers.pop(number, None)
        except BaseException as error:
            self.end_if_interrupted(error)
            raise
        if answer is None:
            self.close()
            text = f"the replay server at {self._address} did not answer in time"
            failed: BaseException = DeadlineExceededError(text)
        elif "error" in answer:
            failed = unpack_error(answer["error"])
            if watch and isinstance(failed, ServerClosed):
                self._note_stop()
        else:
            return answer
        if wait and not watch and isinstance(failed, (DeadlineExceededError, ServerClosed)):
            raise Interrupted
        raise failed

    def receive(self, deadline: float | None, watch: bool) -> bool:
        """Receives one message, an answer or a notice; returns False if none comes before the deadline.

        Raises:
          SessionLost: the connection has ended.
          ServerClosed: the server stops, or the client was interrupted and `watch` is true.
        """
        if self._socket is None:
            raise SessionLost
        watched: list[Any] = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        if watch:  # otherwise the client was interrupted before the call, which does not wait for long
            watched.append((self.wake.descriptor, zmq.POLLIN))
        while True:
            left = -1.0
            if deadline is not None:
                left = min(_LONGEST_POLL_MS, max(0.0, (deadline - time.monotonic()) * 1000 + 0.999))
            ready = dict(zmq.zmq_poll(watched, int(left)))
            # The server's last message arrives before the end of the connection, but the poll may miss it.
            if self._socket in ready or (self._monitor in ready and self._socket.poll(0)):
                try:
                    message = decode(self._socket.recv_multipart(copy=False))
                    notice = message.get("notice")
                    if notice is None:
                        self.answers[message.get("id", 0)] = message
                except BaseException:
                    self.close()  # what was received is lost
                    raise
                if notice == "lost":
                    self.close()
                    raise SessionLost
                elif notice == "stopped":
                    self.close()
                    self._note_stop()
                    raise ServerClosed(f"the replay server at {self._address} has stopped")
                return True
            if self._monitor in ready:
                self.close()
                raise SessionLost
            if ready:
                raise Interrupted
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def give_up_soon(self) -> None:
        """Makes each later call give up soon if the server does not answer."""
        self.grace_s = LAST_WORDS_S
        self.wake.set()

    def end_if_interrupted(self, error: BaseException) -> None:
        """Ends the session after an exception of a signal handler, such as `KeyboardInterrupt`.

        It may have come between two frames of a message, or between an answer and what reads it.
        """
        if not isinstance(error, Exception):
            self.close()

    def _note_stop(self) -> None:
        """Notes that the server has stopped, unless the client has moved to another one."""
        if self._address == self._channel.address:
            self._channel.stopped = True
