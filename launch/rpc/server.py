"""Serves the public methods of an object to the nodes of a program.

Threads take turns reading the socket. The thread that has read a call lets the next thread read, carries out
the call and sends the answer. A blocking call does not delay others until `thread_pool_size` calls block;
further calls then wait in the socket.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from launch.batching import BatchedMethod
from launch.defects import Defects
from launch.errors import without_exit
from launch.handles import Target
from launch.rpc import sockets, wire
from launch.rpc.shared_socket import SharedSocket

_PATIENCE_FOR_ANSWERS_S = 1.0  # seconds
_log = logging.getLogger("launch")


class RpcServer:
    """Answers calls until closed.

    Args:
      obj: object whose public methods (and `__call__`) are served.
      address: see `launch.rpc.sockets.make_server_socket`.
      curve: keys of the program. Messages are pickles, so only peers with the key may send them.
      name: name of the node, for errors and threads.
      thread_pool_size: number of calls that are carried out at once; further calls wait.
      max_frame_bytes: largest frame; a peer that sends a larger one is disconnected.
      enter: is called first on every thread that carries out calls.
      on_failure: called with the error that ended the server.

    Attributes:
      address: address that clients connect to.
      calls: number of calls received.
      malformed: number of malformed messages received; further messages of their senders are ignored.
      error: the error of this package that ended the server, because it repeated; see `launch.defects`.
    """

    def __init__(
        self,
        obj: object,
        address: str,
        curve: sockets.CurveKeys,
        *,
        name: str = "server",
        thread_pool_size: int = 128,
        max_frame_bytes: int = sockets.DEFAULT_MAX_FRAME_BYTES,
        enter: Callable[[], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        if curve is None:
            raise ValueError(
                "curve: got None, expected keys. Calls are pickles, so only peers with a key may call."
            )
        self.calls = 0
        self.malformed = 0
        self.error: BaseException | None = None
        self._defects = Defects()
        self._on_failure = on_failure
        self._target = Target(obj, name)
        socket = sockets.make_server_socket(address, curve, max_frame_bytes=max_frame_bytes)
        self.address = sockets.bound_address(socket)
        self._socket = SharedSocket(socket)
        self._name = name
        self._thread_pool_size = thread_pool_size
        self._enter = enter
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._num_threads = 0
        self._num_idle = 0  # threads that read or wait for their turn to read
        self._open: set[tuple[bytes, int]] = set()  # (client, number) of the calls without an answer
        self._ignored: set[bytes] = set()
        self._closed = False

    @property
    def defects(self) -> int:
        """Returns the number of messages that could not be answered because of an error of this package."""
        return self._defects.count

    def start(self) -> RpcServer:
        """Starts to answer calls."""
        with self._lock:
            self._add_thread()
        return self

    def close(self, timeout: float = 5.0) -> None:
        """Takes no further calls. Calls that do not end within a second continue without an answer."""
        if self._closed:
            return
        self._closed = True
        self._socket.wake()
        if self._reading.acquire(timeout=timeout):
            self._reading.release()
        with self._lock:  # A call that ended the program has returned, but its answer may not be sent yet.
            self._answered.wait_for(lambda: not self._open, _PATIENCE_FOR_ANSWERS_S)
        self._socket.close(linger=1000)  # queued answers are still sent

    def _add_thread(self) -> None:
        self._num_threads += 1
        self._num_idle += 1
        threading.Thread(target=self._serve, name=f"{self._name}-{self._num_threads}", daemon=True).start()

    def _serve(self) -> None:
        """Runs on every thread of the server."""
        if self._enter is not None:
            self._enter()
        try:
            while self._take_turn():
                pass
        except Exception as error:
            self._fail(error)

    def _take_turn(self) -> bool:
        """Reads a message, lets the next thread read, and carries the message out; False once closed."""
        with self._reading:
            frames = None
            while frames is None:
                if self._closed:
                    return False
                frames = self._socket.receive()
            try:
                message = self._parse(frames)
            except Exception as error:
                self._note(error)
                message = None
            with self._lock:
                self._num_idle -= 1
                if self._num_idle == 0 and self._num_threads < self._thread_pool_size:
                    self._add_thread()
        try:
            if message is not None:
                self._handle(*message)
        except Exception as error:
            # A thread that ended here would be missing among those that read.
            self._note(error)
        finally:
            with self._lock:
                self._num_idle += 1
        return True

    def _note(self, error: Exception) -> None:
        """Counts an error of this package; raises it if it repeats."""
        if self._defects.repeats(error, f"node {self._name!r}: the answer to a message"):
            raise error

    def _fail(self, error: Exception) -> None:
        if self._closed:
            return  # its socket may be gone
        self.error = error
        _log.error("node %r: its server failed", self._name, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)
        self.close()

    def _parse(self, frames: list[zmq.Frame]) -> tuple[bytes, int, int, memoryview, list[Any]] | None:
        """The client and the parts of its message, or None if the message is malformed.

        Runs before the next message is read: a probe behind a call must find the call open.
        """
        client = frames[0].bytes
        if client in self._ignored:
            return None
        try:
            kind, number, body, buffers = wire.parse(frames[1:])
            if kind not in (wire.CALL, wire.PROBE) or (kind == wire.PROBE and len(body) % 8):
                raise wire.MalformedMessage(f"message: got kind {kind}, expected CALL or PROBE.")
        except wire.MalformedMessage:
            self.malformed += 1
            self._ignored.add(client)
            return None
        if kind == wire.CALL:
            self.calls += 1
            self._open.add((client, number))
        return client, kind, number, body, buffers

    def _handle(self, client: bytes, kind: int, number: int, body: memoryview, buffers: list[Any]) -> None:
        if kind == wire.CALL:
            self._carry_out(client, number, body, buffers)
            return
        asked = struct.unpack(f"<{len(body) // 8}Q", body)
        unknown = [each for each in asked if (client, each) not in self._open]
        # The number of the probe comes back: the client may have sent calls after it.
        self._send(client, wire.UNKNOWN, number, struct.pack(f"<{len(unknown)}Q", *unknown))

    def _carry_out(self, client: bytes, number: int, body: memoryview, buffers: list[Any]) -> None:
        try:
            name, args, kwargs = wire.load(body, buffers)
            method = self._target.method(name)
            if isinstance(method, BatchedMethod):
                future = method.submit(args, kwargs)
                future.add_done_callback(lambda future: self._answer_later(client, number, future))
                return
        except BaseException as error:
            method, args, kwargs = _raise, (error,), {}
        self._answer(client, number, lambda: method(*args, **kwargs))

    def _answer_later(self, client: bytes, number: int, future: Future) -> None:
        try:
            self._answer(client, number, future.result)
        except Exception as error:  # the thread that settles the future would only log it
            if self._defects.repeats(error, f"node {self._name!r}: the answer of a batch"):
                self._fail(error)

    def _answer(self, client: bytes, number: int, get: Callable[[], Any]) -> None:
        try:
            try:
                kind, (data, buffers) = wire.REPLY, wire.encode(get())
            except BaseException as error:
                kind, (data, buffers) = wire.ERROR, wire.encode(wire.describe_error(without_exit(error)))
            self._send(client, kind, number, data, buffers)
        finally:
            with self._lock:
                # After the answer: a probe in between must not miss the call. If there is no answer, the next
                # probe tells the client that the call is lost.
                self._open.discard((client, number))
                self._answered.notify()

    def _send(self, client: bytes, kind: int, number: int, data: bytes, buffers: Sequence[Any] = ()) -> None:
        try:
            self._socket.send([client, wire.head(kind, number, len(buffers)) + data, *buffers])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the client has disconnected
                raise


def _raise(error: BaseException) -> None:
    raise error
