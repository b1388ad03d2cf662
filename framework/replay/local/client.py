"""The client of tables in the same process: direct calls, no server.

```python
client = EmbeddedClient([Table(...)])
writer = client.batch_writer()
rows = writer.append("steps", {"x": np.zeros((256, 4), np.float32)})
writer.create_items("replay", {"x": writer.slice("steps", "x", rows)})
sample = client.sample_batch("replay", 32)
```
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from framework.replay.base import BaseClient, BaseSource
from framework.replay.checkpointers import CheckpointerBase, default_checkpointer
from framework.replay.contracts import Source
from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.rows.layout import Layout, gather
from framework.replay.rows.store import RowStore
from framework.replay.tables.delivery import Delivery
from framework.replay.tables.rate_limiters import SAMPLERS
from framework.replay.tables.table import Table
from framework.replay.types import ByName, Drawn, Out, TableInfo
from framework.replay.writer import BatchWriter
from framework.replay.writers import NewItems, Writers, joined
from launch.rpc import sockets

# The clients of the servers of this process, by address: their tables need no messages.
_served_here: weakref.WeakValueDictionary[str, LocalClient] = weakref.WeakValueDictionary()
# A forked child has copies of the tables, and the server keeps the originals.
os.register_at_fork(after_in_child=_served_here.clear)


_Client = TypeVar("_Client", bound="LocalClient")


class LocalClient(BaseClient):
    """Reads and writes tables of this process; see the module docstring.

    Args:
      tables: tables with different names, which no other client or server uses.
      concurrent: whether other threads use the tables too. If not, a call that would wait without an end is
        a `WouldBlockError`.
      store: where rows are kept; None creates one in this process's memory.
      checkpointer: where `checkpoint` writes, and from which the constructor restores the tables.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        concurrent: bool = True,
        store: RowStore | None = None,
        checkpointer: CheckpointerBase | None = None,
    ):
        if not tables:
            raise ValueError("tables: got none, expected at least one replay.Table.")
        names = [table.name for table in tables]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tables: got several named {name!r}, expected different names.")
        self.concurrent = concurrent
        self.store = store or RowStore()
        self.tables = ByName(zip(names, tables, strict=True))
        self.checkpointer = checkpointer
        self.writers = Writers()
        for table in tables:
            table.attach(self.store, concurrent, self.writers.show)
        self._interrupted = False
        self._writers: weakref.WeakSet[LocalWriter] = weakref.WeakSet()
        #: Where clients of other processes find these tables; set by `Server`.
        self.address: str | None = None
        #: The function that connects another process to these tables, and its arguments; set by `Server`.
        self.elsewhere: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        if checkpointer is not None:
            checkpointer.load(self.tables, self.store)

    def another(self: _Client) -> _Client:
        """Returns a client of the same tables with writers and an `interrupt` of its own."""
        client = object.__new__(type(self))
        client.__dict__.update(self.__dict__)
        client._interrupted = False
        client._writers = weakref.WeakSet()
        return client

    def __reduce__(self) -> Any:
        if self.elsewhere is None:
            raise TypeError(
                "EmbeddedClient: got a client of tables that are in this process only, expected one of a "
                "served table. Use replay.Server(tables)."
            )
        return self.elsewhere

    def __repr__(self) -> str:
        return f"replay.EmbeddedClient({sorted(self.tables)}, address={self.address!r})"

    def is_interrupted(self) -> bool:
        """Returns whether `interrupt` or `close` was called."""
        return self._interrupted

    def batch_writer(self, max_in_flight_items: int | None = None) -> LocalWriter:
        """Returns a writer for B envs; see `BatchWriter`."""
        self.writers.end_dropped()  # It shows none: a priority function may wait for the new one.
        writer = LocalWriter(self, max_in_flight_items)
        self.writers.add(writer)
        self._writers.add(writer)
        return writer

    def source(self) -> EmbeddedSource:
        """Returns the source that a `Dataset` draws from."""
        return EmbeddedSource(self)

    def _reader(self) -> contextlib.AbstractContextManager[Source]:
        if self._interrupted:
            raise ServerClosed("the client was interrupted or closed")
        return contextlib.nullcontext(EmbeddedSource(self))

    def _call_table(self, table: str, method: str, *arguments: Any) -> Any:
        return getattr(self.tables[table], method)(*arguments)

    def weight(self, table: str) -> tuple[float, int, int]:
        """Returns the sum of the sampler's weights, its number of items, and how many draws need not wait.

        The sum is the number of items if the sampler is not `Prioritized`.
        """
        return self.tables[table].weight()

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Returns a description of each table. Does not wait, whatever the `timeout`."""
        return {name: table.info for name, table in self.tables.items()}

    def checkpoint(self) -> str:
        """Writes a checkpoint, to a temporary directory if there is no checkpointer; returns its path."""
        if self.checkpointer is None:
            self.checkpointer = default_checkpointer()
        return self.checkpointer.save(self.tables, self.store)

    def interrupt(self) -> None:
        """Ends every waiting call of this client, and every later one that would wait."""
        self._interrupted = True
        for table in self.tables.values():
            table.waiting.wake()

    def close(self) -> None:
        """Closes this client and its writers, which insert what they can without waiting."""
        for writer in list(self._writers):
            writer.close(timeout=0)
        self.interrupt()


class EmbeddedSource(BaseSource):
    """What a `Dataset` draws from if the tables are in this process; see `contracts.Source`."""

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self._interrupted = False

    def draw(self, table: str, n: int, timeout: float | None, out: Out, pad: bool) -> Drawn:
        found = self._client.tables[table]
        delivery = found.sample(n, timeout, self._is_interrupted)
        try:
            return gather(table, delivery.info, delivery.parts, out, pad), (found, delivery)
        except BaseException:
            found.give_back(delivery)
            raise

    def release(self, drawn: tuple[Table, Delivery]) -> None:
        table, delivery = drawn
        table.release(delivery)

    def give_back(self, drawn: tuple[Table, Delivery]) -> None:
        table, delivery = drawn
        table.give_back(delivery)

    def can_sample(self, table: str, n: int) -> bool:
        return self._client.tables[table].can_sample(n)

    def interrupt(self) -> None:
        self._interrupted = True
        for table in self._client.tables.values():
            table.waiting.wake()

    def _is_interrupted(self) -> bool:
        return self._interrupted or self._client.is_interrupted()


class LocalWriter(BatchWriter):
    """Writes into the row store and the tables of an `LocalClient`. See `BatchWriter`.

    Items that a rate limiter refuses wait here, first in, first out. Rows are released only after the items
    that were created earlier, because those may refer to them. A writer that is dropped without `close` is
    ended when a table is read or another writer is made: its items go in as far as there is room, and its
    rows are released.
    """

    _held_back = 32

    def __init__(self, client: LocalClient, max_in_flight_items: int | None = None):
        super().__init__(
            client.store,
            max_in_flight_items,
            client.writers,
            lambda table, n: client.tables[table].can_insert(n),
        )
        self._tables = client.tables
        self._interrupted = client.is_interrupted
        self._held_back = min(self._held_back, self._max_in_flight)
        if not client.concurrent:
            self._max_in_flight = sys.maxsize  # no other thread could make room
        # (items created before, stream, rows)
        self._releases: collections.deque[tuple[int, str, np.ndarray]] = collections.deque()
        self._closed = False

    def _finish(self) -> int:
        dropped, self.num_pending = self.num_pending, 0
        self._items.clear()
        self._release_rows(self._created)
        self._release_all()
        return dropped

    def _check(self, table: str, layout: Layout, items: NewItems) -> Table:
        into = self._tables[table]
        into.check_items(layout, items)
        if len(items.keys) > 1 and not self._items:  # A batch goes straight in if no items wait before it.
            into.insert_now(items)
        if into.waiting.counts[SAMPLERS]:  # Nothing is held back from a reader that waits.
            self._filled = 1.0
        return into

    def _push(self) -> None:
        """Inserts the front of the queue as far as the rate limiters allow."""
        with self.lock:
            self._filled = 0.0
            if len(self._items) > 1:
                self._items = collections.deque(joined(self._items))
            while self._items:
                table, items = self._items[0]
                table.insert_now(items)
                if items.done < len(items.keys):
                    break
                self._items.popleft()
            # Counted again, because an interrupt may have come before the last count.
            self.num_pending = sum(len(items.keys) - items.done for _, items in self._items)
            if self._releases:
                self._release_rows(self._created - self.num_pending)

    def _free(self, stream: str, rows: np.ndarray) -> None:
        if self.num_pending:
            self._releases.append((self._created, stream, rows.copy()))
        else:
            self._store.streams[stream].release(rows)

    def _release_rows(self, done: int) -> None:
        """Releases the rows to which only the first `done` items may refer."""
        while self._releases and self._releases[0][0] <= done:
            _, stream, rows = self._releases.popleft()
            self._store.streams[stream].release(rows)

    def _wait(self, timeout: float | None, keep: int) -> None:
        if 0 < self.num_pending <= keep:  # those go in with others, or when a table is read
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._push()
            with self.lock:
                pending = self.num_pending
                if pending <= keep:
                    return
                table = self._items[0][0]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                table.wait_to_insert(left, self._interrupted)  # without the lock: a reader may need it
            except (DeadlineExceededError, WouldBlockError) as error:
                raise type(error)(f"{pending} items wait for room: {error}") from None


def serve_here(address: str, client: LocalClient | None) -> None:
    """Makes `client_here` find a client of the tables that are served at an address; None ends that."""
    if client is None:
        _served_here.pop(_key(address), None)
    else:
        _served_here[_key(address)] = client


def client_here(address: str) -> LocalClient | None:
    """Returns a new client of the tables that this process serves at an address; None if it serves none."""
    client = _served_here.get(_key(address))
    return None if client is None else client.another()


def _key(address: str) -> str:
    transport, _, rest = address.partition("://")
    if transport == "tcp":
        host, _, port = rest.rpartition(":")
        if sockets.is_loopback(host) or host in ("0.0.0.0", "*"):
            return f"tcp://loopback:{port}"
    return address
