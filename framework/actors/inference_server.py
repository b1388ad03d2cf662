"""Acts for the envs of many actors: the policy, its parameters and every env's recurrent state are here.

A batch is fired

- at once, when ``max_batch`` rows wait, or all clients that are connected do (nobody else could come);
- ``timeout`` seconds after its first request, if ``min_batch`` rows wait;
- after ``PATIENCE`` seconds whatever waits, so that a client that died holds nobody up for good.

No step of the policy is for more than ``max_batch`` rows: a client that has more is acted for in several.

::

    time      0 ms          1 ms          2 ms
    actor a   |request                    |request
    actor b       |request
    actor c                   |request
    batches       .           |a b        |a c   all that are connected and not waiting for an environment

Three ways to a client, the same for it (see `framework.actors.inference_client`):

- *direct* (engine ``serial``): a call acts, for the caller's envs alone. No thread, no clock.
- *shared memory* (engine ``processes``): observations and answers stay in the columns of `Slots`; one byte
  through a private unix socket says that a request is there, a short message that its answer is. A closed
  socket is a dead peer.
- *messages* (everywhere else, and on request): a call of the node's `act`, arrays in the message.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from framework import core, specs
from framework.actors.inference_slots import Rows, Slots
from framework.types import Nest
from launch.batching import BatchedMethod

PATIENCE = 1.0  # seconds that a request waits at most, whatever min_batch says
ANSWER = struct.Struct("<Iq")  # bytes of an error message that follow (0: all is well), version
_LONGEST_PATH = 107  # of a unix socket
MAX_ERROR = 8000  # bytes of an error's text
_CLOSED = "the inference server was closed"


class Column(NamedTuple):
    """Where another process finds a column."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class Connection(NamedTuple):
    """What a client is told when it connects.

    ``columns`` are observations, first, actions, extras in this order; None where there is no shared memory.
    """

    begin: int
    end: int
    action_nest: Nest
    extras_nest: Nest
    socket: str | None
    columns: tuple[Column, ...] | None


class _Client:
    """One client that is connected: by a socket, or by messages (``socket`` is None)."""

    def __init__(self, name: str, rows: Rows):
        self.name = name
        self.rows = rows
        self.socket: socket.socket | None = None
        self.future: Future | None = None


