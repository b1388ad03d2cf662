"""The server's event loop: one thread owns the socket, and no request blocks it.

The loop keeps a request that has to wait for a rate limiter, with its deadline, and tries it again when a
table has changed (`Service.wake`). Requests of one line (samples of one table, inserts of one client) go
through in order.

A `ClientSession` records what its client holds, and ends with the connection, of which ZeroMQ's monitor
reports the end with the number of its descriptor. Each message has that number, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from framework.replay import wire
from framework.replay.errors import ReverbError, ServerClosed, ServerLost, StoreFullError
from framework.replay.server.limits import Limits, Unread
from framework.replay.server.operations import ClientSession, Operations, Reply, Request, Steps
from launch.defects import Defects
from launch.rpc import sockets
from launch.texts import printable

_LOG = logging.getLogger(__name__)
_ROUND = 64  # messages that the loop receives before it tries the waiting requests
_LONGEST_POLL_S = 3600.0
_LAST_WORDS_S = 1.0  # for which a busy server waits for the last messages of a client that has gone
_UNBIND_MS = 5000  # for which `stop` waits until the address is free
_SPARE_FILES = 512  # that connections leave to the rest of the process, or half of all
_LOOK_S = 0.1  # between two looks at whether clients have read their answers, while others wait for room
_LARGE_ANSWER = 1 << 16  # bytes; ZeroMQ bounds the number of smaller ones that a client leaves unread
# Errors that a client's message or a full machine can cause. Others are defects of this package.
_FIELD_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_CLIENT_ERRORS = (*_FIELD_ERRORS, MemoryError, OSError, ReverbError)


class Service:
    """Carries out the messages that come to a bound ROUTER socket, with `handler`, until `stop`.

    A message that does not follow the protocol is ignored. A request with invalid fields is answered with the
    error. Any other error is a defect of this package: it is logged with its traceback, and ends the service
    if it repeats, see `launch.defects`.

    Args:
      handler: carries out the messages.
      listener: the bound socket, which the service closes.
      on_failure: called with the error that ended the loop, on its thread, before the clients hear of it.
      limits: what clients may use of the memory; None for the defaults.

    Attributes:
      thread: runs the loop, once it is started.
      error: the error that ended the loop; None before, and after `stop`.
      messages: number of received messages.
      defects: counts messages that failed with an error of this package.
      malformed: number of messages that do not follow the protocol; the service ignores them.
      refused: number of connections that were closed because the process has used up its files.
    """

    def __init__(
        self,
        handler: Operations,
        listener: zmq.Socket,
        on_failure: Callable[[BaseException], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.messages = 0
        self.malformed = self.refused = 0
        self.defects = Defects()
        self._handler = handler
        self._limits = limits = limits or Limits()
        self._address = sockets.bound_address(listener)
        self._unread = Unread(limits.max_unread_bytes)
        self._on_failure = on_failure
        self.thread = threading.Thread(target=self._run, name="replay-server", daemon=True)
        self._socket = listener
        self._monitor: zmq.Socket  # of the listener; the loop makes it
        self._sessions: dict[bytes, ClientSession] = {}
        self._lines: OrderedDict[Hashable, OrderedDict[Request, None]] = OrderedDict()
        self._waiting_bytes = 0
        self._deadlines: dict[Request, float] = {}
        self._ended: dict[ClientSession, float] = {}  # those without a connection, and since when
        self._next_look = 0.0
        self._is_full = False  # whether a request waits until clients have read their answers
        self._slow: set[Any] = set()  # clients to cut off, as they leave large answers unread
        self._again = False  # whether something has changed since the waiting requests were tried
        self._stopping = False
        self._reason: Exception = ServerClosed("the replay server has stopped")
        self._wake = wire.Wake()

    # --- called by any thread ---

    def wake(self) -> None:
        """Tells the loop to try the waiting requests again, because what they wait for may have changed."""
        # The order matters: the loop first adds a request to a line and then reads `_again`.
        self._again = True
        if self._lines and threading.get_ident() != self.thread.ident:
            self._wake.set()

    def stop(self) -> None:
        """Answers every waiting request with ServerClosed, tells all clients, and ends the loop.

        When it returns, another server can be bound to the address.
        """
        self._stopping = True
        self._wake.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join()

    # --- the loop ---

    def _run(self) -> None:
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        try:
            self._loop()
        except BaseException as error:
            self.error = error
            self._reason = ServerLost(f"the replay server failed: {type(error).__name__}: {error}")
            _LOG.exception("the replay server failed")
            if self._on_failure is not None:
                self._on_failure(error)  # before the clients hear of it: theirs would be the first failures
        finally:
            self._end()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake.descriptor):
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            now = time.monotonic()
            longest = _LOOK_S if self._is_full else _LONGEST_POLL_S
            due = min([now + longest, *self._deadlines.values()])
            again = self._lines and self._again
            ready = dict(poller.poll(0 if again else max(0, int(1000 * (due - now) + 0.999))))
            if self._wake.descriptor in ready:
                self._wake.clear()
            if self._monitor in ready:
                self._read_events()
            if self._is_full and time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + _LOOK_S
                self._again = True
                self._is_full = False
            if self._socket in ready:
                self._receive()
            if self._ended:
                read = not self._socket.poll(0)  # Their last messages may be among those that have arrived.
                for session, since in list(self._ended.items()):
                    if read or since < now - _LAST_WORDS_S:
                        self._close(session)
            if self._lines and self._again:
                self._try_waiting()
            while self._slow:
                self._cut_off(*self._slow.pop())
            now = time.monotonic()
            for request in [each for each, deadline in self._deadlines.items() if deadline <= now]:
                self._end_request(request, request.late())

    def _read_events(self) -> None:
        """Reads the monitor's events, and notes the sessions whose connections have ended."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._refuse_without_files(event["value"])
            else:
                now = time.monotonic()
                gone = [each for each in self._sessions.values() if each.descriptor == event["value"]]
                self._ended.update(dict.fromkeys(gone, now))

    def _refuse_without_files(self, descriptor: int) -> None:
        """Closes a new connection that has taken one of the last files of the process.

        Numbers are given from the lowest on. ZeroMQ ends the process if it finds none for a connection to a
        socket of a directory.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY or descriptor < most - min(_SPARE_FILES, most // 2):
            return
        self.refused += 1
        if self.refused == 1:
            _LOG.error(
                "the process has used up most of its %d files. New connections are refused until others end. "
                "Raise the limit (ulimit -n) before the start.",
                most,
            )
        self._shut(descriptor)

    def _shut(self, descriptor: int) -> None:
        """Closes a connection by ZeroMQ's descriptor; ZeroMQ then drops what it holds of it.

        ZeroMQ may have closed it. Of what has taken its number since, only another connection to this address
        counts.
        """
        with contextlib.suppress(OSError):  # The number is free, or a file's.
            connection = socket.socket(fileno=descriptor)
            try:
                name: Any = connection.getsockname()
                if self._address.endswith(name if isinstance(name, str) else f":{name[1]}"):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()

    # --- messages ---

    def _receive(self) -> None:
        for _ in range(_ROUND):
            try:
                identity = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.messages += 1
            try:
                op, number, message, descriptor = self._receive_message()
            except wire.MalformedMessage as error:
                # No message of one peer may end the service of the others.
                self.malformed += 1
                if self.malformed & (self.malformed - 1) == 0:  # the 1st, 2nd, 4th …: a flood fills no log
                    _LOG.warning(
                        "ignored a malformed message (%d so far): %s", self.malformed, printable(str(error))
                    )
                continue
            try:
                self._carry_out(identity.bytes, descriptor, op, number, message)
            except Exception as error:
                self._note(error, f"message {op!r} of a client")

    def _receive_message(self) -> tuple[str, int | None, dict[str, Any], int]:
        """Receives a message, whose frames are all there; returns its operation, its number, and all of it.

        The last value is ZeroMQ's descriptor of its connection.

        Raises:
          MalformedMessage: It does not follow the protocol. If it is too large, the connection is closed.
        """
        frames = self._socket.recv_multipart(copy=False)
        descriptor = int(frames[0].get(zmq.SRCFD))
        num_bytes, most = sum(map(len, frames)), self._limits.max_message_bytes
        if num_bytes > most:
            self._shut(descriptor)
            raise wire.MalformedMessage(f"message: got {num_bytes} bytes, expected at most {most}")
        message = wire.decode(frames)
        op, number = message.get("op"), message.get("id")
        message["num_bytes"] = num_bytes
        if type(op) is str and (number is None or type(number) is int):
            return op, number, message, descriptor
        raise wire.MalformedMessage(
            f"op, id: got {type(op).__name__}, {type(number).__name__}, expected a string and an integer"
        )

    def _note(self, error: Exception, what: str) -> None:
        """Counts a defect; raises it if it repeats."""
        if self.defects.repeats(error, what):
            raise error

    def _carry_out(
        self, identity: bytes, descriptor: int, op: str, number: int | None, message: dict[str, Any]
    ) -> None:
        if op == "sync" and self._lines and self._again:
            self._try_waiting()  # its answer comes after the answers to earlier requests
        session = self._sessions.get(identity)
        if session is not None and op == "hello":
            self._close(session)
            session = None
        elif session is None and op != "hello":
            self._send(identity, {"notice": "lost"})
            return
        elif session is not None and op == "cancel":
            for request in list(session.waiting):
                self._end_request(request, ServerClosed("the request was canceled by its client"))
            return
        answer: Reply | Steps | Exception | None
        try:  # only what reads the fields of the message
            if session is None:
                self._read_events()  # The descriptor may have been another client's.
                session = ClientSession(identity, descriptor)
                answer = self._handler.open(session, message)
                answer["max_message_bytes"] = self._limits.max_message_bytes
                self._sessions[identity] = session
            else:
                session.end(message.get("done", ()), False)
                if op not in self._handler.operations:
                    raise ValueError(f"op: got {op!r}, expected an operation of this protocol.")
                answer = self._handler.operations[op](session, message)
                if not isinstance(answer, dict):
                    answer = self._begin(session, number, message["num_bytes"], answer)
        except _CLIENT_ERRORS as error:
            answer = error
        except Exception as error:
            self._send(identity, error, number)
            raise
        if answer is not None:
            self._send(identity, answer, number)

    def _send(self, identity: bytes, answer: Reply | Exception, number: int | None = None) -> None:
        """Answers a client's message `number`, or sends a notice.

        A message without a number gets no answer other than an error. If the client has gone or does not read
        its answers, its session ends.
        """
        if isinstance(answer, Exception):
            answer = {"error": wire.pack_error(answer)}
        elif number is None and "notice" not in answer:
            return
        try:
            frames = wire.encode({**answer, "id": number})
        except Exception as error:  # its ASCII form can be sent
            refused = TypeError(f"answer: got a value that cannot be sent: {error!a}")
            frames = wire.encode({"error": wire.pack_error(refused), "id": number})
        num_bytes = sum(map(len, frames))
        if num_bytes >= _LARGE_ANSWER:  # tracked by its last frame, even if that is small
            frames[-1] = zmq.Frame(frames[-1], copy=False, track=True)
        session = self._sessions.get(identity)
        try:
            tracker = self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            if "notice" in answer:
                return  # an idle client does not have to read notices
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        else:
            if session is not None and tracker is not None and num_bytes >= _LARGE_ANSWER:
                self._unread.add((identity, session.descriptor), tracker, num_bytes)
            return
        if session is not None:
            self._close(session)

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether a large answer may be made now; if not, the request is tried again soon."""
        if num_bytes < _LARGE_ANSWER:
            return True
        room, idlest = self._unread.has_room(num_bytes)
        if idlest is not None:
            self._slow.add(idlest)  # This request, which takes a step now, may be of it.
        self._is_full |= not room
        return room

    def _cut_off(self, identity: bytes, descriptor: int) -> None:
        """Ends the session and the connection of a client that leaves large answers unread."""
        if identity in self._sessions:
            self._close(self._sessions[identity])
        _LOG.warning("ended the connection of a client: it leaves large answers unread while others wait")
        self._shut(descriptor)

    # --- requests that wait ---

    def _begin(
        self, session: ClientSession, number: int | None, num_bytes: int, steps: Steps
    ) -> Reply | Exception | None:
        """Returns the answer of a new request, or None if it waits from now on."""
        request: Request = next(steps)
        request.session, request.id, request.steps = session, number, steps
        request.num_bytes = num_bytes - request.done_bytes
        timeout = request.timeout
        if timeout is not None and (type(timeout) not in (int, float) or not timeout >= 0):  # NaN is not
            raise ValueError(f"timeout: got {timeout!r}, expected seconds >= 0 or None.")
        answer = None if request.line in self._lines else next(steps)
        if answer is None and timeout == 0:
            answer = request.late()
        elif answer is None and self._waiting_bytes + request.num_bytes > self._limits.max_unread_bytes:
            answer = StoreFullError(
                f"requests that wait: got more than {self._limits.max_unread_bytes} bytes of all clients. "
                "Wait for answers first, or give the server a larger max_unread_bytes."
            )
        if answer is not None:
            steps.close()
            return answer
        session.waiting.add(request)
        self._waiting_bytes += request.num_bytes
        self._lines.setdefault(request.line, OrderedDict())[request] = None
        if timeout is not None:
            self._deadlines[request] = time.monotonic() + timeout
        for table in request.tables:
            table.waiting.count(request.side, 1)
        self._again = True  # the tables may have changed between the first step and the count
        return None

    def _try_waiting(self) -> None:
        """Takes a step of the first request of each line, and of the next ones if it goes through.

        A step that changes a table sets `_again` if another line waits for the change: a sample makes room
        for an insert.
        """
        self._again = False
        for line in list(self._lines.values()):
            while line:
                answer: Reply | Exception | None
                first = next(iter(line))
                try:
                    answer = next(first.steps)
                except Exception as error:
                    answer = error
                if answer is None:
                    break
                self._end_request(first, answer)
                if isinstance(answer, Exception) and not isinstance(answer, _CLIENT_ERRORS):
                    self._note(answer, "a client's request that waited")

    def _end_request(self, request: Request, answer: Reply | Exception | None) -> None:
        """Ends a request that has waited, if it is still open, and answers it unless `answer` is None."""
        if request not in request.session.waiting:
            return
        request.session.waiting.remove(request)
        self._waiting_bytes -= request.num_bytes
        line = self._lines[request.line]
        del line[request]
        if line:
            self._lines.move_to_end(request.line)  # the other lines are tried first
            self._again = True
        else:
            del self._lines[request.line]
        self._deadlines.pop(request, None)
        for table in request.tables:
            table.waiting.count(request.side, -1)
        request.steps.close()
        if answer is not None:
            self._send(request.session.identity, answer, request.id)

    # --- ends ---

    def _close(self, session: ClientSession) -> None:
        """Ends the session of a client that has gone or said hello again."""
        if self._sessions.get(session.identity) is session:
            del self._sessions[session.identity]
        self._ended.pop(session, None)
        for request in list(session.waiting):
            self._end_request(request, None)
        self._handler.close(session)

    def _end(self) -> None:
        for session in list(self._sessions.values()):
            for request in list(session.waiting):
                self._end_request(request, self._reason)
            if session.identity in self._sessions:
                self._send(session.identity, {"notice": "stopped"})
            if session.identity in self._sessions:
                self._close(session)
        if self._address.startswith("ipc://"):  # ZeroMQ leaves the file, which may soon be another server's.
            with contextlib.suppress(OSError):
                os.unlink(self._address.removeprefix("ipc://"))
        # ZeroMQ's thread closes the listener: until then, the address is in use.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.unbind(sockets.bound_address(self._socket))
            while self._monitor.poll(_UNBIND_MS):
                if parse_monitor_message(self._monitor.recv_multipart())["event"] == zmq.EVENT_CLOSED:
                    break
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=1000)  # milliseconds to deliver the last answers
