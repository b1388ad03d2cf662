"""The writer in the process of its tables."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
import weakref
from collections.abc import Callable

import numpy as np

from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import RowStore
from framework.replay.tables.items import NewItems
from framework.replay.tables.table import Table, Tables
from framework.replay.writer import BaseWriter

# Single items wait for others, because many go in for hardly more than one: until there are this many, until
# a table is read, or for this many seconds.
_HELD_BACK = 32
_DELAY = 0.005


class LocalWriter(BaseWriter):
    """Writes straight into the row store and the tables of this process. See `contracts.Writer`.

    Items go in first in, first out; those that a rate limiter refuses wait here. Rows are released after the
    items that were created before, which may refer to them. A writer that is dropped without `close` is ended
    when a table is read or another writer is made: its rows are released, and its items go in as soon as
    there is room.

    Args:
      tables: the tables by name.
      store: where rows are written.
      max_in_flight_items: items that may wait for room before `create_items` waits too; None for 512.
      concurrent: whether other threads use the tables. If not, nothing waits.
      interrupted: ends a wait with `ServerClosed` when it returns True.
    """

    def __init__(
        self,
        tables: Tables,
        store: RowStore,
        max_in_flight_items: int | None = None,
        concurrent: bool = True,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        super().__init__(store, max_in_flight_items, store.dropped_writers)
        store.end_dropped_writers()
        self._tables = tables
        self._concurrent = concurrent
        self._interrupted = interrupted
        self._held_back = min(_HELD_BACK, self._max_in_flight)
        if not concurrent:
            self._max_in_flight = sys.maxsize
        self._items: collections.deque[tuple[Table, NewItems]] = collections.deque()
        self._untried = 0  # items since the last attempt to insert
        self._created = 0
        # (items created before, stream, rows)
        self._releases: collections.deque[tuple[int, str, np.ndarray]] = collections.deque()
        self._reference = weakref.ref(self)
        for table in tables.values():
            table.add_writer(self._reference)
        self._closed = False

    def can_insert(self, table: str, n: int = 1) -> bool:
        return self._tables[table].can_insert(n)

    def show(self) -> None:
        """Inserts all that was staged and created so far, as far as there is room.

        Tables call it before they are read, in any thread.
        """
        if self._before_read is not None:
            self._before_read()
        if self._items:
            self._insert()

    def close(self, timeout: float | None = None) -> int:
        if self._closed:
            return 0
        with contextlib.suppress(DeadlineExceededError, ServerClosed, WouldBlockError):
            self._wait(timeout, 0)
        with self._lock:
            self._closed = True
            self._late.close()
            self._before_read = None
            dropped, self.num_pending = self.num_pending, 0
            self._items.clear()
            self._release_rows(self._created)
            self._release_all()
        for table in self._tables.values():
            table.remove_writer(self._reference)
        return dropped

    def end(self) -> bool:
        """Closes a writer that was dropped once its items are in their tables; whether it is closed."""
        with contextlib.suppress(ServerClosed):
            self.show()
            with self._lock:
                self._release_all()
            if self._items:
                return False
        self.close(timeout=0)
        return True

    def _put(
        self,
        table: str,
        layout: Layout,
        index: np.ndarray,
        lengths: np.ndarray | None,
        priorities: np.ndarray | None,
        episodes: np.ndarray | None,
    ) -> np.ndarray:
        into = self._tables[table]
        items = into.new_items(layout, index, priorities, None, lengths, episodes)
        count = len(index)
        # A batch goes straight in if no items wait before it.
        done = into.insert_now(items) if count > 1 and not self._items else 0
        self._created += count
        if done < count:
            self._items.append((into, items.part(done, count)))
            self.num_pending += count - done
            self._untried += count - done
            if self._untried >= self._held_back or into.sampler_waits:
                self._insert()
            elif self._concurrent:
                self._late.call_later(self._insert, _DELAY)
        return items.keys

    def _insert(self) -> None:
        """Inserts the front of the queue as far as the rate limiters allow."""
        with self._lock:
            self._untried = 0
            while self._items and self._insert_front():
                pass
            self._release_rows(self._created - self.num_pending)

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

    def _free(self, stream: str, rows: np.ndarray) -> None:
        if self.num_pending:
            self._releases.append((self._created, stream, rows))
        else:
            super()._free(stream, rows)

    def _release_rows(self, done: int) -> None:
        """Releases the rows to which none but the first `done` items may refer."""
        while self._releases and self._releases[0][0] <= done:
            _, stream, rows = self._releases.popleft()
            super()._free(stream, rows)

    def _wait(self, timeout: float | None, keep: int) -> None:
        if 0 < self.num_pending <= keep:  # those go in with others, or when a table is read
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._insert()
            with self._lock:
                pending = self.num_pending
                if pending <= keep:
                    return
                table = self._items[0][0]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                table.wait_to_insert(left, self._interrupted)  # without the lock: a reader may need it
            except (DeadlineExceededError, WouldBlockError) as error:
                raise type(error)(f"{pending} items wait for room: {error}") from None
