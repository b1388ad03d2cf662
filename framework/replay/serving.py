"""The replay server: tables that clients of this process, this machine and other machines share.

```python
server = Server([Table(...)], port=8000)
client = server.localhost_client()            # in this process: direct calls
client = Client("localhost:8000")             # the same; from another process through shared memory
server.stop()
```
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

import launch
from framework.replay import addresses
from framework.replay.client import Client, EmbeddedClient, ServedClient
from framework.replay.errors import ServerClosed
from framework.replay.local.client import serve_here
from framework.replay.rows.store import RowStore
from framework.replay.server.limits import Limits
from framework.replay.server.operations import Operations
from framework.replay.server.service import Service
from framework.replay.shm import SharedMemory
from framework.replay.tables.table import Table
from launch.rpc import sockets

# Messages of one client that wait in ZeroMQ's queues: those that have arrived, however large they are, and
# small answers.
_MAX_ARRIVED, _MAX_ANSWERS = 2, 1000


class Server:
    """Serves tables until `stop`, from a thread of its own.

    Args:
      tables: tables with different names; a table belongs to one server.
      port: of this machine; None takes a free one. Without keys, only this user's processes reach it: see
        `framework.replay.addresses`. With keys, it is a TCP port of 127.0.0.1.
      checkpointer: where `Client.checkpoint` writes, and from which the constructor restores the tables
        before clients may connect.
      address: where to serve instead of `port`: `ipc://<path in a 0700 directory>` or `tcp://interface:port`.
      curve: keys that clients must have; required for `tcp://`.
      embedded: whether to use no sockets and no shared memory, for clients of this process only.
      concurrent: with `embedded`, whether more than one thread uses the tables.
      max_bytes: memory, in bytes, that the rows of all tables together may take; None for no limit but the
        machine's.
      compress: patterns of columns whose rows are kept compressed; see `RowStore`. Other processes then get
        and send arrays in messages, as from another machine, because they cannot read compressed rows in
        place.
      limits: what the clients may use of the memory; None for the defaults of `Limits`.
      on_failure: called with the error that ended the server's thread, on that thread.

    Raises:
      ValueError: There are no tables, two have the same name, or the address is of TCP and there are no keys.
      OSError: The port is taken.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        port: int | None = None,
        checkpointer: Any = None,
        *,
        address: str | None = None,
        curve: sockets.CurveKeys | None = None,
        embedded: bool = False,
        concurrent: bool = True,
        max_bytes: int | None = None,
        compress: Sequence[str] = (),
        limits: Limits | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        if port is not None and address is not None:
            raise ValueError(f"got port={port} and address={address!r}; expected one of them")
        if embedded and (port is not None or address is not None):
            raise ValueError("embedded: an embedded server has no port and no address")
        self.address: str | None = None
        self.port: int | None = None
        self._service: Service | None = None
        self._on_failure = on_failure
        self._limits = limits or Limits()
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._stop_lock = threading.Lock()
        memory = None if embedded else SharedMemory()
        self._store = RowStore(max_bytes=max_bytes, allocator=memory, compress=compress)
        try:
            self._client = EmbeddedClient(tables, concurrent or not embedded, self._store, checkpointer)
            self.tables = dict(self._client.tables)
            if memory is not None:
                place: Any = contextlib.nullcontext(address or f"tcp://127.0.0.1:{port or '*'}")
                with addresses.claim(port) if address is None and curve is None else place as claimed:
                    self._serve(memory, claimed, curve)
        except BaseException:
            self._store.close()
            raise

    def _serve(self, memory: SharedMemory, address: str, curve: sockets.CurveKeys | None) -> None:
        operations = Operations(self._client.tables, self._store, memory, self._client.checkpoint)
        try:
            listener = sockets.make_server_socket(
                address,
                curve,
                max_frame_bytes=self._limits.max_message_bytes,
                max_unread_messages=_MAX_ARRIVED,
                max_unsent_messages=_MAX_ANSWERS,
            )
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot serve replay at {address}: {error.strerror}") from error
        self.address = sockets.bound_address(listener)
        self.port = addresses.port_of(self.address)
        self._service = Service(operations, listener, self._on_failure, self._limits)
        operations.wake = self._service.wake
        operations.has_room = self._service.has_room
        for table in self.tables.values():
            table.waiting.listeners.append(self._service.wake)
        self._service.thread.start()
        self._client.address = self.address
        self._client.elsewhere = functools.partial(Client, curve=curve), (self.address,)
        serve_here(self.address, self._client)

    @property
    def messages(self) -> int:
        """Number of messages received from other processes; the table of nodes shows their rate."""
        return 0 if self._service is None else self._service.messages

    def localhost_client(self) -> EmbeddedClient:
        """A client in this process: direct calls."""
        self._check()
        return self._client.another()

    def stop(self) -> None:
        """Ends the server. Every call that waits for it, in any process, raises `ServerClosed` at once."""
        with self._stop_lock:
            if self._stopped.is_set():
                return
            for table in self.tables.values():
                table.waiting.close()
            if self._service is not None:
                self._service.stop()
                serve_here(self.address or "", None)
            self._client.close()
            self._store.close()
            self._stopped.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server is stopped; returns whether it is. `KeyboardInterrupt` ends the wait.

        Raises:
          ServerClosed: the server's thread has failed.
        """
        service = self._service
        if service is None:
            return self._stopped.wait(timeout)
        service.thread.join(timeout)
        self._check()
        return not service.thread.is_alive()

    def _check(self) -> None:
        if self._service is not None and self._service.error is not None:
            raise ServerClosed(f"the replay server failed: {self._service.error!r}") from self._service.error

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def __del__(self) -> None:
        # In a forked child this object is a copy without the server's thread.
        if hasattr(self, "_client") and self._pid == os.getpid():
            self.stop()

    def __repr__(self) -> str:
        return f"replay.Server({sorted(self.tables)}, address={self.address!r})"


def serve_node(tables: Sequence[Table], **options: Any) -> Server:
    """Starts the server of a `launch.ReplayNode`: the node fails with the server."""
    return Server(tables, on_failure=launch.make_failure_handler(), **options)


def connect_node(
    server_or_address: Any, curve: sockets.CurveKeys | None = None
) -> EmbeddedClient | ServedClient:
    """Creates a client for a handle of a node. A stop of the program interrupts it."""
    here = isinstance(server_or_address, Server)
    client: EmbeddedClient | ServedClient = (
        server_or_address.localhost_client() if here else Client(server_or_address, curve=curve)
    )
    launch.register_stop_handler(client.interrupt)
    return client
