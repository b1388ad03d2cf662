"""The server's end of `launch.rpc.stream`: a thread for each connection, which carries its calls out."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from launch.batching import BatchedMethod
from launch.handles import Target
from launch.rpc import stream, wire

# Callers beyond this many are told so, and go the long way.
_MAX_CONNECTIONS = 1024
_HELLO_SECONDS = 5.0
# A thread that waits for its caller looks up every so often; nothing depends on it.
_LONG = 3600.0
# Of the memory that a connection keeps for its answers.
_KEPT_BYTES = 4 << 20


class Door:
    """Lets clients in that show the token, and answers their calls until closed.

    Args:
      target: whose methods are served.
      path: of the socket, in a directory of mode 0700.
      token: of the program.
      name: of the node, for threads.
      max_threads: calls that are carried out at once; further ones wait.
      max_frame_bytes: a larger frame ends its connection.
      enter: called first on every thread that carries out calls.

    Attributes:
      malformed: how many connections were ended because what they sent made no sense or was too large.
      refused: how many did not show the token.
      undeliverable: how many answers found their caller gone.
    """

    def __init__(
        self,
        target: Target,
        path: str,
        token: bytes,
        *,
        name: str,
        max_threads: int,
        max_frame_bytes: int,
        enter: Callable[[], None] | None,
    ) -> None:
        self.malformed = 0
        self.refused = 0
        self.undeliverable = 0
        self._target = target
        self._path = path
        self._token = token
        self._name = name
        self._limit = max_frame_bytes
        self._enter = enter
        self._turns: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(max_threads):
            self._turns.put(None)
        self._lock = threading.Lock()
        self._inside: dict[bytes, _Visitor] = {}
        self._coming = 0
        self._calls = 0  # of connections that have ended
        self._closed = False
        if os.path.exists(path):  # left by an earlier life of this node
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(path)
            self._listener.listen(128)
        except BaseException:
            self._listener.close()
            raise

    def start(self) -> None:
        threading.Thread(target=self._open, name=f"{self._name}-door", daemon=True).start()

    @property
    def calls(self) -> int:
        """How many calls were taken in."""
        with self._lock:
            return self._calls + sum(visitor.calls for visitor in self._inside.values())

    def has(self, name: bytes) -> bool:
        """Whether the connection ``name`` is here, so that what its client has sent will be answered."""
        return name in self._inside

    def close(self) -> None:
        """Ends all connections. Calls under way go on, but nobody gets their answer."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            inside = list(self._inside.values())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):  # wakes accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        for visitor in inside:
            visitor.stream.end()

    def _open(self) -> None:
        with self._listener:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    if self._closed:
                        return
                    # Out of file descriptors, say: what is here already is served on.
                    threading.Event().wait(0.1)
                    continue
                with self._lock:
                    full = self._coming >= _MAX_CONNECTIONS
                    self._coming += not full
                if full:
                    with sock, contextlib.suppress(OSError):  # its caller has gone
                        sock.send(stream.head(wire.LOST, 0, 0, ()))
                    continue
                threading.Thread(
                    target=self._visit, args=(sock,), name=f"{self._name}-caller", daemon=True
                ).start()

    def _visit(self, sock: socket.socket) -> None:
        visitor = name = None
        try:
            here = stream.Stream(sock, self._limit)
            here.set_timeout(_HELLO_SECONDS)
            name = stream.admit(sock, self._token)
            if name is None:
                self.refused += 1
                return
            visitor = _Visitor(here)
            with self._lock:
                if self._closed or name in self._inside:
                    return
                self._inside[name] = visitor
            here.set_timeout(_LONG)
            if self._enter is not None:
                self._enter()
            self._serve(visitor)
        except stream.Gone:
            return
        except wire.MalformedMessage:
            self.malformed += 1
        finally:
            with self._lock:
                self._coming -= 1
                if visitor is not None and name is not None and self._inside.get(name) is visitor:
                    del self._inside[name]
                    self._calls += visitor.calls
            sock.close()

    def _serve(self, visitor: _Visitor) -> None:
        receive = visitor.stream.receive
        while True:
            try:
                kind, number, data, buffers = receive()
            except stream.Silent:
                continue
            if kind != wire.CALL:
                raise wire.MalformedMessage(f"a message of kind {kind} to a server")
            visitor.calls += 1
            try:
                name, args, kwargs = wire.load(data, buffers)
                method = self._target.method(name)
            except Exception as error:
                self._answer(visitor, number, *wire.encode_error(error))
                continue
            del data, buffers
            if isinstance(method, BatchedMethod):
                future = method.submit(args, kwargs)
                future.add_done_callback(lambda f, n=number: self._answer_future(visitor, n, f))  # type: ignore[misc]
                continue
            self._turns.get()
            try:
                kind, (answer, frames) = wire.REPLY, wire.encode(method(*args, **kwargs))
            except BaseException as error:
                kind, answer, frames = wire.encode_error(error)
            finally:
                self._turns.put(None)
            del args, kwargs
            try:
                self._answer(visitor, number, kind, answer, frames)
            except stream.Gone:
                self.undeliverable += 1
                return

    def _answer(self, visitor: _Visitor, number: int, kind: int, data: bytes, buffers: list[Any]) -> None:
        self._finish(visitor, visitor.stream.send(kind, number, data, visitor.copied(buffers)))

    def _finish(self, visitor: _Visitor, left: list[memoryview]) -> None:
        while left:
            left = visitor.stream.send_rest(left)

    def _answer_future(self, visitor: _Visitor, number: int, future: Future) -> None:
        """On the thread that handled a batch, which must not wait for a caller that is slow to read."""
        error = future.exception()
        try:
            answer = (
                (wire.REPLY, *wire.encode(future.result())) if error is None else wire.encode_error(error)
            )
        except Exception as failure:  # the answer cannot be pickled
            answer = wire.encode_error(failure)
        try:
            frames = visitor.copied(answer[2])
            left = visitor.stream.send(answer[0], number, answer[1], frames, socket.MSG_DONTWAIT)
        except stream.Gone:
            self.undeliverable += 1
            return
        if left:
            threading.Thread(target=self._finish_slowly, args=(visitor, left), daemon=True).start()

    def _finish_slowly(self, visitor: _Visitor, left: list[memoryview]) -> None:
        try:
            self._finish(visitor, left)
        except stream.Gone:
            self.undeliverable += 1


class _Visitor:
    """A connection, and how many calls it has brought."""

    def __init__(self, here: stream.Stream) -> None:
        self.stream = here
        self.calls = 0
        self._copy = memoryview(b"")

    def copied(self, buffers: list[Any]) -> list[memoryview]:
        """The memory of the buffers as it is now: the object may change its arrays while they are sent.

        The copy is kept for the next answer, as fresh memory costs more than the copying.
        """
        if not buffers:
            return []
        raws = [buffer.raw() for buffer in buffers]
        size = sum(raw.nbytes for raw in raws)
        room = self._copy
        if room.nbytes < size:
            room = memoryview(bytearray(size))
            if size <= _KEPT_BYTES:
                self._copy = room
        parts, begin = [], 0
        for raw in raws:
            part = room[begin : begin + raw.nbytes]
            part[:] = raw
            parts.append(part)
            begin += raw.nbytes
        return parts
