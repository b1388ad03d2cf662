"""Serves the public methods of an object to the nodes of a program.

Handing a call to another thread and its answer back costs more than most calls take. So the thread that reads
the socket (the *leader*) carries a call out itself and answers at once. If the call is not done after a
moment, the watchdog makes another thread the leader and the slow call becomes an ordinary background call,
whose answer the new leader sends. A method that was slow lately is given away from the start. Calls that
block therefore do not hold up others, and up to ``max_threads`` calls run at the same time; further ones
wait in the socket.

That is the long way, over ZeroMQ. Callers of this machine that wait take the short one: `launch.rpc.door`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

from launch.batching import BatchedMethod
from launch.handles import Target
from launch.rpc import sockets, stream, wire
from launch.rpc.door import Door

_TICK = 0.002  # seconds that the leader may spend on a call before another thread reads on
_IDLE_TICKS = 100
_MAX_SLOWNESS = 16


class Server:
    """Answers calls until closed.

    Args:
      obj: whose public methods (and ``__call__``) are served.
      address: where, see `launch.rpc.sockets.make_server_socket`.
      curve: keys of the program. Not optional: messages are pickles, and must come from the program only.
      name: of the node, for errors and threads.
      enter: called first on every thread that carries out calls.
    """

    def __init__(
        self,
        obj: Any,
        address: str,
        curve: sockets.CurveKeys,
        *,
        name: str = "server",
        max_threads: int = 128,
        max_frame_bytes: int = sockets.DEFAULT_MAX_FRAME_BYTES,
        enter: Callable[[], None] | None = None,
    ) -> None:
        if curve is None:
            raise ValueError("Server(curve): calls are pickled, so only peers with a key may call: give keys")
        self._calls = 0
        self._malformed = 0
        self._undeliverable = 0
        self._target = Target(obj, name)
        self._name = name
        self._enter = enter
        self._max_threads = max(2, max_threads)
        self._socket = sockets.make_server_socket(address, curve, max_frame_bytes=max_frame_bytes)
        self.address = sockets.bound_address(self._socket)
        # Threads that finished a call in the background wake the leader through this second door. Its name is
        # random, and ROUTER refuses a second peer of the same name.
        door = f"inproc://launch-{os.urandom(8).hex()}"
        self._socket.bind(door)
        self._wake_name = b"wake" + os.urandom(16)
        self._wake = sockets.context().socket(zmq.DEALER)
        self._wake.linger = 0
        self._wake.setsockopt(zmq.IDENTITY, self._wake_name)
        self._wake.connect(door)
        self._wake_lock = threading.Lock()
        self._outbox: deque[tuple[bytes, int, int, bytes, list[Any]]] = deque()
        self._ignored: set[bytes] = set()
        self._pending: set[tuple[bytes, int]] = set()
        self._slow: dict[str, int] = {}
        # Guards who leads. ``_turn`` grows when the leader starts and ends a call: odd while it is busy.
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._leader: threading.Thread | None = None
        self._turn = 0
        self._at = (b"", 0)  # the call that the leader is at
        self._threads = 0
        self._standby = 0
        self._closed = False
        self._ended = threading.Event()
        self._busy = threading.Event()
        self._watching = False
        # Callers of this machine that wait come in here and need none of the above.
        path = stream.door(self.address)
        self._door = None
        if path is not None:
            self._door = Door(
                self._target,
                path,
                curve.token,
                name=name,
                max_threads=self._max_threads,
                max_frame_bytes=max_frame_bytes,
                enter=enter,
            )

    def start(self) -> Server:
        """Begins to answer."""
        if self._door is not None:
            self._door.start()
        with self._condition:
            self._need_thread()
        threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()
        return self

    @property
    def calls(self) -> int:
        """How many calls were taken in."""
        return self._calls + (0 if self._door is None else self._door.calls)

    @property
    def malformed(self) -> int:
        """How many messages made no sense; the connection that sent one is ignored from then on, or ended."""
        return self._malformed + (0 if self._door is None else self._door.malformed)

    @property
    def undeliverable(self) -> int:
        """How many answers found their caller gone."""
        return self._undeliverable + (0 if self._door is None else self._door.undeliverable)

    @property
    def in_flight(self) -> int:
        """Calls that are carried out in the background."""
        return len(self._pending)

    def close(self, timeout: float = 5.0) -> None:
        """Stops answering. Calls under way go on, but nobody gets their answer."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            started = self._threads > 0
            if self._turn % 2:  # the leader is at a call that may take for ever; it will not come back
                self._leader = None
                self._ended.set()
            self._condition.notify_all()
        self._busy.set()
        if self._door is not None:
            self._door.close()
        self._ring()
        if started:
            self._ended.wait(timeout)
        with self._wake_lock:
            self._wake.close(linger=0)
        self._socket.close(linger=1000)  # answers that were given are still sent

    # Threads and leadership.

    def _need_thread(self) -> None:
        """With the condition held: sees to it that some thread takes the lead."""
        if self._standby:
            self._condition.notify()
        elif self._threads < self._max_threads:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()

    def _serve(self) -> None:
        if self._enter is not None:
            self._enter()
        me = threading.current_thread()
        while True:
            with self._condition:
                while self._leader is not None and not self._closed:
                    self._standby += 1
                    self._condition.wait()
                    self._standby -= 1
                if self._closed:
                    if self._leader is None:
                        self._ended.set()
                    return
                self._leader = me
            try:
                self._lead(me)
            finally:
                with self._condition:
                    if self._leader is me:
                        self._leader = None
                        if self._closed:
                            self._ended.set()

    def _give_away_lead(self) -> bool:
        """Whether another thread can read on while this one is busy. The last thread stays at the socket."""
        with self._condition:
            if self._standby == 0 and self._threads >= self._max_threads:
                return False
            self._leader = None
            self._need_thread()
            return True

    def _watch(self) -> None:
        """Takes the lead from a thread that has been at one call for too long."""
        pause = threading.Event()
        last, quiet = -1, 0
        while not self._closed:
            if quiet >= _IDLE_TICKS:
                self._watching = False
                if self._turn % 2 == 0:  # else a call began just before the leader could know
                    self._busy.wait()
                self._busy.clear()
                quiet = 0
            self._watching = True
            turn = self._turn
            if turn == last and turn % 2:
                with self._condition:
                    if self._turn == turn and (self._standby or self._threads < self._max_threads):
                        self._leader = None
                        self._turn += 1
                        self._pending.add(self._at)
                        self._need_thread()
            quiet = quiet + 1 if turn == last and not turn % 2 else 0
            last = turn
            pause.wait(_TICK)

    # Messages.

    def _lead(self, me: threading.Thread) -> None:
        socket, wake_name, ignored = self._socket, self._wake_name, self._ignored
        while True:
            identity = socket.recv()
            assert isinstance(identity, bytes)
            if identity == wake_name:
                socket.recv()
                self._send_outbox()
                if self._closed:
                    return
                continue
            try:
                kind, number, body, buffers = wire.receive(socket)
                if identity in ignored:
                    continue
                if kind == wire.CALL:
                    name, args, kwargs = wire.decode(body, buffers)
                elif kind == wire.PROBE:
                    self._answer_probe(identity, number, bytes(body[wire.HEAD.size :]))
                    continue
                else:
                    raise wire.MalformedMessage(f"a message of kind {kind} to a server")
            except wire.MalformedMessage:
                self._ignore(identity)
                continue
            except Exception as error:
                # A proper message whose content cannot be rebuilt here: a class that is not importable, say.
                self._calls += 1
                self._answer_error(identity, number, error)
                continue
            self._calls += 1
            if not self._take(me, identity, number, name, args, kwargs):
                return
            if self._outbox:
                self._send_outbox()

    def _take(
        self,
        me: threading.Thread,
        identity: bytes,
        number: int,
        name: str,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> bool:
        """Carries one call out, here or elsewhere. Returns whether this thread still leads."""
        try:
            method = self._target.method(name)
        except Exception as error:
            self._answer_error(identity, number, error)
            return True
        if isinstance(method, BatchedMethod):
            self._pending.add((identity, number))
            method.submit(args, kwargs).add_done_callback(lambda f: self._answer_future(identity, number, f))
            return True
        slow = self._slow.get(name, 0)
        if slow:
            self._pending.add((identity, number))  # before another thread leads, who may be asked for it
            if self._give_away_lead():
                before = self._turn
                self._post(identity, number, method, args, kwargs)
                # Others were served meanwhile, so it was worth it; else the method is less slow than thought.
                self._slow[name] = slow - 1 if self._turn - before < 2 else slow
                return False
            self._pending.discard((identity, number))
        self._at = identity, number
        self._turn += 1
        if self._closed:
            return False
        if not self._watching:
            self._busy.set()
        try:
            kind, (data, buffers) = wire.REPLY, wire.encode(method(*args, **kwargs))
        except BaseException as error:
            kind, data, buffers = wire.encode_error(error)
        with self._lock:
            leads = self._leader is me
            if leads:
                self._turn += 1
        if leads:
            self._send_frames(identity, wire.head(kind, number, len(buffers)) + data, buffers)
            return True
        self._slow[name] = min(_MAX_SLOWNESS, slow + 4)
        self._outbox.append((identity, number, kind, data, buffers))
        self._ring()
        return False

    def _post(
        self, identity: bytes, number: int, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self._outbox.append((identity, number, *self._carry_out(method, args, kwargs)))
        self._ring()

    def _answer_future(self, identity: bytes, number: int, future: Future) -> None:
        error = future.exception()
        answer = _encode_reply(future.result()) if error is None else wire.encode_error(error)
        self._outbox.append((identity, number, *answer))
        self._ring()

    def _answer_error(self, identity: bytes, number: int, error: BaseException) -> None:
        self._send(identity, number, *wire.encode_error(error))

    def _answer_probe(self, identity: bytes, number: int, connection: bytes) -> None:
        """A waiting client asks whether its call is known here: it is not if this node was restarted.

        ``connection`` is where it has called through the door, else empty.
        """
        self._send_outbox()
        known = (identity, number) in self._pending
        if connection and self._door is not None:
            known = self._door.has(connection)
        kind = wire.PENDING if known else wire.LOST
        self._send_frames(identity, wire.head(kind, number), [])

    @staticmethod
    def _carry_out(
        method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[int, bytes, list[Any]]:
        try:
            return _encode_reply(method(*args, **kwargs))
        except BaseException as error:
            return wire.encode_error(error)

    def _send_outbox(self) -> None:
        while self._outbox:
            self._send(*self._outbox.popleft())

    def _send(self, identity: bytes, number: int, kind: int, data: bytes, buffers: list[Any]) -> None:
        self._pending.discard((identity, number))
        self._send_frames(identity, wire.head(kind, number, len(buffers)) + data, buffers)

    def _send_frames(self, identity: bytes, body: bytes, buffers: list[Any]) -> None:
        try:
            self._socket.send(identity, zmq.SNDMORE)
            if not buffers:
                self._socket.send(body)
                return
            # Buffers are copied here: the object may change its arrays as soon as the method has returned.
            for frame in (body, *buffers[:-1]):
                self._socket.send(frame, zmq.SNDMORE)
            self._socket.send(buffers[-1])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._undeliverable += 1

    def _ignore(self, identity: bytes) -> None:
        self._malformed += 1
        self._ignored.add(identity)

    def _ring(self) -> None:
        with self._wake_lock:
            if not self._wake.closed:
                self._wake.send(b"")


def _encode_reply(value: Any) -> tuple[int, bytes, list[Any]]:
    return wire.REPLY, *wire.encode(value)
