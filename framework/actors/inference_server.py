"""A server that acts for the envs of several actors. It holds the policy, its parameters and recurrent
states.

The server runs a batch

- immediately, when `max_batch` rows wait, or all clients that connected or asked within `PATIENCE` seconds;
- `timeout` seconds after the first request, if at least `min_batch` rows wait;
- `PATIENCE` seconds after the first request in any case, so that a dead client does not block the others.

One step of the policy covers at most `max_batch` rows. A client with more rows takes several steps.

```text
time      0 ms          1 ms          2 ms
actor a   |request                    |request
actor b       |request
actor c                   |request
batches       .           |a b        |a c   all that are connected and not waiting for an environment
```

There are three transports, with the same interface to the client (see `framework.actors.inference_client`):

- *direct* (engine `serial`): a call acts for the caller's envs only, without a thread or a clock.
- *shared memory* (engine `processes`): observations and answers stay in the columns of `Slots`. One byte to
  the server's unix datagram socket announces a request, a short datagram announces its answer. Each
  connection has its own address, so datagrams of a restarted client's earlier process are never mistaken for
  new ones.
- *messages* (everywhere else): a call of the node's `act`, with the arrays in the message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from framework import core, specs
from framework.actors.inference_slots import Rows, Slots
from framework.nest import Structure
from framework.replay.shm import SharedMemory
from framework.types import Nest
from launch.batching import BatchedMethod, BatchOptions
from launch.errors import message_of

PATIENCE = 1.0  # Seconds that a request waits at most, regardless of min_batch.
REQUEST, GOODBYE, PING = b"\1", b"\0", b""  # Datagrams of clients. A ping only checks that the server lives.
ANSWER = struct.Struct("<q")  # The version. The text of an error may follow.
MAX_ANSWER = 8192  # Bytes.
_LONGEST_PATH = 100  # Characters in the path of the unix socket, without the suffix for a client.
_CLOSED = "the inference server was closed"


class Column(NamedTuple):
    """The location of a column for another process."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class InferenceConnection(NamedTuple):
    """The result of `InferenceServer.connect`.

    Attributes:
      rows: rows of the client.
      structures: structures of the observations, the actions and the extras; see `framework.nest`.
      columns: columns of observations, first, actions and extras, in this order; empty without shared memory.
      server_address: address of the server's socket; empty without shared memory.
      client_address: address of the client's socket; empty without shared memory.
    """

    rows: Rows
    structures: tuple[Structure, Structure, Structure]
    columns: tuple[Column, ...] = ()
    server_address: str = ""
    client_address: str = ""


@dataclasses.dataclass(eq=False)
class _Client:
    """One connection, through the socket at `address`, or by messages if `address` is None."""

    name: str
    rows: Rows
    address: str | None
    future: Future | None = None  # the answer to a message
    asked_at: float = dataclasses.field(default_factory=time.monotonic)  # or connected


