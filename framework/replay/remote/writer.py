"""The writer of a client in another process than the server.

What the user calls rows are numbers of this writer's own; the server's rows, leased in blocks, stand behind
them. So a writer survives its server: after a restart it leases new rows, copies into them what it still
holds (a mapping of shared memory outlives the server that made it), and sends again what was not
acknowledged, in order and under the same sequence numbers, which the server uses to take nothing twice.

Local writers copy straight into shared memory; remote ones keep a copy of what they hold and send it with
the items.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from framework.replay.contracts import DEFAULT_MAX_IN_FLIGHT_ITEMS
from framework.replay.errors import DeadlineExceededError, ReverbError, ServerClosed
from framework.replay.late import LateFlush
from framework.replay.remote.connection import Connection
from framework.replay.remote.mapping import Mirror
from framework.replay.remote.writer_rows import WriterRows
from framework.replay.remote.writer_session import WriterSession
from framework.replay.rows.layout import LayoutBuilder, Slice
from framework.replay.tables.items import make_keys
from framework.types import Nest

_SEND_ITEMS = 64  # so many small items make one message
_SEND_RELEASES = 4096
_DELAY = 0.005  # seconds for which the first of them waits for the others


class ServedWriter(WriterSession):
    """See `contracts.Writer`.

    Args:
      connection: the writer's own.
      mirror: returns the view of the server's memory that fits the connection's session.
      local: whether to write into shared memory if that is possible.
      max_in_flight_items: items that were created and not acknowledged; ``create_items`` waits while there
        are more.
      closed: called when the writer is closed.
    """

    def __init__(
        self,
        connection: Connection,
        mirror: Callable[[Connection], Mirror],
        local: bool,
        max_in_flight_items: int | None = None,
        closed: Callable[[ServedWriter], None] = lambda writer: None,
    ) -> None:
        if max_in_flight_items is not None and max_in_flight_items < 1:
            raise ValueError(f"max_in_flight_items: got {max_in_flight_items}, expected at least 1 or None")
        super().__init__(connection, mirror, local)
        self._max_in_flight = max_in_flight_items or DEFAULT_MAX_IN_FLIGHT_ITEMS
        self._when_closed = closed
        self._builder = LayoutBuilder()
        self._closed = False
        self._lock = threading.RLock()
        self._late = LateFlush(self)
        self._before_read: Callable[[], object] | None = None

    # What the user calls.

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        if type(rows) is not np.ndarray or rows.dtype != np.int64:
            rows = np.asarray(rows, np.int64)
        return Slice(stream, column, rows, None if lengths is None else np.asarray(lengths))

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        with self._lock:
            self._check()
            if not columns:
                raise ValueError(f"stream {stream!r}: got no columns, expected at least one")
            return self._in_session(lambda: self._append(stream, columns, rows))

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        with self._lock:
            keys = self._create(table, trajectory, priorities, episodes)
            if self._in_flight > self._max_in_flight:
                self._send_pending()
                self._wait_or_ask(lambda: self._in_flight <= self._max_in_flight, timeout)
                self._check()
            return keys

    @property
    def num_pending(self) -> int:
        """Items that were created and are not known to be in their table."""
        return self._in_flight

    def _create(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any,
        episodes: np.ndarray | None,
    ) -> np.ndarray:
        self._check()
        self._in_session(lambda: None)
        tables = self._connection.welcome["tables"]
        if table not in tables:
            raise ValueError(f"table {table!r} was not found; the server has {tables}")
        layout, index, lengths = self._builder.build(trajectory)
        n = len(index)
        if priorities is not None:
            priorities = np.asarray(priorities, np.float64)
            if priorities.shape != (n,):
                raise ValueError(f"priorities: got shape {priorities.shape}, expected ({n},)")
            if n and not (priorities.min() >= 0 and priorities.max() < np.inf):
                raise ValueError(f"priorities: got {priorities[:3].tolist()}…, expected finite numbers >= 0")
            priorities = priorities.copy()
        at = 0
        for group in layout.groups:
            if group.stream not in self._streams:
                raise ValueError(f"stream {group.stream!r}: got rows of a stream that was never appended to")
            self._streams[group.stream].check(index[:, at : at + group.length])
            at += group.length
        keys = make_keys(n)
        if episodes is not None:
            episodes = np.asarray(episodes, np.uint64)
        self._pending.items.append((table, layout, index, lengths, keys, priorities, episodes))
        self._pending.num_items += n
        self._in_flight += n
        if self._pending.num_items >= _SEND_ITEMS:
            self._send_pending()
        else:
            self._late.call_later(self._send_late, _DELAY)
        return keys

    def _send_late(self) -> None:
        """Sends single items that no other item has followed up soon."""
        with self._lock:
            if self._pending.items and not self._closed:
                self._send_pending()

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        self._late.call_later(method, delay)

    def before_read(self, function: Callable[[], object]) -> None:
        self._before_read = function

    def release(self, stream: str, rows: Any) -> None:
        with self._lock:
            rows = np.asarray(rows, np.int64).ravel()
            self._streams[stream].give_up(rows)
            self._pending.released.append((stream, rows))
            self._pending.num_released += len(rows)
            if self._pending.num_released >= _SEND_RELEASES and not self._closed:
                self._send_pending()

    def can_insert(self, table: str, n: int = 1) -> bool:
        with self._lock:
            self._check()
            if self._in_flight:
                self.settle()
            if self._in_flight:
                return False
            answer = self._request({"op": "can_insert", "table": table, "n": n})
            return bool(answer["value"])

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        """Waits until at most ``keep`` items are not in their tables."""
        with self._lock:
            self._check()
            self._send_pending()
            self._wait_or_ask(lambda: not self._unacknowledged or 0 < self._in_flight <= keep, timeout)
            self._check()

    def settle(self) -> None:
        """Everything created so far is in its table, as far as the rate limiters let it in. Does not wait
        for them."""
        with self._lock:
            if self._closed or not (self._unacknowledged or self._pending.items):
                return
            self._send_pending()
            self._request({"op": "sync"})

    def settle_unless_waiting(self) -> None:
        """`settle`, unless another thread waits in this writer for room that perhaps only the caller can
        make: what that one has created is on its way already."""
        if self._before_read is not None:
            self._before_read()
        while not self._lock.acquire(timeout=0.05):
            if self._waits:
                return
        try:
            self.settle()
        finally:
            self._lock.release()

    def close(self, timeout: float | None = None) -> int:
        with self._lock:
            if self._closed:
                return 0
            got_in = 0
            try:
                self._send_pending()
                self._wait_until(lambda: not self._unacknowledged, timeout)
            except DeadlineExceededError:
                got_in = self._abandon()
            except ReverbError:  # what did not get through is counted and returned
                pass
            finally:
                self._closed = True
                self._late.close()
                self._connection.close()
                self._when_closed(self)
            return self._in_flight - got_in + self._num_failed

    def __enter__(self) -> ServedWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # Writing.

    def _check(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._closed:
            raise ServerClosed("the writer was closed")
        self._late.check()

    def _append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None) -> np.ndarray:
        held = self._streams.get(stream)
        if held is None:
            held = WriterRows(stream)
            self._streams[stream] = held
        arrays = {name: np.asarray(value) for name, value in columns.items()}
        n = held.check_arrays(arrays, rows)
        fresh = [name for name in arrays if name not in held.columns]
        if fresh:
            self._declare(held, {name: (arrays[name].shape[1:], arrays[name].dtype) for name in fresh})
        if rows is None:
            short = n - held.num_spare
            if short > 0:
                answer = self._connection.request(
                    {"op": "lease", "stream": stream, "n": held.lease_size(short)}, wait=False
                )
                held.add_spare(answer["rows"])
            rows = held.take(n)
        else:
            held.check(rows)
        held.write(rows, arrays)
        return rows

    def _wait_or_ask(self, done: Callable[[], bool], timeout: float | None) -> None:
        """`_wait_until`, which does not take an acknowledgement that is still on its way here for a table
        without room: the server's answer comes behind it."""
        try:
            self._wait_until(done, timeout)
        except DeadlineExceededError:
            self._request({"op": "sync"})
            if not done():
                raise
