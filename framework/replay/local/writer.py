"""The writer in the process of its tables."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from framework.replay.contracts import DEFAULT_MAX_IN_FLIGHT_ITEMS, Writer
from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.late import LateFlush
from framework.replay.local.rows import HeldRows
from framework.replay.rows.layout import LayoutBuilder, Slice
from framework.replay.rows.store import RowStore, Stream
from framework.replay.tables.items import NewItems
from framework.replay.tables.table import Table, Tables
from framework.types import Nest

# Queues and rows of writers that were dropped without `close`.
Dropped = collections.deque[tuple["ItemQueue", HeldRows]]

# Single items wait for others, because many go in for hardly more than one: until there are this many, until
# somebody reads, or for this many seconds.
_HELD_BACK = 32
_DELAY = 0.005


class LocalWriter(Writer):
    """Writes straight into the row store and the tables of this process. See `contracts.Writer`.

    A writer that is dropped without `close` is ended when a table is read or another writer is made: its
    rows are released, and its items go in as soon as there is room.
    """

    def __init__(
        self,
        tables: Tables,
        store: RowStore,
        max_in_flight_items: int | None = None,
        concurrent: bool = True,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        """Makes a writer.

        Args:
          tables: the tables by name.
          store: where rows are written.
          max_in_flight_items: items that may wait for room before `create_items` waits too; None for 512.
          concurrent: whether other threads use the tables. If not, nothing waits.
          interrupted: ends a wait with `ServerClosed` when it returns True.
        """
        if max_in_flight_items is not None and max_in_flight_items < 1:
            raise ValueError(f"max_in_flight_items: got {max_in_flight_items}, expected at least 1 or None.")
        self._tables = tables
        self._dropped = store.dropped_writers
        _end_dropped(self._dropped)
        self._max_in_flight = max_in_flight_items or DEFAULT_MAX_IN_FLIGHT_ITEMS
        self._concurrent = concurrent
        self._interrupted = interrupted
        self._builder = LayoutBuilder()
        self._rows = HeldRows(store)
        self._queue = ItemQueue(tables.values(), self._dropped)
        self._late = LateFlush(self)
        self._closed = False
        # Not ended at once: garbage may be collected by a thread that holds the locks of the tables.
        self._finalizer = weakref.finalize(self, self._dropped.append, (self._queue, self._rows))
        self._finalizer.atexit = False

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        return self._rows.slice(stream, column, rows, lengths)

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        self._check()
        return self._rows.append(stream, columns, rows)

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        self._check()
        into = self._tables[table]
        layout, index, lengths = self._builder.build(trajectory)
        if priorities is not None:
            priorities = np.array(priorities, np.float64)  # a copy: the items may wait
        if episodes is not None:
            episodes = np.array(episodes, np.uint64)
        items = into.new_items(layout, index, priorities, None, lengths, episodes)
        if len(index) and self._queue.put(into, items):
            if self._queue.untried >= min(_HELD_BACK, self._max_in_flight) or into.sampler_waits:
                self._queue.flush()
            elif self._concurrent:
                self._late.call_later(self._queue.flush, _DELAY)
            if self._concurrent and self._queue.num_pending > self._max_in_flight:
                self._wait(timeout, self._max_in_flight)
        return items.keys

    @property
    def num_pending(self) -> int:
        return self._queue.num_pending

    def release(self, stream: str, rows: Any) -> None:
        rows = np.asarray(rows, np.int64)
        self._queue.release(self._rows.let_go(stream, rows), rows)

    def can_insert(self, table: str, n: int = 1) -> bool:
        return self._tables[table].can_insert(n)

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        self._check()
        if not 0 < self.num_pending <= keep:  # those go in with others, or when a table is read
            self._wait(timeout, keep)

    def _wait(self, timeout: float | None, keep: int) -> None:
        """Waits until at most `keep` items are pending."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._queue.flush()
            table = self._queue.blocked_by()
            pending = self.num_pending
            if pending <= keep or table is None:
                return
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                table.wait_to_insert(left, self._interrupted)
            except (DeadlineExceededError, WouldBlockError) as error:
                raise type(error)(f"{pending} items wait for room: {error}") from None

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        self._late.call_later(method, delay)

    def before_read(self, function: Callable[[], object]) -> None:
        self._queue.before_read = function

    def close(self, timeout: float | None = None) -> int:
        if self._closed:
            return 0
        self._closed = True
        self._late.close()
        with contextlib.suppress(DeadlineExceededError, ServerClosed, WouldBlockError):
            self._wait(timeout, 0)
        dropped = self.num_pending
        self._finalizer.detach()
        self._queue.close()
        self._rows.close()
        return dropped

    def __enter__(self) -> LocalWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed:
            raise ServerClosed("the writer was closed")
        self._late.check()


