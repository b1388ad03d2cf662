"""Acts for the envs of many actors: the policy, its parameters and every env's recurrent state are here.

A batch is fired

- at once, when `max_batch` rows wait, or all connected clients wait;
- `timeout` seconds after its first request, if `min_batch` rows wait;
- `PATIENCE` seconds after its first request in any case, so that a dead client does not stop the others.

No step of the policy is for more than `max_batch` rows: a client that has more is acted for in several.

```text
time      0 ms          1 ms          2 ms
actor a   |request                    |request
actor b       |request
actor c                   |request
batches       .           |a b        |a c   all that are connected and not waiting for an environment
```

Three ways to a client, the same for it (see `framework.actors.inference_client`):

- *direct* (engine `serial`): a call acts, for the caller's envs alone. No thread, no clock.
- *shared memory* (engine `processes`): observations and answers stay in the columns of `Slots`; one byte to
  the server's unix datagram socket says that a request is there, a short datagram that its answer is. Each
  connection has an address of its own, so what an earlier life of a client has sent is not mistaken for new.
- *messages* (everywhere else, and on request): a call of the node's `act`, arrays in the message.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from framework import core, specs
from framework.actors.inference_slots import Rows, Slots
from framework.types import Nest
from launch.batching import BatchedMethod

PATIENCE = 1.0  # seconds that a request waits at most, whatever min_batch says
REQUEST, GOODBYE, PING = b"\1", b"\0", b""  # what clients send; a ping only finds out if the server lives
ANSWER = struct.Struct("<q")  # version; the text of an error may follow
MAX_ANSWER = 8192  # bytes
_LONGEST_PATH = 100  # of a unix socket, less what is put behind it for a client
_CLOSED = "the inference server was closed"


class Column(NamedTuple):
    """Where another process finds a column."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class Connection(NamedTuple):
    """What a client is told when it connects.

    Attributes:
      rows: of the client.
      action_nest, extras_nest: the structures, with the numbers of leaves at the leaves.
      columns: observations, first, actions, extras in this order; None where there is no shared memory.
      server_address, client_address: of the sockets on both sides; None where there is no shared memory.
    """

    rows: Rows
    action_nest: Nest
    extras_nest: Nest
    columns: tuple[Column, ...] | None = None
    server_address: str | None = None
    client_address: str | None = None


class _Client:
    """One connection: by the socket at `address`, or by messages (None)."""

    def __init__(self, name: str, rows: Rows, address: str | None):
        self.name, self.rows, self.address = name, rows, address
        self.future: Future | None = None


