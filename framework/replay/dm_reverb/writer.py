"""The writer for B envs, on top of a `reverb.TrajectoryWriter`.

dm-reverb's items refer to steps of one episode; items of this framework refer to any rows. Rows therefore
stay in a row store of this process until an item needs them. Then each row becomes a step of the trajectory
writer, and the item refers to these steps. Later items refer to the same steps while the writer keeps them,
so that the server too stores each row once. A row that the writer no longer keeps is sent again.

A chunk holds one step, for two reasons. Items could not refer to longer chunks in any order (dm-reverb 0.14
returns the wrong rows for a strided reference), and readers would receive whole chunks for one of their rows.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.dm_reverb.convert import check_priorities, describe_structure
from framework.replay.dm_reverb.tables import ServerTables
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import RowStore
from framework.replay.writer import BaseWriter
from framework.types import Nest

# dm-reverb prints warnings if about 64 items or more are in flight.
DEFAULT_IN_FLIGHT = 32
# Number of steps that dm-reverb's writer keeps for later items. It sends the names of all of them with each
# item, so long windows are slow: with one env, float32[4] observations and two shared cores, an item took
# 0.13 ms with 64 steps, 0.2 to 0.8 ms with 512 and 6 to 9 ms with 4,096. Sending a row again takes less.
_WINDOW = 128
_SLICE = 0.2  # seconds of a wait in dm-reverb between two checks whether it was interrupted
_SETTLE = 5.0  # seconds within which a server confirms items that no rate limiter delays
_STRUCTURES = "structure"  # the stream of the descriptions of structures


class ReverbWriter(BaseWriter):
    """See `contracts.Writer`.

    It differs in two ways. `create_items` returns no keys, because dm-reverb does not report them. When it
    returns, items may still be in flight, at most `max_in_flight_items` if the client is concurrent. A writer
    that is garbage-collected is closed with timeout 0.
    """

    _default_in_flight = DEFAULT_IN_FLIGHT

    def __init__(self, tables: ServerTables, max_in_flight_items: int | None = None) -> None:
        self._rows = RowStore()
        super().__init__(self._rows, max_in_flight_items, collections.deque())
        self._tables = tables
        self._writer: Any = None
        self._window = 0
        self._num_steps = 0
        # For each stream, the step of each row that was sent.
        self._sent: dict[str, dict[int, int]] = {_STRUCTURES: {}}
        self._histories: dict[str, Any] = {}
        self._structures: list[Layout] = []
        self._unconfirmed = False
        self._closed = False

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        with self._lock:
            if stream == _STRUCTURES:
                raise ValueError(f"stream: got {stream!r}, which is reserved. Use another name.")
            rows = super().append(stream, columns, rows)
            sent = self._sent.setdefault(stream, {})
            for row in rows.tolist() if sent else ():  # their contents have changed
                sent.pop(row, None)
                sent.pop(~row, None)
            return rows

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._ended or self._errors:
                self._raise()
            layout, index, lengths = self._builder.build(trajectory)
            described = self._tables.signature(table) is None
            if described and layout not in self._structures:
                self._structures.append(layout)
            if priorities is None:
                priorities = np.full(len(index), self._tables.max_priority(table))
            else:
                priorities = check_priorities(priorities, len(index))
                self._tables.saw_priorities(table, priorities)
            self._make_writer(layout)
            # Waits between bursts, which bounds the number of items in flight.
            burst = max(1, self._max_in_flight // 2)
            late: DeadlineExceededError | None = None
            for i, line in enumerate(index.tolist()):
                if i % burst == 0 and late is None and self._tables.concurrent:
                    try:
                        self._wait_for(max(0, self._max_in_flight - burst), deadline)
                    except DeadlineExceededError as error:  # the other items wait in dm-reverb's writer
                        late = error
                columns = self._columns(layout, line, None if lengths is None else lengths[i].tolist())
                if described:
                    at = self._structures.index(layout)
                    step = self._step(_STRUCTURES, at)  # creates the column
                    columns.insert(0, self._history(_STRUCTURES, str(at))[step])
                self._writer.create_item(table, float(priorities[i]), columns)
                self._unconfirmed = True
            if late is not None:
                raise late
            return np.zeros(0, np.uint64)

    @property
    def num_pending(self) -> int:  # type: ignore[override]  # the others count
        """Number of unconfirmed items: the smallest for which dm-reverb's `flush` returns at once."""
        with self._lock:
            if not self._unconfirmed or self._flush_for(0, 0.001):
                return 0
            low, high = 0, 1
            while not self._flush_for(high, 0.001):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._flush_for(middle, 0.001) else (middle, high)
            return high

    def can_insert(self, table: str, n: int = 1) -> bool:
        with self._lock:
            if self._ended or self._errors:
                self._raise()
            self.settle()
            return not self._unconfirmed and self._tables.has_room(table, n)

    def settle(self) -> None:
        """Waits until the created items are in their tables, as far as the rate limiters let them in.

        Does nothing while another thread is inside this writer: that thread may wait for the reader that
        calls.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._closed:
                return
            if self._before_read is not None:
                self._before_read()
            deadline = time.monotonic() + _SETTLE
            while self._unconfirmed and not self._flush_for(0, 0.02):
                if time.monotonic() > deadline or not self._tables.all_have_room():
                    return
            self._unconfirmed = False
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
                dropped = self.num_pending
            finally:
                self._closed, self._ended = True, ServerClosed("The writer was closed.")
                self._late.close()
                if self._writer is not None:
                    self._writer.close()
                self._rows.close()
            return dropped

    def __del__(self) -> None:
        self.close(timeout=0)

    # Sending.

    def _make_writer(self, layout: Layout) -> None:
        """Creates a trajectory writer whose window is twice as long as an item of this layout."""
        window = max(_WINDOW, 4 * (layout.width + 1))
        if self._window >= window:
            return
        if self._writer is not None:
            self._wait_for(0, None)
            self._writer.close()
        self._window = window
        self._writer = self._tables.native.trajectory_writer(window, validate_items=False)
        self._num_steps = 0
        self._histories = {}
        for sent in self._sent.values():
            sent.clear()

    def _step(self, stream: str, row: int, before: int = -1) -> int:
        """Returns a step that holds the row; sends the row if the writer does not keep it long enough.

        The step differs from `before`, the step before it in the item: dm-reverb reads the same chunk twice
        in a row as one chunk of twice the length. Repeated rows are therefore sent twice.
        """
        sent = self._sent[stream]
        key = row
        step = sent.get(row)
        if step == before and step is not None:
            key = ~row
            step = sent.get(key)
        # Half of the window is for rows that the current item may add.
        if step is not None and self._num_steps - step <= self._window // 2:
            return step
        if stream == _STRUCTURES:
            data = {f"{stream}/{row}": describe_structure(nests.thaw(self._structures[row].structure))}
        else:
            columns = self._rows.streams[stream].columns
            data = {f"{stream}/{name}": column[row] for name, column in columns.items()}
        fresh = [name for name in data if name not in self._histories]
        for name in fresh:
            self._writer.configure((name,), num_keep_alive_refs=self._window, max_chunk_length=1)
        self._writer.append(data)
        if fresh:
            self._histories = self._writer.history
        step = sent[key] = self._num_steps
        self._num_steps += 1
        return step

    def _columns(self, layout: Layout, line: list[int], lengths: list[int] | None) -> list[Any]:
        """Returns the arguments of dm-reverb's `create_item` for one line of the index."""
        groups: list[list[int]] = []
        for number, (group, (at, _)) in enumerate(zip(layout.groups, layout.spans, strict=True)):
            count = group.length if lengths is None or not group.ragged else lengths[number]
            steps: list[int] = []
            for row in line[at : at + count]:
                steps.append(self._step(group.stream, row, steps[-1] if steps else -1))
            groups.append(steps)
        columns = []
        for leaf in layout.leaves:
            steps = groups[leaf.group]
            history = self._history(layout.groups[leaf.group].stream, leaf.column)
            columns.append(history[steps] if leaf.time else history[steps[0]])
        return columns

    def _history(self, stream: str, column: str) -> Any:
        return self._histories[f"{stream}/{column}"]

    # Waiting.

    def _wait(self, timeout: float | None, keep: int) -> None:
        with self._lock:
            self._wait_for(keep, None if timeout is None else time.monotonic() + timeout)

    def _flush_for(self, in_flight: int, seconds: float) -> bool:
        """Returns whether at most `in_flight` items are unconfirmed within `seconds`."""
        from reverb import errors

        try:
            # In dm-reverb, 0 waits without a limit.
            self._writer.flush(in_flight, max(1, int(seconds * 1000)))
        except errors.DeadlineExceededError:
            return False
        return True

    def _wait_for(self, in_flight: int, deadline: float | None) -> None:
        """Waits until at most `in_flight` items are unconfirmed.

        Raises `DeadlineExceededError` only if a rate limiter refuses items: a busy server gets a few seconds.
        """
        busy_until = time.monotonic() + _SETTLE
        while self._unconfirmed:
            left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
            if self._flush_for(in_flight, left):
                self._unconfirmed = in_flight > 0
                return
            if self._tables.interrupted:
                raise ServerClosed("The client was interrupted while its items waited for room.")
            late = deadline is not None and time.monotonic() >= deadline
            if late and (time.monotonic() > busy_until or not self._tables.all_have_room()):
                raise DeadlineExceededError(
                    f"More than {in_flight} items still wait for room in their tables."
                )
