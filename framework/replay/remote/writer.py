"""The writer of a client in another process than the server.

The server leases rows to the writer in blocks. On the server's machine, the writer writes them into shared
memory; from elsewhere, arrays travel with the items. One message holds items and released rows, and asks for
the next rows. Its answer comes when all of its items are in their tables:

```text
append ──▶ rows ──────────▶ shared memory              (or arrays of the next message)
create_items ─▶ queue ─▶ insert [items, released rows, rows wanted]
                             ◀─ answer [leased rows]
```

A writer ends with its session. When the server is lost, items in flight are lost and counted, and every later
call raises `ServerLost`. The caller creates a new writer.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from framework.replay.errors import (
    DeadlineExceededError,
    ReverbError,
    ServerClosed,
    ServerLost,
    UnknownTableError,
)
from framework.replay.remote.connection import LAST_WORDS_S, Interrupted, ReplayConnection, SessionLost
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import ColumnSpec, bytes_of
from framework.replay.types import check_priorities
from framework.replay.wire import MAX_LAYOUTS, unpack_error
from framework.replay.writer import BatchWriter
from framework.replay.writers import HeldRows, NewItems, Writers, joined

# While this many messages wait at the server, single items wait for others longer.
_MAX_MESSAGES = 64
_SEND_ROWS = 4096  # released rows that are sent without items
_SEND_BYTES = 1 << 20  # bytes of written rows that are sent without items
_ARRAY_BYTES = 128  # about what the description of an array takes
_MAX_LEASE = 1 << 20  # rows that a server leases at once
_LEASE_ROWS, _LEASE_BYTES = 512, 1 << 20  # a block of leased rows has at most this many rows and bytes

_DELAY_S = 0.005  # for which single items wait for others

_Answer = TypeVar("_Answer")


class ServedWriter(BatchWriter):
    """See the module, and `BatchWriter` for the methods.

    Args:
      connection: the writer's own.
      max_in_flight_items: items that may wait for room before `create_items` waits too; None for 512.
      writers: the client's.
      has_room: the client's `can_insert`.

    Attributes:
      num_lost: items that were in flight when the server was lost.
      look_s: seconds after which single items are sent that waited because many messages did.
    """

    look_s = 0.25

    _held_back = 64

    def __init__(
        self,
        connection: ReplayConnection,
        max_in_flight_items: int | None,
        writers: Writers,
        has_room: Callable[[str, int], bool],
    ) -> None:
        super().__init__(None, max_in_flight_items, writers, has_room)
        self.num_lost = 0
        self._connection = connection
        self._layouts: dict[Layout, int] = {}  # those that the server knows
        # What the next message brings beside items.
        self._defined: list[list[Any]] = []  # layouts
        self._written: list[list[Any]] = []  # rows, to a server elsewhere
        self._released: list[tuple[str, np.ndarray]] = []  # streams and rows
        self._wanted: dict[str, int] = {}  # numbers of rows, by stream
        self._in_flight: dict[int, int] = {}  # the number of items of each message that was not answered
        self._failed = 0  # items that the server has refused
        self._timer: threading.Timer | None = None
        self._closed = False

    def end_in_child(self) -> None:
        """Ends this writer in a forked child: its rows and its session are the parent's."""
        # Another thread of the parent may have held their locks.
        self.lock, self._writers = threading.RLock(), Writers()
        self._ended = ServerLost("writer: got a call in a forked process. Make a new writer there.")

    def end(self, until: float | None = None) -> None:
        self._connection.give_up_soon()
        super().end(until)

    def _finish(self) -> int:
        try:
            if self.num_pending and self._ended is None:
                # Some of a message may be in its table: the server says how many, once it has stopped trying.
                with contextlib.suppress(ReverbError):
                    self._call(self._connection.post, {"op": "cancel"})
                    answer = self._call(self._connection.request, {"op": "sync"}, LAST_WORDS_S)
                    self.num_pending = self._created - self._failed - int(answer["inserted"])
        finally:
            self._connection.close()
        return self.num_pending + self._failed + self.num_lost

    # --- rows ---

    def _declare(self, stream: str, held: HeldRows | None, columns: Mapping[str, ColumnSpec]) -> HeldRows:
        message = {
            "op": "declare",
            "name": stream,
            "stream": None if held is None else held.stream,
            "columns": {name: [list(shape), dtype.str] for name, (shape, dtype) in columns.items()},
        }
        answer = self._call(self._connection.request, message)
        held = held or HeldRows(answer["stream"])
        mapped = self._connection.mapped
        for name, (own, path, shape, dtype) in answer["columns"].items():
            held.names[name] = own
            if mapped.local:
                held.columns[name] = mapped.column(held.stream, own, path, shape, dtype)
        held.block = min(_LEASE_ROWS, _LEASE_BYTES // max(1, bytes_of({**held.specs, **columns})))
        return held

    def _lease(self, held: HeldRows, n: int) -> np.ndarray:
        """Takes spare rows. Asks for more now if needed, and with the next message if few are left."""
        short = n - len(held.spare)
        if short > 0:
            message = {"op": "lease", "stream": held.stream}
            most = max(short, min(2 * short, _MAX_LEASE), held.block)
            try:
                answer = self._call(self._connection.request, {**message, "n": most})
            except MemoryError:  # no room for more than needed
                answer = self._call(self._connection.request, {**message, "n": short})
            held.spare = np.concatenate([held.spare, answer["rows"]])
        rows, held.spare = held.spare[:n].copy(), held.spare[n:]
        if len(held.spare) < n:
            self._wanted[held.stream] = max(2 * n, held.block)
        return rows

    def _send_rows(self, held: HeldRows, rows: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        copies = {held.names[name]: array.copy() for name, array in arrays.items()}
        self._written.append([held.stream, rows, copies])
        self._filled += sum(array.nbytes + _ARRAY_BYTES for array in copies.values()) / _SEND_BYTES
        if self._filled >= 1.0:
            self._push()

    def _free(self, stream: str, rows: np.ndarray) -> None:
        self._released.append((stream, rows.copy()))
        self._filled += len(rows) / _SEND_ROWS
        if self._filled >= 1.0:
            self._push()

    # --- items ---

    def _check(self, table: str, layout: Layout, items: NewItems) -> str:
        tables = self._connection.welcome["tables"]
        if table not in tables:
            raise UnknownTableError(f"table {table!r} was not found; the server has {tables}")
        if items.priorities is not None:
            items.priorities = check_priorities(table, items.priorities, len(items.keys))
        if layout not in self._layouts:
            if len(self._layouts) == MAX_LAYOUTS:
                raise ValueError(
                    f"items: got more than {MAX_LAYOUTS} combinations of their columns' lengths from one "
                    "writer. Write columns of varying length with `lengths`: they all count as one."
                )
            self._layouts[layout] = len(self._layouts)
            self._defined.append([self._layouts[layout], layout.to_wire()])
        items.layout = self._layouts[layout]
        return table

    def _push(self) -> None:
        """Sends the message, if it holds anything other than a request for rows."""
        if not (self._items or self._written or self._released):
            return
        items, count = [], 0
        released: dict[str, list[np.ndarray]] = {}
        for table, new in joined(self._items):
            fields = new.layout, new.index, new.lengths, new.keys, new.priorities, new.episodes
            items.append([table, *fields])
            count += len(new.keys)
        for stream, rows in self._released:
            released.setdefault(stream, []).append(rows)
        message = {
            "op": "insert",
            "layouts": self._defined,
            "write": self._written,
            "items": items,
            "release": [[stream, np.concatenate(each)] for stream, each in released.items()],
            "lease": self._wanted,
        }
        try:
            self._in_flight[self._call(self._connection.post, message)] = count
            for sent in (self._items, self._defined, self._written, self._released, self._wanted):
                sent.clear()
            self._filled = 0.0
        except BaseException as error:
            self._end_if_interrupted(error)
            raise
        self._collect(0.0)

    def _hold_back(self, delay: float | None = None) -> None:
        """Starts a thread that sends single items that no others follow, as Reverb's writers have one."""
        if self._timer is None:
            delay = _DELAY_S if delay is None else delay
            self._timer = threading.Timer(delay, _push_late, [weakref.ref(self)])
            self._timer.daemon = True
            self._timer.start()

    def _push_late(self) -> None:
        with self.lock:
            if self._timer is not None:
                self._timer.cancel()  # one timer at a time, whoever calls this
            self._timer = None
            if self._ended is not None:
                return
            try:
                self._collect(0.0)
                if len(self._in_flight) < _MAX_MESSAGES:
                    self._push()
                elif self._items:
                    self._hold_back(self.look_s)
            except Exception as error:  # raised by the next call
                self._errors.append(error)

    def _settle(self) -> None:
        """Asks the server which of the items created so far it could insert."""
        self._push()
        self._call(self._connection.request, {"op": "sync"})
        self._collect(0.0)

    def _collect(self, timeout: float | None, watch: bool = True) -> bool:
        """Waits up to `timeout` seconds for answers to inserts, and notes them. Returns whether any came.

        An interrupt of the client ends the wait if `watch` is true, also one from before this call.
        """
        until = None if timeout is None else time.monotonic() + timeout
        watch = watch and timeout != 0.0
        if not self._connection.answers:
            while self._call(self._connection.receive, until, watch):
                until, watch = 0.0, False  # only those that have arrived
        stopped: ServerClosed | None = None
        try:
            answers, self._connection.answers = self._connection.answers, {}
            for number, answer in answers.items():
                if (count := self._in_flight.pop(number, None)) is None:
                    continue
                error = unpack_error(answer["error"]) if "error" in answer else None
                if isinstance(error, ServerClosed):  # `_finish`, which cancels requests, does not come here.
                    stopped = error
                    continue
                self.num_pending -= count
                if error is not None:
                    self._failed += count
                    self._errors.append(error)
                    continue
                for stream, rows in answer["rows"].items():
                    held = self._owned[stream]
                    held.spare = np.concatenate([held.spare, rows])
        except BaseException as raised:
            self._end_if_interrupted(raised)
            raise
        if stopped is not None:
            self._end(stopped)
            raise stopped
        return bool(answers)

    def _wait(self, timeout: float | None, keep: int) -> None:
        with self.lock:
            self._push()  # also rows that were released
            # Read once: an interrupt from here on must end the wait, wherever in the loop it comes.
            interrupted = self._connection.wake.is_set
            if interrupted:
                timeout = LAST_WORDS_S if timeout is None else min(timeout, LAST_WORDS_S)
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                self._waits = True
                while self.num_pending > keep:
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    came = self._collect(left, not interrupted)
                    if came or deadline is None or time.monotonic() < deadline:
                        continue
                    # An answer may be on its way: it comes before the answer to this.
                    why = self._call(self._connection.request, {"op": "sync"})["why"]
                    self._collect(0.0)
                    if self.num_pending > keep:
                        if self._connection.wake.is_set:
                            raise Interrupted
                        raise DeadlineExceededError(f"{self.num_pending} items wait for room: {why}")
            finally:
                self._waits = False
            if self._errors:
                raise self._errors.popleft()

    # --- the session ---

    def _call(self, method: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Calls a method of the connection; opens the session at first, and ends the writer with it."""
        try:
            if not self._connection.session:
                self._connection.open()
            return method(*arguments)
        except SessionLost:
            text = f"the replay server of this writer was lost with {self.num_pending} items in flight"
            error: ServerClosed = ServerLost(text)
        except ServerClosed as closed:
            if isinstance(closed, Interrupted) or not self._connection.session:
                raise
            error = closed
        except BaseException:
            # A request without an answer (too late, Ctrl-C) ends the session, and the server gives the rows
            # to others: this writer must not write them any more.
            if self._connection.session and not self._connection.is_open:
                self._end(ServerLost("the session of this writer ended in the middle of a call"))
            raise
        self._end(error)
        raise error

    def _end_if_interrupted(self, error: BaseException) -> None:
        """Ends the writer after an interrupt that may have come between a message and its record."""
        if not isinstance(error, Exception):
            self._end(ServerLost("the session of this writer was interrupted in the middle of a call"))

    def _end(self, error: ServerClosed) -> None:
        """Makes every later call raise `error`; what is in flight is lost."""
        self._ended = error
        self.num_lost, self.num_pending = self.num_lost + self.num_pending, 0  # an interrupt may end it twice
        self._connection.close()


def _push_late(reference: weakref.ref[ServedWriter]) -> None:
    writer = reference()
    if writer is not None:
        writer._push_late()