class InferenceServer:
    """See the module. Methods may be called from any thread; the batches are made on one.

    Args:
      policy: acts; its parameters are what `variables` keeps fresh.
      spec: the `EnvironmentSpec` of one env.
      capacity: envs of all clients together.
      variables: a `VariableClient` of the policy's networks; None leaves them alone.
      updates: ask for newer parameters after batches; False only in `update_variables`.
      min_batch: rows that are worth a batch once `timeout` has passed.
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
                f"min_batch: got {min_batch} with max_batch {max_batch}, expected 1 to max_batch."
            )
        if timeout < 0:
            raise ValueError(f"timeout: got {timeout}, expected at least 0 seconds.")
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
        self._acting = threading.Lock()  # held while parameters are read or changed
        self._lock = threading.Lock()  # of the clients and of those that wait
        self._clients: dict[str, _Client] = {}
        self._addresses: dict[str, _Client] = {}
        self._connections = 0
        self._waiting: list[_Client] = []
        self._since = 0.0  # when the first of them came
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = self._closed = self._over = False
        self.act = _Submitted(self._submit)
        self._path = self._find_path()
        if self._path is None:
            self._socket, self._waker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        else:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self._path)  # in a directory of mode 0700
            self._waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._waker.connect(self._path)
        self._waker.setblocking(False)

    # What clients call.

    def connect(
        self, name: str, envs: int, offset: int = 0, total: int | None = None, messages: bool = False
    ) -> Connection:
        """Gives client `name` its rows, see `Slots.connect`; with `messages`, no shared memory."""
        with self._acting:
            rows = self.slots.connect(name, envs, offset, total)
        shared = self._path is not None and not messages
        with self._lock:
            self._forget(name)
            self._connections += 1
            address = f"{self._path}.{self._connections}" if shared else None
            client = self._clients[name] = _Client(name, rows, address)
            if address is not None:
                self._addresses[address] = client
            if self._concurrent and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
                self._thread.start()
        connection = Connection(rows, self.slots.action_nest, self.slots.extras_nest)
        if not shared:
            return connection
        assert self._columns is not None
        return connection._replace(
            columns=tuple(self._columns), server_address=self._path, client_address=address
        )

    def disconnect(self, name: str) -> None:
        """Stops waiting for `name`; its rows stay its own, should it come back."""
        with self._lock:
            self._forget(name)
        self._wake()

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
        self._wake()

    def close(self) -> None:
        """Ends the thread and takes the shared memory away."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._socket.close()
        self._waker.close()
        if self._memory is not None:
            self._memory.close()

    def _submit(self, name: str, observation: Nest, first: np.ndarray) -> Future:
        """A request by message; the future gives `(action, extras, version)`."""
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
        elif self._enqueue(client):
            self._wake()
        else:
            self._answer_error(client, self._error or RuntimeError(_CLOSED))
        return future

    # What the thread does.

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take_requests()
                while batch := self._next_batch():
                    self._fire(batch)
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._lock:
                self._over = True
            for client in self._waiting:
                self._answer_error(client, self._error or RuntimeError(_CLOSED))
            self._socket.close()  # clients notice it at their next request

    def _take_requests(self) -> None:
        """Waits until a request comes or a batch is due, then takes all requests that have come."""
        try:
            self._socket.settimeout(self._patience())
            while True:
                data, address = self._socket.recvfrom(16)
                self._socket.settimeout(0.0)
                client = self._addresses.get(address) if data else None
                if client is not None and data == REQUEST:
                    self._enqueue(client)
                elif client is not None:
                    self.disconnect(client.name)
        except (TimeoutError, BlockingIOError):
            self._socket.settimeout(0.0)

    def _patience(self) -> float | None:
        """Seconds that the thread may sleep; None until something comes."""
        if not self._waiting:
            return None
        rows = sum(client.rows.envs for client in self._waiting)
        limit = self._timeout if rows >= self._min_batch else PATIENCE
        return max(0.0, self._since + limit - time.monotonic())

    def _next_batch(self) -> list[_Client]:
        """The clients to act for now; none if it pays to wait."""
        with self._lock:
            if not self._waiting:
                return []
            rows = sum(client.rows.envs for client in self._waiting)
            complete = len(self._waiting) >= len(self._clients) or self._stopping
            if rows < self._max_batch and not complete and (self._patience() or 0.0) > 0.0:
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

    def _enqueue(self, client: _Client) -> bool:
        """Has `client` acted for in a coming batch; False if there will be none."""
        with self._lock:
            if self._over:
                return False
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(client)
            return True

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
            if self._variables is not None and self._updates:  # after the answers: no client waits for this
                try:
                    self._variables.update()
                except Exception as error:
                    self._error = error  # for whoever asks next
        if self._on_batch is not None:
            for count in counts:
                self._on_batch(count)

    def _answer(self, client: _Client, version: int) -> None:
        if client.address is not None:
            self._send(client, client.address, ANSWER.pack(version))
        elif client.future is not None:
            future, client.future = client.future, None
            if future.set_running_or_notify_cancel():
                future.set_result((*self.slots.read(client.rows), version))

    def _answer_error(self, client: _Client, error: BaseException) -> None:
        if client.address is not None:
            text = f"{type(error).__name__}: {error}".encode()
            self._send(client, client.address, (ANSWER.pack(self.version) + text)[:MAX_ANSWER])
        elif client.future is not None:
            future, client.future = client.future, None
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _send(self, client: _Client, address: str, answer: bytes) -> None:
        try:
            self._socket.sendto(answer, address)
        except OSError:  # its process has gone, or does not read
            with self._lock:
                if self._clients.get(client.name) is client:  # it may be back by now
                    self._forget(client.name)

    def _forget(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is not None and client.address is not None:
            self._addresses.pop(client.address, None)
        if client in self._waiting:
            self._waiting.remove(client)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes up anyway; or closed
            self._waker.send(PING)

    def _find_path(self) -> str | None:
        """Of the server's socket; None where there is no shared memory, or no short enough path."""
        if self._memory is None:
            return None
        path = os.path.join(self._memory.directory, "inference")
        return path if len(os.fsencode(path)) <= _LONGEST_PATH else None  # messages work everywhere

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
