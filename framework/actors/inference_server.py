"""A server that acts for the envs of several actors. It holds the policy, its parameters and recurrent
states.

The server runs a batch

- immediately, when `max_batch` rows wait, or all clients that connected or asked within `PATIENCE_S`;
- `timeout` seconds after the first request.

One step of the policy covers at most `max_batch` rows. A client with more rows takes several steps.

```text
time      0 ms          1 ms          2 ms
actor a   |request                    |request
actor b       |request
actor c                   |request
batches       .           |a b        |a c   all that are connected and not waiting for an environment
```

A request is a call of the node's `act`, with the arrays in the message; actors on the server's machine have a
shorter way, see `framework.actors.inference_lines`. On the engine `serial`, a call acts for the caller's envs
only, without a thread or a clock.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from framework import core, specs
from framework.actors.inference_lines import DirectLines, InferenceConnection, answer
from framework.actors.inference_slots import Rows, Slots, private
from framework.replay.shm import SharedMemory
from framework.types import Nest
from launch.batching import BatchedMethod, BatchOptions

_BLOCK = "inference", "rows"  # Name of the block in shared memory.
PATIENCE_S = 1.0  # A client that is silent for longer may have died: no batch waits for it.


@dataclasses.dataclass(eq=False)
class _Client:
    """One connection, and where its open request is answered: by a future, or on a line."""

    name: str
    rows: Rows
    open: bool = False
    future: Future | None = None
    line: socket.socket | None = None
    asked_at: float = dataclasses.field(default_factory=time.monotonic)  # or connected


class InferenceServer:
    """Batches requests for actions; see the module. Methods are thread-safe; one thread runs the batches.

    Args:
      policy: chooses the actions.
      spec: the `EnvironmentSpec` of one env.
      capacity: number of envs of all clients together.
      variables: a `VariableClient` of the policy's networks. With None, the parameters are never updated.
      updates: whether to request newer parameters after batches. If False, only `update_variables` does.
      max_batch: largest number of rows in one step of the policy. None means all.
      timeout: seconds that the first request of a batch waits for others.
      concurrent: whether to start a thread. If False, each call acts by itself.
      shared_memory: whether actors on this machine may use shared memory. If False, all call the node.
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
        max_batch: int | None = None,
        timeout: float = 0.001,
        concurrent: bool = True,
        shared_memory: bool = False,
        on_batch: Any = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ):
        if timeout < 0:
            raise ValueError(f"timeout: got {timeout}, expected at least 0 seconds.")
        self._memory = SharedMemory() if shared_memory else None
        self.slots = Slots(policy, spec, capacity, self._allocate)
        self._variables, self._updates = variables, updates
        self._seconds = 0.0  # Spent acting since the last `take_seconds`.
        self._max_batch = max_batch or capacity
        self._timeout = timeout
        self._on_batch, self._on_failure = on_batch, on_failure
        self._acting = threading.Lock()  # Held while parameters are read or changed.
        self._lock = threading.Lock()  # Guards the clients and the requests.
        self._clients: dict[int, _Client] = {}  # By the numbers of their connections.
        self._waiting: list[_Client] = []  # In order of arrival.
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = self._closed = False
        self._lines = DirectLines(self._request, self._lose, self._memory) if concurrent else None
        self.act = _Submitted(self._submit)
        self.futures = types.SimpleNamespace(act=self._submit)  # as a client of the node has them

    # What clients call.

    def connect(self, name: str, envs: int, offset: int = 0, total: int | None = None) -> InferenceConnection:
        """Assigns rows to client `name`, see `Slots.connect`."""
        with self._acting:
            rows = self.slots.connect(name, envs, offset, total)
        number = secrets.randbits(63)  # Random, so that it means nothing to a server that was restarted.
        with self._lock:
            self._forget(name)
            self._clients[number] = _Client(name, rows)
            if self._lines is not None and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(self._lines,), name="inference", daemon=True
                )
                self._thread.start()
        connection = InferenceConnection(number, rows, self.slots.capacity, self.slots.examples)
        if self._memory is None:
            return connection
        folder = None if self._lines is None else self._lines.folder
        return connection._replace(folder=folder, block=self._memory.path(*_BLOCK))

    def disconnect(self, name: str) -> None:
        """Stops waiting for `name`. Its rows stay reserved for a new connection."""
        with self._lock:
            self._forget(name)
        self._wake()

    def _forget(self, name: str | None = None, line: socket.socket | None = None) -> None:
        """Forgets the client with this name or line."""
        for number, client in list(self._clients.items()):
            if client.name == name or (line is not None and client.line is line):
                del self._clients[number]
                if client in self._waiting:
                    self._waiting.remove(client)
                    self._answer(
                        client, RuntimeError(f"client {client.name!r} has disconnected, or connected again")
                    )

    def _lose(self, line: socket.socket) -> None:
        with self._lock:
            self._forget(line=line)

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
        with self._lock:
            self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        elif self._lines is not None:
            self._lines.close()
        if self._memory is not None:
            self._memory.close()

    def _submit(self, number: int, observation: Nest, first: np.ndarray) -> Future:
        """Queues the request of a connection; the future resolves to `(action, extras, version)`."""
        future: Future = Future()
        try:
            client = self._find(number)
            self.slots.write(client.rows, observation, first)
            self._queue(client, future=future)
            if self._lines is None:
                self._fire(self._take_batch())
            else:
                self._lines.wake()
        except Exception as error:
            if future.done():  # `on_batch` failed after the answer, on this thread.
                raise
            future.set_exception(error)
        return future

    def _request(self, number: int, line: socket.socket) -> None:
        """Queues a request from a line, whose client has written its rows."""
        try:
            self._queue(self._find(number), line=line)
        except Exception as error:
            answer(line, self.version, error)

    def _wake(self) -> None:
        if self._lines is not None:
            self._lines.wake()

    def _find(self, number: int) -> _Client:
        client = self._clients.get(number)
        if client is None:
            raise RuntimeError(
                "inference server: got a request of a client that is not connected, or connected again. If "
                "the node was restarted, give its actors restarts, too: they connect again."
            )
        if client.open:
            raise RuntimeError(f"client {client.name!r}: got a request before the answer to its last one")
        return client

    def _queue(
        self, client: _Client, future: Future | None = None, line: socket.socket | None = None
    ) -> None:
        with self._lock:
            if self._closed:
                raise self._error or RuntimeError("the inference server was closed")
            client.open, client.future, client.line, client.asked_at = True, future, line, time.monotonic()
            self._waiting.append(client)

    # What the thread does.

    def _run(self, lines: DirectLines) -> None:
        try:
            while batch := self._next_batch(lines):
                self._fire(batch)
        except BaseException as error:
            self._error = error
            if self._on_failure is None:
                raise
            self._on_failure(error)  # Report first, or the actors' errors pass for the cause.
        finally:
            with self._lock:
                self._closed = True
            for client in self._waiting:
                self._answer(client, self._error or RuntimeError("the inference server was closed"))
            lines.close()

    def _next_batch(self, lines: DirectLines) -> list[_Client]:
        """Waits for the next batch; returns its clients, or none once the server is closed."""
        while not self._closed:
            left = None
            with self._lock:
                if self._waiting:
                    left = self._due_at() - time.monotonic()
                    if left <= 0:
                        return self._take_batch()
            lines.wait(left)
        return []

    def _take_batch(self) -> list[_Client]:
        size = count = 0
        for client in self._waiting:
            size += client.rows.envs
            if count and size > self._max_batch:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _due_at(self) -> float:
        """When the next batch runs: in the past if no further request can join, or none is waited for."""
        if self._stopping or sum(client.rows.envs for client in self._waiting) >= self._max_batch:
            return 0.0
        others = [each.asked_at for each in self._clients.values() if each not in self._waiting]
        silent_at = max(others, default=float("-inf")) + PATIENCE_S
        return min(self._waiting[0].asked_at + self._timeout, silent_at)

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
        """Answers with what is in the client's rows, or with the error."""
        if not client.open:
            return
        client.open = False
        if client.line is not None:
            answer(client.line, self.version, error)
        elif client.future is not None and client.future.set_running_or_notify_cancel():
            if error is None:
                client.future.set_result((*self.slots.read(client.rows), self.version))
            else:
                client.future.set_exception(error)

    def _allocate(self, size: int) -> np.ndarray:
        if self._memory is None:
            return private(size)
        block = self._memory.allocate(*_BLOCK, (size,), np.dtype(np.uint8))
        self._memory.reserve(*_BLOCK, 0, size)
        return block


class _Submitted(BatchedMethod):
    """A served method that returns a future, so that no thread of the node waits for the answer."""

    def __init__(self, submit: Any):
        super().__init__(submit, "act", BatchOptions(batch_size=1, timeout=0.0))

    def submit(self, args: tuple, kwargs: dict[str, Any]) -> Future:
        return self._function(*args, **kwargs)