class ItemQueue:
    """Items on their way into the tables, first in, first out; those that a limiter refuses wait here.

    Rows are released after the items that were created before: those may refer to them. Any thread may call.
    """

    def __init__(self, tables: Iterable[Table], dropped: Dropped):
        self.num_pending = 0
        # Items since the last attempt to insert.
        self.untried = 0
        self.before_read: Callable[[], object] | None = None
        self._items: collections.deque[tuple[Table, NewItems]] = collections.deque()
        self._created = 0
        # (items created before, stream, rows)
        self._releases: collections.deque[tuple[int, Stream, np.ndarray]] = collections.deque()
        self._lock = threading.RLock()  # writers lock before tables
        self._dropped = dropped
        self._ending = False
        self._tables = list(tables)
        for table in self._tables:
            table.add_drain(self.flush_before_read)

    def put(self, table: Table, items: NewItems) -> bool:
        """Adds items at the end; whether any wait. A batch goes straight in if nothing waits before it."""
        with self._lock:
            count = len(items.keys)
            done = table.insert_now(items) if count > 1 and not self._items else 0
            self._created += count
            if done == count:
                return False
            self._items.append((table, items.part(done, count)))
            self.num_pending += count - done
            self.untried += count - done
            return True

    def release(self, stream: Stream, rows: np.ndarray) -> None:
        """Releases rows to their stream once no item of this queue can refer to them."""
        with self._lock:
            if self.num_pending:
                self._releases.append((self._created, stream, rows))
            else:
                stream.release(rows)

    def flush(self) -> None:
        """Inserts the front of the queue as far as the limiters allow."""
        with self._lock:
            self.untried = 0
            while self._items and self._insert_front():
                pass
            done = self._created - self.num_pending
            while self._releases and self._releases[0][0] <= done:
                _, stream, rows = self._releases.popleft()
                stream.release(rows)
            if self._ending and not self._items:
                self.close()

    def flush_before_read(self) -> None:
        """`flush`, after the caller of the writer has handed over what it has staged."""
        if self._dropped:
            _end_dropped(self._dropped)
        function = self.before_read  # a copy: `close` may clear it in another thread
        if function is not None:
            function()
        if self._items:
            self.flush()

    def _insert_front(self) -> bool:
        """Inserts the items at the front that one call can take; whether all of them went in."""
        table, kind = self._items[0][0], self._items[0][1].kind()
        parts = []
        for into, items in self._items:
            if into is not table or items.kind() != kind:
                break
            parts.append(items)
        joined = NewItems.join(parts)
        count = table.insert_now(joined)
        for _ in parts:
            self._items.popleft()
        self.num_pending -= count
        if count == len(joined.keys):
            return True
        self._items.appendleft((table, joined.part(count, len(joined.keys))))
        return False

    def blocked_by(self) -> Table | None:
        """The table that the first item waits for; None if no item waits."""
        with self._lock:
            return self._items[0][0] if self._items else None

    def end(self) -> None:
        """Closes the queue as soon as it is empty; the tables keep it until then."""
        self._ending = True
        with contextlib.suppress(ServerClosed):
            self.flush()

    def close(self) -> None:
        """Drops what waits."""
        with self._lock:
            for table in self._tables:
                table.remove_drain(self.flush_before_read)
            self.before_read = None
            self._items.clear()
            self.num_pending = 0
            for _, stream, rows in self._releases:
                stream.release(rows)
            self._releases.clear()


def _end_dropped(dropped: Dropped) -> None:
    """Ends the queues of writers that were dropped without `close`."""
    while dropped:
        try:
            queue, rows = dropped.popleft()
        except IndexError:  # another thread was faster
            return
        for stream, held in rows.take_all():
            queue.release(stream, held)
        queue.end()
