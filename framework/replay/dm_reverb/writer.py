"""The tables of a dm-reverb server as writers see them, and the writer for B envs.

The writer writes with a `reverb.TrajectoryWriter`.

dm-reverb's items refer to steps of one episode; items of this framework refer to any rows. Rows therefore
stay in a row store of this process until an item needs them. Then each row becomes a step of the trajectory
writer, and the item refers to these steps. Later items refer to the same steps while the writer keeps them,
so that the server too stores each row once. A row that the writer no longer keeps is sent again.

A chunk holds one step, for two reasons. Items could not refer to longer chunks in any order (dm-reverb 0.14
returns the wrong rows for a strided reference), and readers would receive whole chunks for one of their rows.
"""

from __future__ import annotations

import bisect
import collections
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import reverb

from framework.replay.dm_reverb import convert
from framework.replay.errors import (
    DeadlineExceededError,
    ServerClosed,
    ServerLost,
    WouldBlockError,
)
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import RowStore
from framework.replay.types import ByName, TableInfo, check_priorities
from framework.replay.writer import BatchWriter
from framework.replay.writers import NewItems, Writers
from framework.types import Nest

# Seconds to wait for a server of another process to start, including TensorFlow's import.
START_S = 120.0
# Timeout of one request to a running server, in seconds.
_ASK_S = 5
# dm-reverb prints warnings if about 64 items or more are in flight.
DEFAULT_IN_FLIGHT = 32
# Number of steps that dm-reverb's writer keeps for later items. It sends the names of all of them with each
# item, so long windows are slow: with one env, float32[4] observations and two shared cores, an item took
# 0.13 ms with 64 steps, 0.2 to 0.8 ms with 512 and 6 to 9 ms with 4,096. Sending a row again takes less.
_WINDOW = 128
# Shortest and longest wait in dm-reverb, in seconds, between two checks whether the client was interrupted.
_SHORT, _SLICE = 0.02, 0.2
_SETTLE_S = 5.0  # seconds within which a server confirms items that no rate limiter delays


class ServerTables:
    """The part of `Client` that its writers use: the tables at an address, and when to stop waiting for them.

    Args:
      address: address of the server, such as `"localhost:8000"`.
      concurrent: whether other threads use the tables too.
    """

    def __init__(self, address: str, concurrent: bool):
        #: The `reverb.Client`, for methods that this class does not have.
        self.native = reverb.Client(address)
        self.address: str | None = address
        self.concurrent = concurrent
        #: Notified when samples arrive, or when a waiting call must check whether it is interrupted.
        self.changed = threading.Condition()
        self.interrupted = False
        self.closed = False
        self._signatures: ByName[Nest] | None = None
        #: The largest priority that this client has set in each table.
        self.max_priorities: dict[str, float] = {}

    def check_open(self) -> None:
        """Raises `ServerClosed` if the server was stopped or the client closed."""
        if self.closed:
            raise ServerClosed("The server was stopped or the client closed.")

    def interrupt(self, close: bool = False) -> None:
        """Ends every waiting call with `ServerClosed`, and every later call that would wait.

        With `close`, every later call raises `ServerClosed`.
        """
        with self.changed:
            self.interrupted = True
            self.closed |= close
            self.changed.notify_all()

    def infos(self, timeout: float | None = None) -> ByName[TableInfo]:
        """Returns a description of each table.

        Args:
          timeout: seconds, rounded up to whole ones. None waits while the server starts, but not for a server
            that was lost, for which dm-reverb would wait without a limit.

        Raises:
          DeadlineExceededError: No server answers in time.
          ServerLost: The connection to the server was lost.
          ServerClosed: The server was stopped in this process, or the client closed.
        """
        self.check_open()
        seconds = _ASK_S if timeout is None else max(1, math.ceil(timeout))
        deadline = time.monotonic() + (START_S if timeout is None else 0)
        while True:
            try:
                infos = self.native.server_info(timeout=seconds).items()
                known = self.max_priorities
                return ByName({name: convert.to_info(info, known.get(name, 1.0)) for name, info in infos})
            except reverb.errors.DeadlineExceededError as error:
                self.check_open()
                if self.interrupted or time.monotonic() >= deadline:
                    raise DeadlineExceededError(f"No dm-reverb server answers at {self.address}.") from error
            except RuntimeError as error:  # the connection broke
                self.check_open()
                raise ServerLost(f"The dm-reverb server at {self.address} was lost: {error}") from error

    def signature(self, table: str) -> Nest:
        """Returns the table's signature or None.

        Raises:
          UnknownTableError: There is no such table.
          ServerClosed: The server was stopped in this process, or the client closed.
        """
        self.check_open()
        if self._signatures is None:
            self._signatures = ByName({name: info.signature for name, info in self.infos().items()})
        return self._signatures[table]

    def has_room(self, table: str, n: int) -> bool:
        """Returns whether the rate limiter lets n items in."""
        return convert.limiter_of(self.infos()[table]).allowed_inserts(n) == n

    def all_have_room(self) -> bool:
        """Returns whether the server answers and no rate limiter refuses an item."""
        try:
            infos = self.infos(_ASK_S)
        except (DeadlineExceededError, ServerClosed):
            return False
        return all(convert.limiter_of(info).allowed_inserts(1) for info in infos.values())

    def saw_priorities(self, table: str, priorities: np.ndarray) -> None:
        """Records the priorities that items of the table get."""
        if len(priorities):
            before = self.max_priorities.get(table, 0.0)
            self.max_priorities[table] = max(before, float(priorities.max()))


