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

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from framework.replay.checkpointers import CheckpointerBase, default_checkpointer
from framework.replay.contracts import Client, Source
from framework.replay.errors import ServerClosed
from framework.replay.local.writer import LocalWriter
from framework.replay.reverb_api.client import ReverbApi
from framework.replay.rows.store import RowStore
from framework.replay.tables.items import Delivery
from framework.replay.tables.table import Table, Tables
from framework.replay.types import PaddedSample, ReplaySample, TableInfo
from launch.rpc import sockets

# The clients of the servers of this process, by address: their tables need no messages.
_served_here: weakref.WeakValueDictionary[str, EmbeddedClient] = weakref.WeakValueDictionary()


class EmbeddedClient(ReverbApi, Client):
    """See the module.

    Args:
      tables: of different names, not used by another client or server.
      concurrent: whether other threads use the tables too. If not, a call that would wait without an end is
        a `WouldBlockError`.
      store: where rows live; a new one in plain memory if None.
      checkpointer: what `checkpoint` writes to, and what the tables are restored from now.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        concurrent: bool = True,
        store: RowStore | None = None,
        checkpointer: CheckpointerBase | None = None,
    ):
        if not tables:
            raise ValueError("tables: got none, expected at least one replay.Table")
        names = [table.name for table in tables]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tables: got several named {name!r}, expected different names")
        self.concurrent = concurrent
        self.store = store or RowStore()
        self.tables = Tables(zip(names, tables, strict=True))
        self.checkpointer = checkpointer
        for table in tables:
            table.attach(self.store, concurrent)
        self._interrupted = False
        self._writers: weakref.WeakSet[LocalWriter] = weakref.WeakSet()
        #: Where clients of other processes find these tables; set by `Server`.
        self.address: str | None = None
        #: The function that connects another process to these tables, and its arguments; set by `Server`.
        self.elsewhere: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        if checkpointer is not None:
            checkpointer.load(self.tables, self.store)

    def table(self, name: str) -> Table:
        """The table; RuntimeError as in Reverb if there is none of that name."""
        return self.tables[name]

    def another(self) -> EmbeddedClient:
        """A client of the same tables with writers and an `interrupt` of its own."""
        client = object.__new__(type(self))
        client.__dict__.update(self.__dict__)
        client._interrupted = False
        client._writers = weakref.WeakSet()
        return client

    def __reduce__(self) -> Any:
        if self.elsewhere is None:
            raise TypeError(
                "this client's tables are in this process only; a client that travels needs a served one: "
                "replay.Server(tables)"
            )
        return self.elsewhere

    def __repr__(self) -> str:
        return f"replay.EmbeddedClient({sorted(self.tables)}, address={self.address!r})"

    def is_interrupted(self) -> bool:
        """Whether `interrupt` or `close` was called."""
        return self._interrupted

    def batch_writer(self, max_in_flight_items: int | None = None) -> LocalWriter:
        """A writer for B envs; see `contracts.Writer` and `LocalWriter`."""
        writer = LocalWriter(
            self.tables, self.store, max_in_flight_items, self.concurrent, self.is_interrupted
        )
        self._writers.add(writer)
        return writer

    def source(self) -> EmbeddedSource:
        """What a `Dataset` draws from."""
        return EmbeddedSource(self)

    def sample_batch(
        self,
        table: str,
        batch_size: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
    ) -> ReplaySample | PaddedSample:
        """`batch_size` samples stacked: `SampleInfo` of arrays `[N]` and the nest that was written,
        `[N, ...]`.

        Args:
          timeout: seconds; None waits without a limit and 0 not at all. `DeadlineExceededError` when it is
            over: nothing was sampled.
          out: arrays for the leaves in the order of the flattened nest.
          pad: items of different lengths come as a `PaddedSample`; without it they are a ValueError.
        """
        if self._interrupted:
            raise ServerClosed("the client was interrupted or closed")
        return self.tables[table].sample_batch(batch_size, timeout, out, pad, self.is_interrupted)

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets priorities float64 `[N]` of the items `keys` uint64 `[N]`; keys that are gone are
        ignored."""
        self.tables[table].mutate(keys, priorities)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Sequence[int] | None = None,
    ) -> None:
        """Deletes items, then sets priorities; all or nothing."""
        updates = updates or {}
        self.tables[table].mutate(
            list(updates.keys()), list(updates.values()), [] if deletes is None else deletes
        )

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Whether `n` samples could be had now without waiting."""
        return self.tables[table].can_sample(n)

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether `n` items could be inserted now without waiting."""
        return self.tables[table].can_insert(n)

    def weight(self, table: str) -> tuple[float, int]:
        """The sum of the sampler's weights (the number of items if it is not `Prioritized`), and the number
        of items that it can choose from."""
        return self.tables[table].weight()

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""
        self.tables[table].reset()

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """What is to be known of each table. It never waits here, so `timeout` does not matter."""
        return {name: table.info for name, table in self.tables.items()}

    def checkpoint(self) -> str:
        """Writes a checkpoint with the server's checkpointer, by default to a temporary directory; its
        path."""
        if self.checkpointer is None:
            self.checkpointer = default_checkpointer()
        return self.checkpointer.save(self.tables, self.store)

    def interrupt(self) -> None:
        """Every call of this client that waits, and every later one that could, ends with
        `ServerClosed`."""
        self._interrupted = True
        for table in self.tables.values():
            table.wake()

    def close(self) -> None:
        """Ends this client; what its writers hold back is inserted as far as that goes without waiting."""
        for writer in list(self._writers):
            writer.close(timeout=0)
        self.interrupt()


class EmbeddedSource(Source):
    """What a `Dataset` draws from if the tables are in this process; see `contracts.Source`."""

    def __init__(self, client: EmbeddedClient) -> None:
        self._client = client
        self._interrupted = False

    def draw(
        self, table: str, n: int, timeout: float | None, out: list[Any] | None, pad: bool
    ) -> tuple[ReplaySample | PaddedSample, Drawn]:
        found = self._client.tables[table]
        delivery = found.sample(n, timeout, self._is_interrupted)
        try:
            return delivery.gather(out, pad), Drawn(found, delivery)
        except BaseException:
            found.give_back(delivery)
            raise

    def release(self, drawn: Drawn) -> None:
        drawn.table.release(drawn.delivery)

    def give_back(self, drawn: Drawn) -> None:
        drawn.table.give_back(drawn.delivery)

    def can_sample(self, table: str, n: int) -> bool:
        return self._client.tables[table].can_sample(n)

    def interrupt(self) -> None:
        self._interrupted = True
        for table in self._client.tables.values():
            table.wake()

    def close(self) -> None:
        return

    def _is_interrupted(self) -> bool:
        return self._interrupted or self._client.is_interrupted()


class Drawn(NamedTuple):
    """A batch that a source has drawn."""

    table: Table
    delivery: Delivery


def serve_here(address: str, client: EmbeddedClient | None) -> None:
    """Makes `client_here` find a client of the tables that are served at an address; None ends that."""
    if client is None:
        _served_here.pop(_key(address), None)
    else:
        _served_here[_key(address)] = client


def client_here(address: str) -> EmbeddedClient | None:
    """A new client of the tables that this process serves at an address; None if it serves none there."""
    client = _served_here.get(_key(address))
    return None if client is None else client.another()


def _key(address: str) -> str:
    transport, _, rest = address.partition("://")
    if transport == "tcp":
        host, _, port = rest.rpartition(":")
        if sockets.is_loopback(host) or host in ("0.0.0.0", "*"):
            return f"tcp://loopback:{port}"
    return address
