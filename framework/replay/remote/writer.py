"""The writer of a client in another process than the server.

Rows are the server's, leased in blocks. On the server's machine they are written straight into its shared
memory; from elsewhere they travel as arrays with the items. Items and released rows are sent in one message,
which also asks for the next rows; its answer comes when all of its items are in their tables:

```text
append ──▶ rows ──────────▶ shared memory              (or arrays of the next message)
create_items ─▶ queue ─▶ insert [items, released rows, rows wanted]
                             ◀─ answer [leased rows]
```

A writer ends with its session: when the server is lost, items in flight are lost and counted, and every later
call raises `ServerLost`. The caller makes a new writer.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from framework.replay import wire
from framework.replay.contracts import DEFAULT_MAX_IN_FLIGHT_ITEMS, Writer
from framework.replay.errors import (
    DeadlineExceededError,
    ReverbError,
    ServerClosed,
    ServerLost,
    UnknownTableError,
)
from framework.replay.late import LateFlush
from framework.replay.remote.connection import LAST_WORDS, Connection, Interrupted, SessionLost
from framework.replay.rows.layout import Layout, LayoutBuilder, Slice
from framework.replay.rows.store import grown, span
from framework.replay.tables.items import make_keys
from framework.types import Nest

# Single items wait for others, which makes them cheaper: until there are this many, until something is read
# through the same client, or for this many seconds.
_SEND_ITEMS = 64
_DELAY = 0.005
_SEND_ROWS = 4096  # released rows that are sent without items
_SEND_BYTES = 1 << 20  # bytes of written rows that are sent without items
_LEASE_ROWS, _LEASE_BYTES = 512, 1 << 20  # a block of leased rows has at most this many rows and bytes


class _Stream:
    """A stream as its writer knows it: the server's names and arrays, and the rows."""

    def __init__(self) -> None:
        self.name = ""  # the server's
        self.columns: dict[str, str] = {}  # the server's, by the writer's
        self.specs: dict[str, tuple[tuple[int, ...], np.dtype]] = {}  # of a row; by the writer's names
        self.mapped: dict[str, np.ndarray] = {}  # by the writer's names; empty if arrays travel
        self.spare = np.zeros(0, np.int64)  # leased and not used yet
        self.block = 0  # rows to lease at a time
        self.wanted = 0  # rows to ask for with the next message
        self.held = np.zeros(1024, np.bool_)

    def take(self, n: int) -> np.ndarray:
        """`n` of the spare rows, held from now on. Asks for more if that leaves few."""
        rows, self.spare = self.spare[:n].copy(), self.spare[n:]
        if len(self.spare) < n:
            self.wanted = max(2 * n, self.block)
        self.held = grown(self.held, int(rows.max(initial=-1)) + 1)
        self.held[rows] = True
        return rows

    def holds(self, rows: np.ndarray) -> bool:
        """Whether the writer holds all of `rows`."""
        return not rows.size or bool(
            rows.min() >= 0 and rows.max() < len(self.held) and self.held.take(rows).all()
        )