class ReverbWriter(BatchWriter):
    """See `BatchWriter`.

    It differs in two ways. `create_items` returns no keys, because dm-reverb does not report them. When it
    returns, items may still be in flight, at most `max_in_flight_items` if the client is concurrent. A writer
    that is garbage-collected is closed by the next call that reads.
    """

    _default_in_flight = DEFAULT_IN_FLIGHT

    def __init__(
        self,
        tables: ServerTables,
        max_in_flight_items: int | None,
        writers: Writers,
        has_room: Callable[[str, int], bool],
    ) -> None:
        self._rows = RowStore()
        super().__init__(self._rows, max_in_flight_items, writers, has_room)
        if not tables.concurrent:
            self._max_in_flight = sys.maxsize
        self._tables = tables
        self._writer: Any = None
        self._window = 0
        # By stream: the step of each row that was sent.
        self._sent: dict[str, dict[int, int]] = collections.defaultdict(dict)
        self._histories: dict[str, Any] = {}
        self._closed = False

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        with self.lock:
            rows = super().append(stream, columns, rows)
            sent = self._sent[stream]
            for row in rows.tolist() if sent else ():  # their contents have changed
                sent.pop(row, None)
                sent.pop(~row, None)
            return rows

    def _settle(self) -> None:
        self._confirm(0, time.monotonic())

    def _finish(self) -> int:
        if self._writer is not None:
            self._writer.close()
        self._rows.close()
        return self.num_pending

    # Sending.

    def _check(self, table: str, layout: Layout, items: NewItems) -> tuple[str, Layout]:
        items.keys = items.keys[:0]  # dm-reverb makes its own
        self._tables.signature(table)  # raises UnknownTableError
        if items.priorities is None:
            items.priorities = np.full(len(items.index), self._tables.max_priorities.get(table, 1.0))
        else:
            items.priorities = check_priorities(table, items.priorities, len(items.index))
            self._tables.saw_priorities(table, items.priorities)
        return table, layout

    def _push(self) -> None:
        self._filled = 0.0
        while self._items:
            self._send(*self._items.popleft())

    def _send(self, into: tuple[str, Layout], items: NewItems) -> None:
        table, layout = into
        self.num_pending -= len(items.index)
        described = self._tables.signature(table) is None
        priorities: Any = items.priorities
        self._make_writer(layout)
        refused = False  # by a rate limiter: then the items wait in dm-reverb's writer
        for i, line in enumerate(items.index.tolist()):
            if self.num_pending >= self._max_in_flight and not refused:
                refused = not self._confirm(self._max_in_flight // 2, time.monotonic())
            lengths = None if items.lengths is None else items.lengths[i].tolist()
            columns = self._columns(layout, line, lengths)
            if described:
                columns.insert(0, self._description(layout))
            self._writer.create_item(table, float(priorities[i]), columns)
            self.num_pending += 1

    def _make_writer(self, layout: Layout) -> None:
        """Creates a trajectory writer that keeps four times the steps of an item of this layout."""
        window = max(_WINDOW, 4 * (layout.width + 1))
        if self._window >= window:
            return
        if self._writer is not None:
            self._wait(None, 0)
            self._writer.close()
        self._window = window
        self._writer = self._tables.native.trajectory_writer(window, validate_items=False)
        self._histories = {}
        self._sent.clear()

    def _description(self, layout: Layout) -> Any:
        """Returns the column that describes the structure of items in a table without a signature."""
        stream = repr(layout.structure)
        if stream not in self._streams:
            described = json.dumps(layout.structure).encode()
            super().append(stream, {"structure": np.frombuffer(described, np.uint8)[None]})
        step = self._step(stream, 0, None)  # the only row of the stream
        return self._histories[f"{stream}/structure"][step]

    def _step(self, stream: str, row: int, before: int | None) -> int:
        """Returns a step that holds the row; sends the row if the writer does not keep it long enough.

        The step differs from `before`, the step before it in the item: dm-reverb reads the same chunk twice
        in a row as one chunk of twice the length. Repeated rows are therefore sent twice.
        """
        sent = self._sent[stream]
        key = row if before is None or sent.get(row) != before else ~row
        step, new = sent.get(key), self._writer.episode_steps
        # Half of the window is for rows that the current item may add.
        if step is not None and new - step <= self._window // 2:
            return step
        columns = self._rows.streams[stream].columns
        data = {f"{stream}/{name}": column[row] for name, column in columns.items()}
        fresh = [name for name in data if name not in self._histories]
        for name in fresh:
            self._writer.configure((name,), num_keep_alive_refs=self._window, max_chunk_length=1)
        self._writer.append(data)
        if fresh:
            self._histories = self._writer.history
        sent[key] = new
        return new

    def _columns(self, layout: Layout, line: list[int], lengths: list[int] | None) -> list[Any]:
        """Returns the arguments of dm-reverb's `create_item` for one line of the index."""
        groups: list[list[int]] = []
        for number, (group, (at, _)) in enumerate(zip(layout.groups, layout.spans, strict=True)):
            count = group.length if lengths is None or not group.ragged else lengths[number]
            steps: list[int] = []
            for row in line[at : at + count]:
                steps.append(self._step(group.stream, row, steps[-1] if steps else None))
            groups.append(steps)
        columns = []
        for leaf in layout.leaves:
            history = self._histories[f"{layout.groups[leaf.group].stream}/{leaf.column}"]
            columns.append(history[groups[leaf.group] if leaf.time else groups[leaf.group][0]])
        return columns

    # Waiting.

    def _wait(self, timeout: float | None, keep: int) -> None:
        concurrent = self._tables.concurrent
        # No other thread makes room if the client is not concurrent.
        seconds = timeout if concurrent else 0.0
        with self.lock:
            try:
                self._waits = True
                if not self._confirm(keep, None if seconds is None else time.monotonic() + seconds):
                    error = DeadlineExceededError if concurrent else WouldBlockError
                    raise error(f"{self.num_pending} items still wait for room in their tables.")
            finally:
                self._waits = False

    def _flush_for(self, in_flight: int, seconds: float) -> bool:
        """Returns whether at most `in_flight` items are unconfirmed within `seconds`."""
        try:
            # In dm-reverb, 0 waits without a limit.
            self._writer.flush(in_flight, max(1, int(seconds * 1000)))
        except reverb.errors.DeadlineExceededError:
            return False
        return True

    def _confirm(self, keep: int, deadline: float | None) -> bool:
        """Waits until at most `keep` items are unconfirmed; returns whether that is so by the deadline.

        After the deadline, continues for a few seconds while no rate limiter refuses items, because the
        server is then only busy.
        """
        busy_until = time.monotonic() + _SETTLE_S
        while self.num_pending > keep:
            left = _SLICE if deadline is None else deadline - time.monotonic()
            if self._flush_for(keep, min(max(left, _SHORT), _SLICE)):
                self.num_pending = keep
                break
            now, interrupted = time.monotonic(), self._tables.interrupted
            late = deadline is not None and now >= deadline
            if interrupted or (late and (now > busy_until or not self._tables.all_have_room())):
                # The number of unconfirmed items is the smallest for which dm-reverb's flush returns at once.
                self.num_pending = bisect.bisect_left(
                    range(self.num_pending), True, key=lambda count: self._flush_for(count, 0.001)
                )
                if interrupted:
                    raise ServerClosed("The client was interrupted while its items waited for room.")
                return self.num_pending <= keep
        return True
