"""Calls of an inference server by actors on its machine: through shared memory and a unix socket.

A call of a node passes four threads of `launch.rpc`. Here the actor's thread and the server's thread have one
socket between them, and the arrays stay in the rows of `Slots`:

```text
actor's thread    | writes its rows | request ─▶ |        …          | ◀─ answer | reads its rows
server's thread                      |   wait ◀───| policy of the batch |───▶
```

Socket and rows are in a folder of mode 0700, so that only processes of this user can reach them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import selectors
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

import launch
from framework.actors.inference_slots import Rows, SlotBlock
from framework.replay.shm import SharedMemory, attach
from framework.types import Nest
from launch.rpc.wire import describe_error, rebuild_error

_ALL = slice(None)
_REQUEST = struct.Struct("<q")  # Number of the connection.
_ANSWER = struct.Struct("<qI")  # Version of the parameters, and bytes of the error that follows.
_SEND_S = 1.0  # Limit of the send of an error, which may need more room, to an actor, which waits for it.


class InferenceError(RuntimeError):
    """The inference server does not answer."""


class InferenceConnection(NamedTuple):
    """What `InferenceServer.connect` returns.

    Attributes:
      number: number of the connection.
      rows: the client's rows.
      capacity: number of all rows.
      examples: observation, action and extras of one env, leaves `[1, ...]`.
      folder: the folder of the server's socket and of `block`; None without shared memory.
      block: file of the rows.
    """

    number: int
    rows: Rows
    capacity: int
    examples: tuple[Nest, Nest, Nest]
    folder: str | None = None
    block: str = ""


class DirectLine:
    """The actor's end. It is used as the future of its open request, of which there is at most one.

    Args:
      connection: what the server returned.
      name: name of the client.
      timeout: seconds without an answer after which a request fails, and the line is of no use.

    Raises:
      OSError: Socket or rows cannot be reached, as from another machine.
    """

    def __init__(self, connection: InferenceConnection, name: str, timeout: float):
        assert connection.folder is not None
        rows = connection.rows.slice
        block = SlotBlock(
            connection.examples, connection.capacity, lambda size: attach(connection.block, (size,), np.uint8)
        )
        self._observation, self._action, self._extras = (
            each.part(rows) for each in (block.observation, block.action, block.extras)
        )
        self._first = block.first[rows]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(os.path.join(connection.folder, "socket"))
        except OSError:
            self._socket.close()
            raise
        self._name, self._request = name, _REQUEST.pack(connection.number)

    def act(self, number: int, observation: Nest, first: np.ndarray) -> DirectLine:
        """Sends a request of the connection, whose number the line knows."""
        self._observation.write(_ALL, observation, len(first))
        self._first[:] = first
        with self._connected():
            self._socket.sendall(self._request)
        return self

    def result(self, timeout: float) -> tuple[Nest, Nest, int]:
        """Waits for `(action, extras, version)`, as long as the line does. Extras are views."""
        with self._connected():
            version, size = _ANSWER.unpack(self._receive(_ANSWER.size))
            failure = self._receive(size) if size else b""
        if failure:
            raise rebuild_error(pickle.loads(failure), "inference")
        # Environments may keep actions. The adder takes the extras before the next request.
        return self._action.read(_ALL, copies=True), self._extras.read(_ALL), version

    def done(self) -> bool:
        """True: an error of `result` is the server's, or says that there is no answer."""
        return True

    def close(self) -> None:
        self._socket.close()

    def _receive(self, size: int) -> bytes:
        data = self._socket.recv(size)
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise no_answer(self._name, self._socket.gettimeout()) from None
        except (OSError, EOFError):
            if launch.stop_event().is_set():
                raise launch.ProgramStopped("the inference server was stopped") from None
            raise InferenceError(
                f"inference server of {self._name!r}: it was closed, because its node failed or was "
                "restarted. Use restarts={'actor': n}, so that actors connect again."
            ) from None


def no_answer(name: str, timeout: float | None) -> InferenceError:
    """Returns the error of a server that is silent."""
    return InferenceError(
        f"inference server: got no answer for {name!r} within {timeout} s. Check that its node is alive and "
        "that its batches are not too slow."
    )


class DirectLines:
    """The server's ends, and its wait for them. One thread calls `wait`; `wake` is for all threads.

    Args:
      request: called with `(number, socket)` of a request: the connection's number, and where to answer.
      lose: called with the socket of an actor that is gone.
      memory: the folder of the socket. None, or one whose path is too long for a socket, offers no lines.

    Attributes:
      folder: the folder; None without lines.
    """

    def __init__(
        self,
        request: Callable[[int, socket.socket], None],
        lose: Callable[[socket.socket], None],
        memory: SharedMemory | None = None,
    ):
        self._request, self._lose = request, lose
        self._selector = selectors.DefaultSelector()
        woken, self._waker = socket.socketpair()
        for end in (woken, self._waker):
            end.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, functools.partial(woken.recv, 4096))
        self.folder = None
        if memory is None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.path.join(memory.directory, "socket"))
        except OSError:
            listener.close()
            return
        listener.listen(128)
        self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._accept, listener))
        self.folder = memory.directory

    def wait(self, timeout: float | None) -> None:
        """Takes all requests that are there; waits for the first, for `wake`, or for `timeout` seconds."""
        for key, _ in self._selector.select(timeout):
            key.data()

    def wake(self) -> None:
        """Ends the `wait` of now, or the next one."""
        with contextlib.suppress(OSError):  # It is full, so that the thread wakes up anyway, or closed.
            self._waker.send(b"\0")

    def close(self) -> None:
        """Closes all lines."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._waker.close()

    def _accept(self, listener: socket.socket) -> None:
        line, _ = listener.accept()
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, functools.partial(self._take, line))

    def _take(self, line: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = line.recv(_REQUEST.size)  # Whole, because eight bytes are not divided.
        if data:
            self._request(_REQUEST.unpack(data)[0], line)
        else:
            self._selector.unregister(line)
            line.close()
            self._lose(line)


def answer(line: socket.socket, version: int, error: BaseException | None) -> None:
    """Sends the answer to an actor's request; its actions are in its rows."""
    failure = b"" if error is None else pickle.dumps(describe_error(error))
    # One answer at a time always has room, so an error says that the actor is gone, which `wait` notices.
    with contextlib.suppress(OSError):
        if failure:
            line.settimeout(_SEND_S)
        line.sendall(_ANSWER.pack(version, len(failure)) + failure)