class ServedWriter(Writer):
    """See the module, and `framework.replay.contracts.Writer` for the methods.

    Args:
      connection: the writer's own.
      max_in_flight_items: items that may wait for room before `create_items` waits too; None for 512.
      dropped: where a writer that is dropped without `close` puts itself, to be closed.

    Attributes:
      num_lost: items that were in flight when the server was lost.
    """

    def __init__(
        self,
        connection: Connection,
        max_in_flight_items: int | None,
        dropped: collections.deque[ServedWriter],
    ) -> None:
        self._closed = True  # until there is something to close
        self._pid = os.getpid()
        self._dropped = dropped
        if max_in_flight_items is not None and max_in_flight_items < 1:
            raise ValueError(f"max_in_flight_items: got {max_in_flight_items}, expected at least 1 or None.")
        self.num_lost = 0
        self._connection = connection
        self._max_in_flight = max_in_flight_items or DEFAULT_MAX_IN_FLIGHT_ITEMS
        self._builder = LayoutBuilder()
        self._streams: dict[str, _Stream] = {}
        self._owner: dict[str, _Stream] = {}  # by the server's names
        self._layouts: dict[Layout, int] = {}  # those that the server knows
        # The next message.
        self._new_layouts: list[Any] = []
        self._writes: list[Any] = []
        self._write_bytes = 0
        self._items: list[list[Any]] = []
        self._num_queued = 0
        self._released: list[tuple[str, np.ndarray]] = []
        self._num_released = 0
        # Messages without an answer yet: how many items each has.
        self._in_flight: dict[int, int] = {}
        self._pending = 0
        self._created = 0
        self._failed = 0  # items that the server has refused
        self._error: BaseException | None = None  # of items that were refused; raised by the next call
        self._lost: ServerClosed | None = None
        self._closed = False
        self._waits = False  # a thread waits in here for the server
        self._lock = threading.RLock()
        self._late = LateFlush(self)
        self._before_read: weakref.WeakMethod[Callable[[], object]] | None = None

    # --- what the user calls ---

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        with self._in_session():
            held = self._streams.get(stream) or _Stream()
            arrays: dict[str, np.ndarray] = {}
            n = -1 if rows is None else len(rows)
            for name, value in columns.items():
                arrays[name] = array = np.asarray(value)
                if not array.ndim:
                    raise ValueError(
                        f"stream {stream!r}, column {name!r}: got a scalar, expected an array [n, ...]."
                    )
                shape, dtype = held.specs.get(name, (array.shape[1:], array.dtype))
                if array.shape[1:] != shape or array.dtype != dtype:
                    raise ValueError(
                        f"stream {stream!r}, column {name!r}: got {array.dtype}{list(array.shape)}, expected "
                        f"{dtype}{['n', *shape]} as in the first append."
                    )
                if n < 0:
                    n = len(array)
                elif len(array) != n:
                    raise ValueError(
                        f"stream {stream!r}, column {name!r}: got {len(array)} rows, expected {n} as in the "
                        "other columns."
                    )
            if not arrays:
                raise ValueError(f"stream {stream!r}: got no columns, expected at least one.")
            if rows is not None and not held.holds(rows):
                raise ValueError(f"append, stream {stream!r}: got rows that this writer does not hold.")
            fresh = {name: array for name, array in arrays.items() if name not in held.specs}
            short = n - len(held.spare) if rows is None else 0
            if fresh or short > 0:
                self._lease(stream, held, fresh, max(0, short))
            if rows is None:
                rows = held.take(n)
            if held.mapped:
                at = span(rows)
                for name, array in arrays.items():
                    held.mapped[name][at] = array
                return rows
            copies = {held.columns[name]: array.copy() for name, array in arrays.items()}
            self._writes.append([held.name, rows, copies])
            self._write_bytes += sum(array.nbytes for array in copies.values())
            if self._write_bytes >= _SEND_BYTES:
                self._send()
            return rows

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        held = self._streams.get(stream)
        if held is None or column not in held.columns:
            raise ValueError(
                f"slice: got column {column!r} of stream {stream!r}, expected one that was appended to."
            )
        if type(rows) is not np.ndarray or rows.dtype != np.int64:
            rows = np.asarray(rows, np.int64)
        return Slice(held.name, held.columns[column], rows, None if lengths is None else np.asarray(lengths))

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        with self._in_session():
            tables = self._connection.welcome["tables"]
            if table not in tables:
                raise UnknownTableError(f"table {table!r} was not found; the server has {tables}")
            layout, index, lengths = self._builder.build(trajectory)
            n = len(index)
            if priorities is not None:
                priorities = np.array(priorities, np.float64)
                if (
                    priorities.shape != (n,)
                    or not (priorities >= 0).all()
                    or not np.isfinite(priorities).all()
                ):
                    raise ValueError(
                        f"priorities: got {priorities.ravel()[:3].tolist()}… of shape {priorities.shape}, "
                        f"expected finite numbers >= 0 of shape ({n},)"
                    )
            at = 0
            for group in layout.groups:
                if not self._owner[group.stream].holds(index[:, at : at + group.length]):
                    raise ValueError(
                        f"create_items, table {table!r}: got rows that this writer does not hold."
                    )
                at += group.length
            number = self._layouts.get(layout)
            if number is None:
                number = self._layouts[layout] = len(self._layouts)
                self._new_layouts.append([number, layout.to_wire()])
            keys = make_keys(n)
            episodes = None if episodes is None else np.array(episodes, np.uint64)
            self._items.append([table, number, index, lengths, keys, priorities, episodes])
            self._num_queued += n
            self._pending += n
            self._created += n
            if self._num_queued >= _SEND_ITEMS:
                self._send()
            else:
                self._late.call_later(self._send_late, _DELAY)
            if self._pending > self._max_in_flight:
                self._wait(self._max_in_flight, timeout)
            return keys

    @property
    def num_pending(self) -> int:
        return self._pending

    def release(self, stream: str, rows: Any) -> None:
        with self._in_session():
            rows = np.array(rows, np.int64).ravel()  # a copy: they are sent later
            held = self._streams.get(stream)
            if held is None or not held.holds(rows):
                raise ValueError(
                    f"release, stream {stream!r}: got rows that this writer does not hold. "
                    "Release each row once."
                )
            held.held[rows] = False
            self._released.append((held.name, rows))
            self._num_released += len(rows)
            if self._num_released >= _SEND_ROWS:
                self._send()

    def can_insert(self, table: str, n: int = 1) -> bool:
        with self._in_session():
            if self._pending:
                self._sync()
            if self._pending:
                return False
            answer = self._connection.request({"op": "can_insert", "table": table, "n": n})
            return bool(answer["value"])

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        with self._in_session():
            if not keep:
                self._send()  # rows that were released, even if no item waits
            self._wait(keep, timeout)
            self._raise_error()

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        self._late.call_later(method, delay)

    def before_read(self, method: Callable[[], object]) -> None:
        self._before_read = weakref.WeakMethod(method)

    def show(self) -> None:
        """Has the server try all that was created so far; does not wait for room.

        Called before something is read through the same client, from any thread. Nothing happens while
        another thread waits in this writer for room that perhaps only the reader can make.
        """
        method = self._before_read() if self._before_read is not None else None
        if method is not None:
            method()
        while not self._lock.acquire(timeout=0.05):
            if self._waits:
                return
        try:
            if self._pending and not self._closed and self._lost is None:
                # What goes wrong is an error of this writer's next call, not of the reader's.
                with contextlib.suppress(ReverbError), self._in_session(check=False):
                    self._sync()
        finally:
            self._lock.release()

    def close(self, timeout: float | None = None) -> int:
        if self._pid != os.getpid():
            return 0
        with self._lock:
            if self._closed:
                return 0
            try:
                if self._lost is None:
                    self._close_session(timeout)
            finally:
                self._closed = True
                self._late.close()
                self._connection.close()
            return self._pending + self._failed + self.num_lost

    def _close_session(self, timeout: float | None) -> None:
        with contextlib.suppress(ReverbError, SessionLost):  # what did not get in is counted
            try:
                self._wait(0, timeout)
                self._send()
            except (DeadlineExceededError, Interrupted):
                # Some of a message may be in its table: the server says how many, once it tries no more.
                self._connection.post({"op": "cancel"})
                answer = self._connection.request({"op": "sync"}, timeout=LAST_WORDS)
                self._pending = self._created - self._failed - int(answer["inserted"])

    def __del__(self) -> None:
        # The client closes it the next time that it is used: a garbage collector must not wait for a server.
        if not self._closed:
            self._dropped.append(self)

    def __enter__(self) -> ServedWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # --- the session ---

    @contextlib.contextmanager
    def _in_session(self, check: bool = True) -> Iterator[None]:
        """Holds the lock; opens the session at first, and ends the writer if the session is lost."""
        if self._pid != os.getpid():  # its rows and its lock are the parent's
            raise ServerLost("writer: got a call in a forked process. Make a new writer there.")
        with self._lock:
            if check:
                self._raise_error()
            try:
                if not self._connection.session:
                    self._connection.open()
                yield
            except SessionLost:
                text = f"the replay server of this writer was lost with {self._pending} items in flight"
                self._lose(ServerLost(text))
                raise ServerLost(text) from None
            except ServerClosed as error:
                if not isinstance(error, Interrupted) and self._connection.session:
                    self._lose(error)
                raise

    def _lose(self, error: ServerClosed) -> None:
        self._lost = error
        self.num_lost, self._pending = self._pending, 0
        self._connection.close()

    def _raise_error(self) -> None:
        if self._closed:
            raise ServerClosed("the writer was closed")
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._late.check()

    def _lease(self, stream: str, held: _Stream, arrays: Mapping[str, np.ndarray], n: int) -> None:
        """Declares the columns of `arrays` and leases at least `n` more rows."""
        request = {
            "op": "lease",
            "name": stream,
            "stream": held.name or None,
            "columns": {name: [list(array.shape[1:]), array.dtype.str] for name, array in arrays.items()},
        }
        specs = {**held.specs, **{name: (array.shape[1:], array.dtype) for name, array in arrays.items()}}
        row_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in specs.values())
        per_block = min(_LEASE_ROWS, _LEASE_BYTES // max(1, row_bytes))
        block = max(2 * n, per_block) if n else 0
        try:
            answer = self._connection.request({**request, "n": block})
        except MemoryError:
            if block == n:
                raise
            answer = self._connection.request({**request, "n": n})  # no room for more than needed
        held.name = answer["stream"]
        held.specs, held.block = specs, per_block
        mapped = self._connection.mapped
        for name, (column, path, shape, dtype) in answer["columns"].items():
            held.columns[name] = column
            if mapped.local:
                held.mapped[name] = mapped.column(held.name, column, path, shape, dtype)
        held.spare = np.concatenate([held.spare, answer["rows"]])
        self._streams[stream] = self._owner[held.name] = held

    def _send(self) -> None:
        """Sends what is queued."""
        if not (self._items or self._writes or self._released):
            return
        wanted = {held.name: held.wanted for held in self._streams.values() if held.wanted}
        message = {
            "op": "insert",
            "layouts": self._new_layouts,
            "write": self._writes,
            "items": _merged(self._items),
            "release": self._released,
            "lease": wanted,
        }
        number = self._connection.post(message)
        self._in_flight[number] = self._num_queued
        for held in self._streams.values():
            held.wanted = 0
        self._new_layouts, self._writes, self._items, self._released = [], [], [], []
        self._write_bytes = self._num_queued = self._num_released = 0
        self._collect(0.0)

    def _send_late(self) -> None:
        """Sends single items that were not followed by others."""
        with self._lock:
            if not self._closed and self._lost is None:
                with self._in_session():
                    self._send()

    def _collect(self, timeout: float | None) -> bool:
        """Notes the answers to inserts; waits up to `timeout` seconds for one. Whether any message came."""
        answers = self._connection.poll(timeout)
        for answer in answers:
            count = self._in_flight.pop(answer["id"], None)
            if count is None:
                continue
            self._pending -= count
            if "error" in answer:
                self._failed += count
                self._error = wire.unpack_error(answer["error"])
                continue
            for name, rows in answer["rows"].items():
                held = self._owner[name]
                held.spare = np.concatenate([held.spare, rows])
        return bool(answers)

    def _sync(self) -> None:
        """Learns what the server could carry out of all that was created so far."""
        self._send()
        self._connection.request({"op": "sync"})
        self._collect(0.0)

    def _wait(self, keep: int, timeout: float | None) -> None:
        """Waits until at most `keep` items are pending."""
        if self._pending <= keep:
            return
        self._send()
        if self._connection.wake.is_set:
            timeout = LAST_WORDS if timeout is None else min(timeout, LAST_WORDS)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._waits = True
        try:
            while self._pending > keep:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._collect(left) and deadline is not None and time.monotonic() >= deadline:
                    self._sync()  # an answer may be on its way: it comes before the answer to this
                    if self._pending <= keep:
                        break
                    if self._connection.wake.is_set:
                        raise Interrupted
                    raise DeadlineExceededError(f"{self._pending} items wait for room in their tables")
        finally:
            self._waits = False
        if self._error is not None:
            self._raise_error()


def _merged(items: list[list[Any]]) -> list[list[Any]]:
    """Items of one kind that follow one another as one."""
    merged = []
    for _, group in itertools.groupby(items, lambda item: (*item[:2], *[part is None for part in item[3:]])):
        parts = list(group)
        first = parts[0]
        if len(parts) > 1:
            arrays = zip(*[part[2:] for part in parts], strict=True)
            first = [*first[:2], *[None if each[0] is None else np.concatenate(each) for each in arrays]]
        merged.append(first)
    return merged