class InferenceServer:
    """See the module. Methods may be called from any thread; the batches are made on one.

    Args:
      policy: acts; its parameters are what ``variables`` keeps fresh.
      spec: the ``EnvironmentSpec`` of one env.
      capacity: envs of all clients together.
      variables: a ``VariableClient`` of the policy's networks; None leaves them alone.
      updates: ask for newer parameters after batches; False only in `update_variables`.
      min_batch: rows that are worth a batch once ``timeout`` has passed.
      max_batch: rows that are a full batch, the most that one step of the policy is for; None is all.
      timeout: seconds that the first request of a batch waits for others.
      concurrent: False makes no thread: each call acts by itself.
      shared_memory: where clients of other processes meet the columns: True, or False for messages only.
      on_batch: called after each batch with the number of its rows, on the thread that made it.
    """

    def __init__(
        self,
        policy: core.Policy,
        spec: specs.EnvironmentSpec,
        capacity: int,
        *,
        variables: Any = None,
        updates: bool = True,
        min_batch: int = 1,
        max_batch: int | None = None,
        timeout: float = 0.001,
        concurrent: bool = True,
        shared_memory: bool = False,
        on_batch: Any = None,
    ):
        if min_batch < 1 or (max_batch is not None and max_batch < min_batch):
            raise ValueError(
                f"min_batch is {min_batch} and max_batch {max_batch}; expected 1 <= min_batch <= max_batch."
            )
        if timeout < 0:
            raise ValueError(f"timeout is {timeout}; expected seconds >= 0.")
        self._memory: Any = None
        self._columns: list[Column] | None = None
        allocate = None
        if shared_memory:
            from framework.replay.shm import SharedMemory

            self._memory = SharedMemory()
            self._columns = []
            allocate = self._allocate
        self.slots = Slots(policy, spec, capacity, allocate)
        self._variables, self._updates = variables, updates
        self._seconds = 0.0  # spent acting, since the last look
        self._min_batch, self._max_batch = min_batch, max_batch or capacity
        self._timeout, self._concurrent, self._on_batch = timeout, concurrent, on_batch
        self._clients: dict[str, _Client] = {}
        self._waiting: list[_Client] = []  # only the thread that makes batches touches it
        self._since = 0.0  # when the first of them came
        self._acting = threading.Lock()  # held while parameters are read or changed
        self._lock = threading.Lock()  # of what other threads hand to the thread that makes batches
        self._handed_over: deque[_Client] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = self._closed = self._over = False
        self.act = _Submitted(self._submit)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listener, self._path = self._listen()

    # What clients call.

    def connect(
        self, name: str, envs: int, offset: int = 0, total: int | None = None, messages: bool = False
    ) -> Connection:
        """Gives client ``name`` its rows, see `Slots.connect`; with ``messages``, no shared memory."""
        with self._acting:
            rows = self.slots.connect(name, envs, offset, total)
        shared = self._path is not None and not messages
        with self._lock:
            self._clients[name] = _Client(name, rows)
            if self._concurrent and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
                self._thread.start()
        return Connection(
            rows.begin,
            rows.end,
            self.slots.action_nest,
            self.slots.extras_nest,
            self._path if shared else None,
            tuple(self._columns) if shared and self._columns is not None else None,
        )

    def disconnect(self, name: str) -> None:
        """Nobody waits for ``name`` any more."""
        with self._lock:
            self._clients.pop(name, None)
        self._notify()

    def update_variables(self) -> int:
        """Asks the variable source now, and returns the version that is acted with from here on."""
        if self._variables is None:
            return -1
        with self._acting:
            self._variables.update(wait=True)
            return self._variables.version

    @property
    def version(self) -> int:
        """Of the parameters; -1 if there are none."""
        return -1 if self._variables is None else self._variables.version

    def take_seconds(self) -> float:
        """Seconds spent acting since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def stop_waiting(self) -> None:
        """From now on whatever waits is answered at once: others may have gone."""
        self._stopping = True
        self._notify()

    def close(self) -> None:
        """Ends the thread and takes the shared memory away."""
        if self._closed:
            return
        self._closed = True
        self._notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for client in list(self._clients.values()):
            if client.socket is not None:
                client.socket.close()
        if self._listener is not None:
            self._listener.close()
        for key in list(self._selector.get_map().values()):
            if key.data is None and isinstance(key.fileobj, socket.socket):  # also who has not said a name
                key.fileobj.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        if self._memory is not None:
            self._memory.close()

    def _submit(self, name: str, observation: Nest, first: np.ndarray) -> Future:
        """A request by message; the future gives ``(action, extras, version)``."""
        future: Future = Future()
        client = self._clients.get(name)
        if client is None:
            future.set_exception(KeyError(f"client {name!r} is not connected; call connect() first"))
            return future
        try:
            self.slots.write(client.rows, observation, first)
        except Exception as error:
            future.set_exception(error)
            return future
        client.future = future
        if not self._concurrent:
            self._fire([client])
        else:
            with self._lock:
                over = self._over
                if not over:
                    self._handed_over.append(client)
            if over:
                self._answer_error(client, self._error or RuntimeError(_CLOSED))
            else:
                self._notify()
        return future

    # What the thread does.

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.data is None:
                        self._greet(key.fileobj)
                    else:
                        self._receive(key.data, key.fileobj)
                with self._lock:
                    while self._handed_over:
                        self._enqueue(self._handed_over.popleft())
                while batch := self._next_batch():
                    self._fire(batch)
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._lock:
                self._over = True
                waiting = [*self._waiting, *self._handed_over]
                self._waiting, self._handed_over = [], deque()
            for client in waiting:
                self._answer_error(client, self._error or RuntimeError(_CLOSED))
            # Nobody reads their requests any more.
            for client in list(self._clients.values()):
                self._hang_up(client)

    def _patience(self) -> float | None:
        """Seconds that the thread may sleep; None until something comes."""
        if not self._waiting:
            return None
        rows = sum(client.rows.envs for client in self._waiting)
        limit = self._timeout if rows >= self._min_batch else PATIENCE
        return max(0.0, self._since + limit - time.monotonic())

    def _next_batch(self) -> list[_Client]:
        """The clients to act for now; none if it pays to wait."""
        if not self._waiting:
            return []
        rows = sum(client.rows.envs for client in self._waiting)
        everybody = len(self._waiting) >= len(self._clients) or self._stopping
        if rows < self._max_batch and not everybody and (self._patience() or 0.0) > 0.0:
            return []
        batch: list[_Client] = []
        size = 0
        for client in self._waiting:  # the first to come are the first to be served
            if batch and size + client.rows.envs > self._max_batch:
                break
            batch.append(client)
            size += client.rows.envs
        del self._waiting[: len(batch)]
        return batch

    def _enqueue(self, client: _Client) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(client)

    def _fire(self, batch: list[_Client]) -> None:
        with self._acting:
            try:
                if self._error is not None:
                    raise self._error
                start = time.perf_counter()
                counts = self.slots.act([client.rows for client in batch], self._max_batch)
                self._seconds += time.perf_counter() - start
            except Exception as error:
                for client in batch:
                    self._answer_error(client, error)
                return
            version = self.version
            for client in batch:
                self._answer(client, version)
            if self._variables is not None and self._updates:  # after the answers: nobody waits for this
                try:
                    self._variables.update()
                except Exception as error:
                    self._error = error  # for whoever asks next
        if self._on_batch is not None:
            for count in counts:
                self._on_batch(count)

    def _answer(self, client: _Client, version: int) -> None:
        if client.future is not None:
            future, client.future = client.future, None
            if future.set_running_or_notify_cancel():
                future.set_result((*self.slots.read(client.rows), version))
        elif client.socket is not None:
            self._send(client, ANSWER.pack(0, version))

    def _answer_error(self, client: _Client, error: BaseException) -> None:
        if client.future is not None:
            future, client.future = client.future, None
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        elif client.socket is not None:
            text = f"{type(error).__name__}: {error}".encode()[:MAX_ERROR]
            self._send(client, ANSWER.pack(len(text), self.version) + text)

    def _send(self, client: _Client, message: bytes) -> None:
        assert client.socket is not None
        try:
            client.socket.sendall(message)
        except OSError:
            self._drop(client)

    # Sockets.

    def _listen(self) -> tuple[socket.socket | None, str | None]:
        if self._memory is None:
            return None, None
        path = os.path.join(self._memory.directory, "inference")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            return None, None  # messages work everywhere
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)  # in a directory of mode 0700
        listener.listen(128)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener, path

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        connection.settimeout(1.0)  # a client that does not read 12 bytes has hung
        # Its name comes at once, or when its process has been given the time: nobody is held up for it.
        self._selector.register(connection, selectors.EVENT_READ, None)

    def _greet(self, connection: Any) -> None:
        """Reads the name, the first that a client says."""
        self._selector.unregister(connection)
        try:
            name = connection.recv(1024).decode(errors="replace")
        except OSError:
            name = ""
        with self._lock:
            client = self._clients.get(name)
            if client is not None and client.socket is not None:  # an actor that was restarted
                former, client = client, _Client(name, client.rows)
                self._clients[name] = client
                self._hang_up(former)
            if client is not None:
                client.socket = connection
        if client is None:
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._send(client, ANSWER.pack(0, self.version))

    def _receive(self, client: _Client, connection: Any) -> None:
        if client.socket is None or client.socket is not connection:  # dropped since the thread woke up
            return
        try:
            data = connection.recv(16)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
        else:
            self._enqueue(client)

    def _drop(self, client: _Client) -> None:
        """Forgets a client that has gone; its rows stay its own, should it come back."""
        self._hang_up(client)
        with self._lock:  # it may be back by now, as another client of this name
            if self._clients.get(client.name) is client:
                del self._clients[client.name]

    def _hang_up(self, client: _Client) -> None:
        if client.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(client.socket)
            client.socket.close()
            client.socket = None
        if client in self._waiting:
            self._waiting.remove(client)

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake up anyway
            self._wake.send(b"\0")

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        assert self._memory is not None and self._columns is not None
        array = self._memory.allocate("inference", name, shape, dtype)
        self._memory.reserve("inference", name, 0, max(1, array.nbytes))
        self._columns.append(Column(self._memory.path("inference", name), shape, np.dtype(dtype).str))
        return array


class _Submitted(BatchedMethod):
    """A served method whose answer comes later: no thread of the node waits for it."""

    def __init__(self, submit: Any):
        super().__init__(submit, "act", 1, 0.0, False, 1)

    def submit(self, args: tuple, kwargs: dict[str, Any]) -> Future:
        return self._function(*args, **kwargs)
