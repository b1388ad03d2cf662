"""The writer for B envs over a ``reverb.TrajectoryWriter``.

dm-reverb knows steps of one episode; our items point at any rows. So rows stay here, in a row store of this
process, until an item needs them. Then each becomes a step of the trajectory writer, and the item refers to
these steps; later items refer to the same steps as long as the writer keeps them, so that rows are stored
once in the server too. A row that the writer has forgotten in between is sent again.

Chunks hold one step: other lengths cannot be referred to in any order (dm-reverb 0.14 returns the wrong rows
of a strided reference), and readers would be sent whole chunks for one row of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from framework import nest as nests
from framework.replay import contracts
from framework.replay.dm_reverb.convert import check_priorities, describe_structure
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.late import LateFlush
from framework.replay.local.rows import HeldRows
from framework.replay.rows.layout import Layout, LayoutBuilder, Slice
from framework.replay.rows.store import RowStore
from framework.types import Nest

if TYPE_CHECKING:
    from framework.replay.dm_reverb.client import Client

# dm-reverb prints warnings from about 64 on.
DEFAULT_IN_FLIGHT = 32
# dm-reverb's writer holds so many bytes of steps that later items may refer to, within these bounds.
_WINDOW_BYTES = 32 << 20
_WINDOW_STEPS = (512, 4096)
_SLICE = 0.2  # seconds of a wait in dm-reverb between two looks at whether it was interrupted
_SETTLE = 5.0  # seconds that a server which is not held up by a rate limiter may take to confirm items
_STRUCTURES = "structure"  # the stream of the descriptions of structures


class ReverbWriter(contracts.Writer):
    """See `contracts.Writer`.

    It differs in two ways. ``create_items`` returns no keys: dm-reverb does not tell them. Items are on
    their way when ``create_items`` returns; it waits while more than ``max_in_flight_items`` would be.
    """

    def __init__(self, client: Client, max_in_flight_items: int | None = None) -> None:
        if max_in_flight_items is not None and max_in_flight_items < 1:
            raise ValueError(f"max_in_flight_items: got {max_in_flight_items}, expected at least 1 or None")
        self.store = RowStore()
        self._rows = HeldRows(self.store)
        self._late = LateFlush(self)
        self._before_read: Callable[[], object] | None = None
        self._builder = LayoutBuilder()
        self._reverb = client
        self._max_in_flight = max_in_flight_items or DEFAULT_IN_FLIGHT
        # Items that are created between two looks at how many are in flight.
        self._burst = max(1, self._max_in_flight // 2)
        self._closed = False
        self._lock = threading.RLock()
        self._writer: Any = None
        self._window = 0
        self._steps = 0
        # For each stream, the step that a row was sent as.
        self._sent: dict[str, dict[int, int]] = {_STRUCTURES: {}}
        self._histories: dict[str, Any] = {}
        self._structures: list[Layout] = []
        self._unconfirmed = False

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        return self._rows.slice(stream, column, rows, lengths)

    def append(self, stream: str, columns: Any, rows: np.ndarray | None = None) -> np.ndarray:
        with self._lock:
            self._check_open()
            if stream == _STRUCTURES:
                raise ValueError(f"stream: {stream!r} is taken; use another name")
            rows = self._rows.append(stream, columns, rows)
            sent = self._sent.setdefault(stream, {})
            if sent:
                for row in rows.tolist():  # they hold something new
                    sent.pop(row, None)
                    sent.pop(~row, None)
            return rows

    def release(self, stream: str, rows: Any) -> None:
        with self._lock:
            self._rows.release(stream, rows)

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        with self._lock:
            self._check_open()
            layout, index, lengths = self._builder.build(trajectory)
            n = len(index)
            has_signature = self._reverb.has_signature(table)
            if priorities is not None:
                priorities = check_priorities(priorities, n)
            deadline = None if timeout is None else time.monotonic() + timeout
            late: DeadlineExceededError | None = None
            for begin in range(0, n, self._burst):
                end = min(n, begin + self._burst)
                if late is None:
                    try:
                        self._wait_for(self._max_in_flight - (end - begin), deadline)
                    except DeadlineExceededError as error:  # the items wait in dm-reverb's writer
                        late = error
                self._make_writer(layout)
                self._create(table, layout, index[begin:end], lengths, begin, priorities, has_signature)
            if late is not None:
                raise late
            return np.zeros(0, np.uint64)

    @property
    def num_pending(self) -> int:
        with self._lock:
            return self._count_pending() if self._unconfirmed and self._writer is not None else 0

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        self._late.call_later(method, delay)

    def before_read(self, function: Callable[[], object]) -> None:
        self._before_read = function

    def _create(
        self,
        table: str,
        layout: Layout,
        index: np.ndarray,
        lengths: np.ndarray | None,
        begin: int,
        priorities: np.ndarray | None,
        has_signature: bool,
    ) -> None:
        end = begin + len(index)
        if priorities is None:
            values = [self._reverb.max_priority(table)] * len(index)
        else:
            values = priorities[begin:end].tolist()
            self._reverb.saw_priorities(table, priorities[begin:end])
        if not has_signature and layout not in self._structures:
            self._structures.append(layout)
        for i, line in enumerate(index.tolist()):
            columns = self._columns(layout, line, None if lengths is None else lengths[begin + i].tolist())
            if not has_signature:
                at = self._structures.index(layout)
                step = self._step(_STRUCTURES, at)
                columns.insert(0, self._history(_STRUCTURES, str(at))[step])
            self._writer.create_item(table, values[i], columns)
            self._unconfirmed = True

    def can_insert(self, table: str, n: int = 1) -> bool:
        self._reverb.settle()
        with self._lock:
            self._check_open()
            self.settle()
            return not self._unconfirmed and self._reverb.has_room(table, n)

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        with self._lock:
            self._check_open()
            self._wait_for(keep, None if timeout is None else time.monotonic() + timeout)

    def settle(self) -> None:
        """Everything created so far is in its table, as far as the rate limiters let it in.

        What a writer dropped when it was closed will not be in any."""
        with self._lock:
            if self._closed:
                return
            deadline = time.monotonic() + _SETTLE
            while self._unconfirmed and self._writer is not None:
                if self._flush_for(0, 0.02):
                    self._unconfirmed = False
                elif not self._reverb.all_have_room() or time.monotonic() > deadline:
                    return

    def settle_if_idle(self) -> None:
        """`settle` unless another thread is inside this writer, which may wait for the very reader that
        asks."""
        if self._before_read is not None:
            self._before_read()
        if self._lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._lock.release()

    def close(self, timeout: float | None = None) -> int:
        with self._lock:
            if self._closed:
                return 0
            dropped = 0
            try:
                self._wait_for(0, None if timeout is None else time.monotonic() + timeout)
            except (DeadlineExceededError, ServerClosed):
                dropped = self._count_pending()
            finally:
                self._closed = True
                self._late.close()
                self._reverb.forget_writer(self)
                if self._writer is not None:
                    self._writer.close()
                self._rows.close()
                self.store.close()
            return dropped

    def _check_open(self) -> None:
        if self._closed:
            raise ServerClosed("the writer was closed")
        self._late.check()

    def __enter__(self) -> ReverbWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # Sending.

    def _make_writer(self, layout: Layout) -> None:
        """A trajectory writer whose window holds any item of this layout, beside as much again."""
        needed = 4 * (layout.width + 1)
        if self._writer is not None and self._window >= needed:
            return
        if self._writer is not None:
            self._wait_for(0, None)
            self._writer.close()
        row_bytes = max(
            sum(column.itemsize * int(np.prod(column.shape[1:])) for column in stream.columns.values())
            for stream in self.store.streams.values()
        )
        low, high = _WINDOW_STEPS
        self._window = max(low, needed, min(high, _WINDOW_BYTES // max(1, row_bytes)))
        self._writer = self._reverb.native.trajectory_writer(self._window, validate_items=False)
        self._steps = 0
        self._histories = {}
        for sent in self._sent.values():
            sent.clear()

    def _step(self, stream: str, row: int, before: int = -1) -> int:
        """A step that holds the row; sends it if the writer has not got it, or not for much longer.

        It is another step than ``before``, the one that goes before it in the item: dm-reverb takes the same
        chunk twice in a row for one of twice the length. So rows that are repeated have a twin.
        """
        sent = self._sent[stream]
        key = row
        step = sent.get(row)
        if step == before and step is not None:
            key = ~row
            step = sent.get(key)
        # Half of the window is for rows that the item at hand may still bring in.
        if step is not None and self._steps - step <= self._window // 2:
            return step
        if stream == _STRUCTURES:
            data = {f"{stream}/{row}": describe_structure(nests.thaw(self._structures[row].structure))}
        else:
            data = {
                f"{stream}/{name}": column[row] for name, column in self.store.streams[stream].columns.items()
            }
        fresh = [name for name in data if name not in self._histories]
        for name in fresh:
            self._writer.configure((name,), num_keep_alive_refs=self._window, max_chunk_length=1)
        self._writer.append(data)
        if fresh:
            self._histories = self._writer.history
        step = sent[key] = self._steps
        self._steps += 1
        return step

    def _columns(self, layout: Layout, index: list[int], lengths: list[int] | None) -> list[Any]:
        groups: list[list[int]] = []
        at = 0
        for number, group in enumerate(layout.groups):
            count = group.length if lengths is None or not group.ragged else lengths[number]
            steps: list[int] = []
            for row in index[at : at + count]:
                steps.append(self._step(group.stream, row, steps[-1] if steps else -1))
            groups.append(steps)
            at += group.length
        columns = []
        for leaf in layout.leaves:
            steps = groups[leaf.group]
            history = self._history(layout.groups[leaf.group].stream, leaf.column)
            columns.append(history[steps] if leaf.time else history[steps[0]])
        return columns

    def _history(self, stream: str, column: str) -> Any:
        return self._histories[f"{stream}/{column}"]

    # Waiting.

    def _flush_for(self, in_flight: int, seconds: float) -> bool:
        """Whether at most ``in_flight`` items are unconfirmed within ``seconds``."""
        from reverb import errors

        try:
            # In dm-reverb 0 would wait for ever.
            self._writer.flush(in_flight, max(1, int(seconds * 1000)))
        except errors.DeadlineExceededError:
            return False
        return True

    def _wait_for(self, in_flight: int, deadline: float | None) -> None:
        """Waits until at most ``in_flight`` items are unconfirmed. Only a rate limiter makes the deadline
        pass: a server that is merely busy gets some seconds."""
        if self._writer is None or not self._unconfirmed:
            return
        busy_until = time.monotonic() + _SETTLE
        while True:
            left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
            if self._flush_for(in_flight, left):
                self._unconfirmed = in_flight > 0
                return
            if self._reverb.is_interrupted():
                raise ServerClosed("the client was interrupted while its items waited for room")
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                if now < busy_until and self._reverb.all_have_room():
                    continue
                raise DeadlineExceededError(
                    f"more than {in_flight} items still wait for room in their tables"
                )

    def _count_pending(self) -> int:
        """How many items are unconfirmed: the smallest number that dm-reverb agrees to wait for at once."""
        if self._flush_for(0, 0.001):
            return 0
        low, high = 0, 1
        while not self._flush_for(high, 0.001):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._flush_for(middle, 0.001) else (middle, high)
        return high
