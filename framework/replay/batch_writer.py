"""The writer for B envs: whole batches of rows in, whole batches of items out.

::

    rows = writer.append("steps", {"x": x[256, 4]})                 # copies
    keys = writer.create_items("replay", {"x": writer.slice("steps", "x", rows)}, priorities)
    writer.release("steps", rows)                                   # no later item will point at them
    writer.close()

What the rate limiter refuses waits in ``create_items``, or in the writer with ``offer_items``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.rows.arrays import grown
from framework.replay.rows.binding import Binding
from framework.replay.rows.layout import LayoutBuilder, Referenced, Slice
from framework.replay.rows.store import Stream
from framework.replay.tables.items import make_keys
from framework.replay.tables.table import Table
from framework.types import Nest

if TYPE_CHECKING:
    from framework.replay.local.client import EmbeddedClient


@dataclasses.dataclass(eq=False)
class _Kept:
    """Items that the limiter has refused so far, but for the first ``done``; their rows are pinned."""

    table: Table
    items: Referenced
    binding: Binding
    priorities: np.ndarray | None
    keys: np.ndarray
    episodes: np.ndarray | None
    done: int = 0

    def is_like(self, other: _Kept) -> bool:
        """Whether both can go in with one call."""
        return (
            self.binding is other.binding
            and self.items.lengths is None
            and not self.done
            and (self.priorities is None) == (other.priorities is None)
            and (self.episodes is None) == (other.episodes is None)
        )


# Items of ``offer_items`` that go in together, if nobody asks for them sooner.
_HELD_BACK = 32


class BatchWriter:
    """See the module. One thread writes; others may read the tables meanwhile."""

    def __init__(self, client: EmbeddedClient):
        self._client = client
        self._builder = LayoutBuilder()
        self._streams: dict[str, Stream] = {}
        self._held: dict[str, np.ndarray] = {}  # of each stream, which rows this writer has not released
        self._kept: collections.deque[_Kept] = collections.deque()
        self._lock = threading.RLock()  # of _kept; writers go before tables
        self._untried = 0  # kept since the last attempt to insert
        self._closed = False

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """A leaf of k items: ``rows`` int64 ``[k]``, or ``[k, L]`` with a time axis; see ``Slice`` for
        ``lengths``."""
        if type(rows) is not np.ndarray or rows.dtype != np.int64:
            rows = np.asarray(rows, np.int64)
        return Slice(stream, column, rows, None if lengths is None else np.asarray(lengths))

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """Copies ``{column: array [n, ...]}`` into n new rows, int64 ``[n]``, which the writer holds until
          ``release``.

          Args:
            stream: name of the row space; made on first use.
            columns: the first array of a column fixes its dtype and shape.
            rows: fill further columns of these rows of the writer instead.

          Raises:
            ValueError: a dtype or shape changed, or the arrays are not for the same n; nothing was written.
        StoreFullError: there is no room; nothing was written.
        """
        self._check_open()
        space = self._streams.get(stream)
        if space is None:
            space = self._streams[stream] = self._client.store.stream(stream)
        have = space.columns
        n = -1 if rows is None else len(rows)
        arrays = []
        for name, value in columns.items():
            array = value if type(value) is np.ndarray else np.asarray(value)
            column = have.get(name)
            if column is None:
                if not array.ndim:
                    raise ValueError(
                        f"stream {stream!r}, column {name!r}: got a scalar, expected an array [n, ...]"
                    )
                space.add_columns({name: (array.shape[1:], array.dtype)})
                column = have[name]
            if array.dtype != column.dtype or array.shape[1:] != column.shape[1:] or not array.ndim:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got {array.dtype}{list(array.shape)}, expected "
                    f"{column.dtype}{['n', *column.shape[1:]]} as in the first append"
                )
            if n < 0:
                n = len(array)
            elif len(array) != n:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got {len(array)} rows, expected {n} as in "
                    "the others"
                )
            arrays.append((column, array))
        if n < 0:
            raise ValueError(f"stream {stream!r}: got no columns, expected at least one")
        leased = rows is None
        if rows is None:
            rows = space.lease(n)
        at = space.span(rows)
        if leased:
            held = self._held.get(stream)
            end = at.stop if type(at) is slice else int(rows.max(initial=-1)) + 1
            if held is None or end > len(held):
                held = np.zeros(0, bool) if held is None else held
                held = self._held[stream] = grown(held, max(1024, end))
            held[at] = True
        try:
            for column, array in arrays:
                column[at] = array
        except BaseException:  # no room for what is compressed
            if leased:
                self.release(stream, rows)
            raise
        return rows

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        """Inserts k items; waits while the table's rate limiter refuses.

        Args:
          table: name.
          trajectory: nest of ``slice(...)``, which is the nest that readers get.
          priorities: float64 ``[k]`` or None for the largest so far, 1.0 at first.
          episodes: uint64 ``[k]``, for ``num_episodes`` in ``server_info``; may be None.
          timeout: seconds to wait, None for ever.

        Returns:
          uint64 ``[k]``: the items' keys.
        """
        self._check_open()
        if self._kept:
            self.flush(timeout)
        referenced = self._builder.build(trajectory)
        return self._client.table(table).insert(
            referenced.layout,
            referenced.index,
            priorities,
            lengths=referenced.lengths,
            episodes=episodes,
            timeout=timeout,
            cancelled=self._client.is_interrupted,
        )

    def offer_items(
        self, table: str, trajectory: Nest, priorities: Any = None, episodes: np.ndarray | None = None
    ) -> np.ndarray:
        """``create_items`` that never waits: what the limiter refuses is kept here until it lets it
        through."""
        self._check_open()
        into = self._client.table(table)
        items = self._builder.build(trajectory)
        n = len(items.index)
        if priorities is not None:
            priorities = into.check_priorities(priorities, n)
        number = into.bind(items.layout)
        kept = _Kept(into, items, into._bindings[number], priorities, make_keys(n), episodes)
        with self._lock:
            kept.binding.acquire(items.index)
            self._kept.append(kept)
            self._untried += n
            if len(self._kept) == 1:
                self._client.register_pending(self)
            # Several go in for hardly more than one. Whatever reads a table calls flush_pending first.
            if self._untried >= _HELD_BACK or into.sampler_waits:
                self.flush_pending()
        return kept.keys

    def _insert(self, kept: _Kept) -> bool:
        """Whether all of ``kept`` is in its table now."""
        rest = slice(kept.done, None)
        priorities, lengths, episodes = [
            None if part is None else part[rest]
            for part in (kept.priorities, kept.items.lengths, kept.episodes)
        ]
        try:
            kept.table.insert(
                kept.items.layout,
                kept.items.index[rest],
                priorities,
                kept.keys[rest],
                lengths,
                episodes,
                timeout=0,
            )
        except DeadlineExceededError as error:
            kept.done += error.args[1]
            return False
        return True

    def flush_pending(self) -> None:
        """Inserts what is kept as far as the limiters let it, without waiting; called before a table is
        read."""
        with self._lock:
            if not self._kept:
                return
            self._untried = 0
            while self._kept:
                self._merge()
                kept = self._kept[0]
                if not self._insert(kept):
                    break
                self._kept.popleft()
                kept.binding.drop(kept.items.index)
            if not self._kept:
                self._client.unregister_pending(self)

    def _merge(self) -> None:
        """Makes one of the items at the front that go into one table and look alike."""
        first = self._kept[0]
        if first.done:
            return
        same = [first]
        while len(same) < len(self._kept) and self._kept[len(same)].is_like(first):
            same.append(self._kept[len(same)])
        if len(same) == 1:
            return
        for _ in same:
            self._kept.popleft()
        index = np.concatenate([kept.items.index for kept in same])
        merged = dataclasses.replace(
            first,
            items=Referenced(first.items.layout, index, None),
            keys=np.concatenate([kept.keys for kept in same]),
            priorities=None
            if first.priorities is None
            else np.concatenate([kept.priorities for kept in same if kept.priorities is not None]),
            episodes=None
            if first.episodes is None
            else np.concatenate([kept.episodes for kept in same if kept.episodes is not None]),
        )
        self._kept.appendleft(merged)

    @property
    def num_kept(self) -> int:
        """Items that are not in their tables yet."""
        with self._lock:
            return sum(len(kept.keys) - kept.done for kept in self._kept)

    def release(self, stream: str, rows: Any) -> None:
        """No later item of this writer will point at ``rows``; ValueError if they are not the writer's."""
        rows = np.asarray(rows, np.int64)
        if not len(rows):
            return
        held = self._held.get(stream)
        mine = held is not None and np.maximum.reduce(rows.view(np.uint64)) < len(
            held
        )  # negative ones are huge
        if held is None or not mine or np.count_nonzero(held.take(rows)) < len(rows):
            raise self._not_held(stream)
        held[rows] = False
        self._streams[stream].release(rows)

    def _not_held(self, stream: str) -> ValueError:
        return ValueError(f"release of stream {stream!r}: got rows that this writer does not hold")

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether ``create_items`` with n items would go through without waiting."""
        return self._client.table(table).can_insert(n)

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        """Waits until at most ``keep`` items are not in their tables; DeadlineExceededError after ``timeout``
        seconds."""
        self._check_open()
        self._flush(timeout, keep)

    def _flush(self, timeout: float | None, keep: int = 0) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        if keep and self.num_kept <= keep:
            return  # they go in together with others, or when a table is read
        while True:
            self.flush_pending()
            with self._lock:
                if self.num_kept <= keep:
                    return
                table = self._kept[0].table
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            table.wait_to_insert(left, self._client.is_interrupted)

    def close(self, timeout: float | None = None) -> int:
        """Flushes, and ends the writer; how many items did not get into their table in time and were dropped.

        Rows that were not released go back too.
        """
        if self._closed:
            return 0
        self._closed = True
        with contextlib.suppress(DeadlineExceededError, ServerClosed, WouldBlockError):
            self._flush(timeout)
        with self._lock:
            dropped = self.num_kept
            if self._kept:
                self._client.unregister_pending(self)
            while self._kept:
                kept = self._kept.popleft()
                kept.binding.drop(kept.items.index)
        for stream, held in self._held.items():
            self._streams[stream].release(np.flatnonzero(held))
        self._held.clear()
        return dropped

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ServerClosed("the writer was closed")
