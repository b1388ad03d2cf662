"""The writer of all back ends: it appends rows, and creates items that refer to them."""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from framework.replay.errors import ReverbError, ServerClosed
from framework.replay.rows.layout import Layout, LayoutBuilder, Slice
from framework.replay.rows.store import ColumnSpec, RowStore
from framework.replay.writers import HeldRows, NewItems, Writers, check_held
from framework.types import Nest

_LOG = logging.getLogger(__name__)

# Default number of items that may wait for room in their tables.
DEFAULT_MAX_IN_FLIGHT_ITEMS = 512

# A client of several servers has the number of a server in bits 56 to 60 of the keys.
SHARD_SHIFT = 56
# Seconds after which a reader goes on without what a thread writes that holds the writer's lock.
_READ_S = 5.0
_KEY_BIT = 1 << 55  # is set in every key: none is 0

_Self = TypeVar("_Self", bound="BatchWriter")


class BatchWriter:
    """Appends rows of B envs and creates items that refer to them. Safe from any thread.

    ```python
    rows = writer.append("steps", {"x": x[256, 4]})                 # copies
    keys = writer.create_items("replay", {"x": writer.slice("steps", "x", rows)}, priorities)
    writer.release("steps", rows)                                   # no later item refers to them
    writer.close()
    ```

    The writer owns the one queue of items that wait, for others or for room in their tables. It inserts them
    first in, first out. Single items wait for others, because many go in for hardly more than one: until
    there are `_held_back` of them, until something is read through the same client or from tables of this
    process, or, on their way to another process, for a moment. After the server is lost, every call raises
    `ServerLost`, and the caller creates a new writer.

    A subclass inserts the queue, in `_push`, and waits for that, in `_wait`. The rows are in a `RowStore` of
    this process, unless the subclass says otherwise. `lock` guards the state. A thread that waits for room
    inserts or sends all it can first, so that readers need not wait for it.

    Args:
      store: where rows are written; None if the subclass overrides `_declare`, `_lease` and `_free`.
      max_in_flight_items: items that may wait for room before `create_items` waits too; None for the default.
      writers: the client's, to which it adds the writer; a writer that is closed or dropped leaves them.
      has_room: the client's `can_insert`.

    Attributes:
      num_pending: number of created items that are not known to be in their tables.
      lock: held while the state changes. Its user may hold it around several calls that do not wait.
      holds_back: whether single items wait for others; see above.
      busy: whether the thread with the lock runs a user's function, for which no reader waits.
      shard: the server's number, which is part of the keys that `create_items` returns; 0 for a single
        server.
    """

    num_pending: int = 0
    holds_back: bool = True
    busy: bool = False
    shard: int = 0
    _closed = True  # until the subclass is ready: there is nothing to end
    _default_in_flight = DEFAULT_MAX_IN_FLIGHT_ITEMS
    _held_back = 1
    _waits = False  # whether the thread with the lock waits for room, which perhaps only a reader makes

    def __init__(
        self,
        store: RowStore | None,
        max_in_flight_items: int | None,
        writers: Writers,
        has_room: Callable[[str, int], bool],
    ) -> None:
        if max_in_flight_items is not None and max_in_flight_items < 1:
            raise ValueError(f"max_in_flight_items: got {max_in_flight_items}, expected at least 1 or None.")
        self._max_in_flight = max_in_flight_items or self._default_in_flight
        self._store: Any = store
        self._writers = writers
        self._has_room = has_room
        self.lock = threading.RLock()
        self._builder = LayoutBuilder()
        # The key of the next item. Two writers collide with a probability of about 1e-16 for each item.
        self._next_key = _KEY_BIT | secrets.randbits(54)
        self._streams: dict[str, HeldRows] = {}
        self._owned: dict[str, HeldRows] = {}  # by the store's names
        self._items: collections.deque[tuple[Any, NewItems]] = collections.deque()  # with their tables
        self._filled = 0.0  # 1: the queue is to be inserted
        self._created = 0
        self._before_read: Callable[[], object] | None = None
        self._ended: ServerClosed | None = None  # every later call raises it
        # The latest error of what this writer did between two calls; the next call raises it.
        self._errors: collections.deque[BaseException] = collections.deque(maxlen=1)

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """Copies `{column: array [n, ...]}` into n new rows, which the writer holds until `release`.

        Args:
          stream: name of the row space. It is private to this writer: other writers may use the name for
            other columns.
          columns: arrays by column; the first array of a column fixes its dtype and shape.
          rows: int64 `[n]`, rows of this writer whose other columns are filled; None for new rows.

        Returns:
          int64 `[n]` rows.

        Raises:
          ValueError: A dtype or shape differs from the first append, or the arrays differ in n. Nothing is
            written.
          StoreFullError: There is no room. Nothing is written.
        """
        with self.lock:
            if self._ended or self._errors:
                self.check()
            held = self._streams.get(stream)
            specs = {} if held is None else held.specs
            arrays = {name: np.asarray(value) for name, value in columns.items()}
            counts = {array.shape[:1] for array in arrays.values()}
            if rows is not None:
                rows = np.asarray(rows, np.int64)
                counts.add(rows.shape)
            if len(counts) != 1 or () in counts:
                shapes = {name: list(array.shape) for name, array in arrays.items()}
                raise ValueError(
                    f"stream {stream!r}: got columns of the shapes {shapes}, expected one or more, each "
                    "[n, ...] with the same n."
                )
            new: dict[str, ColumnSpec] = {}
            for name, array in arrays.items():
                spec = specs.get(name)
                if spec is None:
                    new[name] = (array.shape[1:], array.dtype)
                elif array.shape[1:] != spec[0] or array.dtype != spec[1]:
                    raise ValueError(
                        f"stream {stream!r}, column {name!r}: got {array.dtype}{list(array.shape[1:])}, "
                        f"expected {spec[1]}{list(spec[0])} in each row as in the first append."
                    )
            at: slice | np.ndarray
            if rows is not None:
                at = check_held("append", held, rows)
            if held is None or new:
                held = self._declare(stream, held, new)
                held.specs.update(new)
                self._streams[stream] = self._owned[held.stream] = held
            fresh = rows is None
            if rows is None:
                rows = self._lease(held, len(array))
                at = held.hold(rows)
            if not held.columns:
                self._send_rows(held, rows, arrays)
                return rows
            try:
                for name, array in arrays.items():
                    held.columns[name][at] = array
            except BaseException:  # no room for what is compressed
                if fresh:
                    self.release(stream, rows)
                raise
            return rows

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """Returns a leaf of k items: `column` at `rows`.

        Args:
          stream: name of the row space.
          column: name of the column.
          rows: int64 `[k]`, or `[k, L]` with a time axis.
          lengths: int64 `[k]`, how many of the L rows belong to each item; None for all.
        """
        held = self._streams.get(stream)
        if held is None or column not in held.names:
            raise ValueError(f"slice: got column {column!r} of stream {stream!r}, expected one with rows.")
        if type(rows) is not np.ndarray or rows.dtype != np.int64:
            rows = np.asarray(rows, np.int64)
        return Slice(held.stream, held.names[column], rows, None if lengths is None else np.asarray(lengths))

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        """Queues k items and inserts as many as the rate limiters allow.

        Waits while more than `max_in_flight_items` items wait for room. Never waits if the client is not
        `concurrent`, because no other thread could make room.

        Args:
          table: name of the table.
          trajectory: nest of `slice(...)`; readers get the same nest.
          priorities: float64 `[k]`; None for the largest priority so far, 1.0 at first.
          episodes: uint64 `[k]` or `[k, m]`, ids of the episodes of each item, filled up with 0, which
            `num_episodes` of `server_info` counts; may be None.
          timeout: seconds to wait; None waits without a limit.

        Returns:
          uint64 `[k]`, the items' keys.

        Raises:
          ValueError: The priorities, rows or nest are invalid. Nothing is queued.
          DeadlineExceededError: The timeout expired. The items stay in the queue.
        """
        with self.lock:
            if self._ended or self._errors:
                self.check()
            layout, index, lengths = self._builder.build(trajectory)
            for stream, begin, end in layout.parts:
                check_held("create_items", self._owned.get(stream), index[:, begin:end].ravel())
            # Copies, because the items may wait.
            priorities = None if priorities is None else np.array(priorities)
            if episodes is not None:
                episodes = np.array(episodes, np.uint64).reshape(len(index), -1)
            # Keys are made here, because the caller needs them before the server answers.
            keys = np.arange(self._next_key, self._next_key + len(index), dtype=np.uint64)
            self._next_key += len(index)
            items = NewItems(index, keys, priorities, lengths, episodes)
            into = self._check(table, layout, items)
            self._created += len(index)
            if left := len(index) - items.done:
                self._items.append((into, items))
                self.num_pending += left
                self._filled += left / self._held_back
                if self._filled >= 1.0 or not self.holds_back:
                    self._push()
                if self._items:
                    self._hold_back()
        if self.num_pending > self._max_in_flight:
            self._wait(timeout, self._max_in_flight)
        return items.keys | np.uint64(self.shard << SHARD_SHIFT) if self.shard else items.keys

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Returns whether the table takes n more items now."""
        if self._ended or self._errors:
            self.check()
        return self._has_room(table, n)

    def release(self, stream: str, rows: Any) -> None:
        """Releases `rows`, to which no later item of this writer refers.

        Raises:
          ValueError: The writer does not hold the rows, or one of them is given twice. Nothing is released.
        """
        with self.lock:
            if self._ended:  # other errors are left to the next call that writes
                self.check()
            rows = np.asarray(rows, np.int64).ravel()
            held = self._streams.get(stream)
            at = check_held("release", held, rows)
            if type(at) is not slice and not np.diff(np.sort(rows)).all():
                raise ValueError("release: got one row twice. Release each row once.")
            if held is not None:
                held.held[at] = False
                self._free(held.stream, rows)

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        """Waits until at most `keep` items are pending.

        Raises:
          DeadlineExceededError: More items are pending after `timeout` seconds. They stay in the queue.
        """
        self.check()
        self._wait(timeout, keep)

    def check(self) -> None:
        """Raises the error of what this writer did for a reader, or of its end."""
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        if self._errors:
            raise self._errors.popleft()

    def close(self, timeout: float | None = None) -> int:
        """Flushes for up to `timeout` seconds, releases all rows and closes the writer.

        Returns:
          The number of items that were dropped because their tables had no room.
        """
        dropped = 0
        try:
            if self._ended is None:
                with contextlib.suppress(ReverbError):  # items that did not get in are counted
                    self._wait(timeout, 0)
        finally:
            with self.lock:
                if not self._closed:
                    dropped = self._finish()
                    self._closed, self._ended = True, ServerClosed("the writer was closed")
                    self._before_read = None
                    self._writers.remove(self)
        return dropped

    def end(self, until: float | None = None) -> None:
        """Inserts what has room, and closes this writer, which was not closed; says how many items are lost.

        Args:
          until: None if the writer was dropped. At the end of the process, when to give up; a writer in which
            another thread waits is then left alone.
        """
        taken = (until is None or time.monotonic() < until) and self._enter()
        try:
            if taken:
                self.show()
            lost = self.close(timeout=0) if taken else self.num_pending
            if lost:
                _LOG.warning(
                    "writer: got no close(), and %d of its items are in no table. Call close(), which waits "
                    "for room and raises errors.",
                    lost,
                )
        except Exception:  # not an error of the call that reads
            _LOG.exception("a writer that was dropped without close failed")
        finally:
            if taken:
                self.lock.release()

    def show(self, confirm: bool = True) -> None:
        """Inserts everything that was staged and created so far, as far as there is room; does not wait.

        Called before something is read through the same client, from any thread. Does nothing while another
        thread waits in this writer for room, or for a user's function, which may both wait for the reader.

        Args:
          confirm: whether a server says which items it could insert.
        """
        if self.busy or not self._enter():
            return
        try:
            if self._before_read is not None:
                self._before_read()
            if self.num_pending and self._ended is None:
                with contextlib.suppress(ReverbError):
                    (self._settle if confirm else self._push)()
        except Exception as error:  # one of this writer's next call, not of the reader's
            self._errors.append(error)
        finally:
            self.lock.release()

    def _enter(self) -> bool:
        """Takes the lock; returns False if the thread that has it waits, perhaps for this one."""
        until = time.monotonic() + _READ_S
        taken = self.lock.acquire(blocking=False)
        while not (taken or self._waits or self.busy or time.monotonic() >= until):
            taken = self.lock.acquire(timeout=0.01)
        return taken

    def before_read(self, function: Callable[[], object]) -> None:
        """Registers the function that runs before a reader reads a table through the same client.

        The function writes the caller's staged rows. It may run in any thread, with `lock`, and must not
        wait. If it fails, the writer's next call raises its error. The writer has one such function and keeps
        it until `close`.
        """
        self._before_read = function

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(None if error[0] is None else 0)  # after an error, do not wait for a rate limiter

    def __del__(self) -> None:
        # Ended by a later call of a client: garbage collection must wait for neither locks nor servers.
        if not self._closed:
            self._writers.dropped.append(self)

    # --- a subclass's part ---

    def _check(self, table: str, layout: Layout, items: NewItems) -> Any:
        """Checks items of rows that the writer holds; returns what their table is in the queue.

        May insert them, the first `items.done`.
        """
        raise NotImplementedError

    def _push(self) -> None:
        """Inserts the queue, as far as there is room, or sends it. Does not wait."""
        raise NotImplementedError

    def _hold_back(self) -> None:
        """Has items inserted in a moment, unless a reader of their tables has them inserted."""

    def _settle(self) -> None:
        """Inserts all items that have room, when something is to be read."""
        self._push()

    def _wait(self, timeout: float | None, keep: int) -> None:
        """Waits until at most `keep` items are pending; see `flush`. Called without the lock."""
        raise NotImplementedError

    def _finish(self) -> int:
        """Drops the items that are pending and all rows; returns how many items were dropped or lost."""
        raise NotImplementedError

    def _declare(self, stream: str, held: HeldRows | None, columns: Mapping[str, ColumnSpec]) -> HeldRows:
        """Adds columns to a stream of this writer, which may be new: then `held` is None."""
        found, names = self._store.claim(stream, columns, None if held is None else held.stream)
        held = held or HeldRows(found.name)
        held.names.update(names)
        held.columns.update({name: found.columns[own] for name, own in names.items()})
        return held

    def _lease(self, held: HeldRows, n: int) -> np.ndarray:
        """Returns `n` rows, int64 `[n]`, that are free."""
        return self._store.streams[held.stream].lease(n)

    def _free(self, stream: str, rows: np.ndarray) -> None:
        """Gives rows back to the stream that the store calls `stream`; copies `rows` if it keeps them."""
        self._store.streams[stream].release(rows)

    def _send_rows(self, held: HeldRows, rows: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Sends what was appended to a stream without `columns`; for writers that have such streams."""
        raise NotImplementedError

    def _release_all(self) -> None:
        """Gives back all rows that the writer holds."""
        for held in self._streams.values():
            self._free(held.stream, np.flatnonzero(held.held))
        self._streams.clear()
        self._owned.clear()