class InferenceServer:
    """Batches requests for actions; see the module. Methods are thread-safe; one thread runs the batches.

    Args:
      policy: chooses the actions.
      spec: the `EnvironmentSpec` of one env.
      capacity: number of envs of all clients together.
      variables: a `VariableClient` of the policy's networks. With None, the parameters are never updated.
      updates: whether to request newer parameters after batches. If False, only `update_variables` does.
      min_batch: smallest number of rows in a batch once `timeout` has passed.
      max_batch: largest number of rows in one step of the policy. None means all.
      timeout: seconds that the first request of a batch waits for others.
      concurrent: whether to start a thread. If False, each call acts by itself.
      shared_memory: whether clients of other processes may use shared memory. If False, they use messages.
      on_batch: called after each batch with its number of rows, on the thread that ran it. An exception ends
        the server.
      on_failure: called with the exception that ended the server's thread. None raises it in that thread. In
        both cases, every request fails from then on.
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
        on_failure: Callable[[BaseException], None] | None = None,
    ):
        if min_batch < 1 or (max_batch is not None and max_batch < min_batch):
            raise ValueError(
                f"min_batch: got {min_batch} with max_batch {max_batch}, expected 1 to max_batch."
            )
        if timeout < 0:
            raise ValueError(f"timeout: got {timeout}, expected at least 0 seconds.")
        self._memory = SharedMemory() if shared_memory else None
        self._columns: list[Column] = []
        self.slots = Slots(policy, spec, capacity, self._allocate if shared_memory else None)
        self._variables, self._updates = variables, updates
        self._seconds = 0.0  # Spent acting since the last `take_seconds`.
        self._min_batch, self._max_batch = min_batch, max_batch or capacity
        self._timeout, self._concurrent = timeout, concurrent
        self._on_batch, self._on_failure = on_batch, on_failure
        self._acting = threading.Lock()  # Held while parameters are read or changed.
        self._lock = threading.Lock()  # Guards the clients and the requests.
        self._clients: dict[str, _Client] = {}
        self._addresses: dict[str, _Client] = {}
        self._connections = 0
        self._waiting: list[_Client] = []
        self._since = 0.0  # Time of the first of them.
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = self._closed = self._over = False
        self.act = _Submitted(self._submit)
        self.futures = types.SimpleNamespace(act=self._submit)  # as a client of the node has them
        # Clients use messages if there is no shared memory, or the socket's path is too long.
        path = None if self._memory is None else os.path.join(self._memory.directory, "inference")
        self._path = path if path is not None and len(os.fsencode(path)) <= _LONGEST_PATH else None
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
    ) -> InferenceConnection:
        """Assigns rows to client `name`, see `Slots.connect`. With `messages`, it uses no shared memory."""
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
        slots = self.slots
        structures = (slots.observations.structure, slots.actions.structure, slots.extras.structure)
        if self._path is None or address is None:
            return InferenceConnection(rows, structures)
        return InferenceConnection(rows, structures, tuple(self._columns), self._path, address)

    def disconnect(self, name: str) -> None:
        """Stops waiting for `name`. Its rows stay reserved for a new connection."""
        with self._lock:
            self._forget(name)
        self._wake()

    def update_variables(self) -> int:
        """Pulls newer parameters now, and returns the version of all later actions."""
        if self._variables is None:
            return -1
        with self._acting:
            self._variables.update(wait=True)
            return self._variables.version

    @property
    def version(self) -> int:
        """Version of the parameters; -1 without parameters."""
        return -1 if self._variables is None else self._variables.version

    def take_seconds(self) -> float:
        """Seconds spent acting since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def stop_waiting(self) -> None:
        """Answers all requests immediately from now on: other clients may have stopped."""
        self._stopping = True
        self._wake()

    def close(self) -> None:
        """Ends the thread and removes the shared memory."""
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
        """Queues a request by message; the future resolves to `(action, extras, version)`."""
        future: Future = Future()
        try:
            client = self._clients.get(name)
            if client is None:
                raise KeyError(f"client: got {name!r}, which is not connected. Call connect() first.")
            self.slots.write(client.rows, observation, first)
            client.future = future
            if self._concurrent:
                self._enqueue(client)
                self._wake()
            else:
                self._fire([client])
        except Exception as error:
            if future.done():  # `on_batch` failed after the answer, on this thread.
                raise
            future.set_exception(error)
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
            if self._on_failure is None:
                raise
            self._on_failure(error)  # Before the actors hear of it: theirs would be the first failures.
        finally:
            with self._lock:
                self._over = True
            for client in self._waiting:
                self._answer(client, self._error or RuntimeError(_CLOSED))
            self._socket.close()  # Clients notice it at their next request.

    def _take_requests(self) -> None:
        """Waits until a request arrives or a batch is due, then takes all requests that have arrived."""
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
        """Seconds until the next batch is due; None without a request."""
        if not self._waiting:
            return None
        rows = sum(client.rows.envs for client in self._waiting)
        limit = self._timeout if rows >= self._min_batch else PATIENCE
        return max(0.0, self._since + limit - time.monotonic())

    def _next_batch(self) -> list[_Client]:
        """The clients of the batch that is due; empty if none is due."""
        with self._lock:
            if not self._waiting:
                return []
            rows = sum(client.rows.envs for client in self._waiting)
            # A client that is silent for long may have died: it is not waited for.
            active = time.monotonic() - PATIENCE
            complete = self._stopping or not any(
                client.asked_at > active and client not in self._waiting for client in self._clients.values()
            )
            if rows < self._max_batch and not complete and (self._patience() or 0.0) > 0.0:
                return []
            batch: list[_Client] = []
            size = 0
            for client in self._waiting:  # In order of arrival.
                if batch and size + client.rows.envs > self._max_batch:
                    break
                batch.append(client)
                size += client.rows.envs
            del self._waiting[: len(batch)]
            return batch

    def _enqueue(self, client: _Client) -> None:
        """Adds the request of `client`; raises an error if the server is closed."""
        with self._lock:
            if self._over:
                raise self._error or RuntimeError(_CLOSED)
            client.asked_at = time.monotonic()
            if not self._waiting:
                self._since = client.asked_at
            self._waiting.append(client)

    def _fire(self, batch: list[_Client]) -> None:
        with self._acting:
            try:
                error_of_update, self._error = self._error, None
                if error_of_update is not None:
                    raise error_of_update
                start = time.perf_counter()
                counts = self.slots.act([client.rows for client in batch], self._max_batch)
                self._seconds += time.perf_counter() - start
            except Exception as error:
                for client in batch:
                    self._answer(client, error)
                return
            for client in batch:
                self._answer(client)
            if self._variables is not None and self._updates:  # After the answers: no client waits for it.
                try:
                    self._variables.update()
                except Exception as error:
                    self._error = error  # The next request raises it.
        if self._on_batch is not None:
            for count in counts:
                self._on_batch(count)

    def _answer(self, client: _Client, error: BaseException | None = None) -> None:
        """Sends the answer, which is in the client's rows, or the error."""
        if client.address is not None:
            text = b"" if error is None else f"{type(error).__name__}: {message_of(error)}".encode()
            try:
                self._socket.sendto((ANSWER.pack(self.version) + text)[:MAX_ANSWER], client.address)
            except OSError:  # The client's process has ended, or does not read.
                with self._lock:
                    if self._clients.get(client.name) is client:  # It may have connected again.
                        self._forget(client.name)
            return
        future, client.future = client.future, None
        if future is not None and future.set_running_or_notify_cancel():
            if error is None:
                future.set_result((*self.slots.read(client.rows), self.version))
            else:
                future.set_exception(error)

    def _forget(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is not None and client.address is not None:
            self._addresses.pop(client.address, None)
        if client in self._waiting:
            self._waiting.remove(client)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # Full (the thread wakes up anyway), or closed.
            self._waker.send(PING)

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        assert self._memory is not None
        array = self._memory.allocate("inference", name, shape, dtype)
        self._memory.reserve("inference", name, 0, max(1, array.nbytes))
        self._columns.append(Column(self._memory.path("inference", name), shape, np.dtype(dtype).str))
        return array


class _Submitted(BatchedMethod):
    """A served method that returns a future, so that no thread of the node waits for the answer."""

    def __init__(self, submit: Any):
        super().__init__(submit, "act", BatchOptions(batch_size=1, timeout=0.0))

    def submit(self, args: tuple, kwargs: dict[str, Any]) -> Future:
        return self._function(*args, **kwargs)
