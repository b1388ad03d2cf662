"""A writer's conversation with its server: what is sent, what was acknowledged, and what is sent again after
the connection was lost; see ``framework.replay.remote.writer``."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, ReverbError, ServerClosed
from framework.replay.remote.connection import Connection, SessionLost
from framework.replay.remote.mapping import Mirror
from framework.replay.remote.writer_rows import WriterRows
from framework.replay.rows.layout import Layout

_ABANDON = 0.5  # seconds after its timeout in which a writer that is closed asks what has got in
_LAST_WORDS = 2.0  # seconds for which an interrupted writer still waits for its server


@dataclass
class Batch:
    """What goes into one message: items and released rows, in the writer's own row numbers."""

    items: list[tuple] = field(
        default_factory=list
    )  # (table, layout, index, lengths, keys, priorities, episodes)
    released: list[tuple[str, np.ndarray]] = field(default_factory=list)
    num_items: int = 0
    num_released: int = 0


class WriterSession:
    """The half of ``ServedWriter`` that talks to the server; its caller holds the lock.

    Args:
      connection: the writer's own.
      mirror: returns the view of the server's memory that fits the connection's session.
      local: whether to write into shared memory if that is possible.
    """

    def __init__(self, connection: Connection, mirror: Callable[[Connection], Mirror], local: bool) -> None:
        self._connection = connection
        self._find_mirror = mirror
        self._may_be_local = local
        self._name = uuid.uuid4().hex
        self._streams: dict[str, WriterRows] = {}
        self._layouts: dict[Layout, int] = {}
        self._told: set[int] = set()  # layouts that this session knows
        self._pending = Batch()
        self._unacknowledged: OrderedDict[int, Batch] = OrderedDict()
        self._in_flight = 0
        self._seq = 0
        self._session = 0
        self._failure: BaseException | None = None
        self._num_failed = 0
        self._waits = False  # somebody in here waits for the server
        connection.notices = self._notice

    def _declare(self, held: WriterRows, columns: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        wanted = {name: [list(shape), dtype.str] for name, (shape, dtype) in columns.items()}
        answer = self._connection.request(
            {"op": "declare", "stream": held.name, "columns": wanted}, wait=False
        )
        mirror = self._find_mirror(self._connection)
        if self._may_be_local and mirror.local:
            mapped = mirror.add(held.name, answer["files"]).columns
            held.add_columns(columns, mapped)
        else:
            held.add_columns(columns, None)

    def _in_session(self, action: Callable[[], Any]) -> Any:
        """Runs ``action`` in an open session; again from its beginning if the session ends in between."""
        while True:
            try:
                if self._session != self._connection.session or not self._session:
                    self._recover()
                return action()
            except SessionLost:
                self._session = 0

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._in_session(lambda: self._connection.request(dict(message), wait=False))

    def _recover(self) -> None:
        """Opens a session and brings into it what this writer holds."""
        self._connection.open()
        first = self._session == 0 and self._seq == 0 and not self._streams
        self._told.clear()
        self._session = self._connection.session
        if first:
            return
        for held in self._streams.values():
            held.forget_server()
            if held.specs:
                self._declare(held, held.specs)
            rows = np.zeros(0, np.int64)
            if held.num_live:
                message = {"op": "lease", "stream": held.name, "n": held.num_live}
                rows = self._connection.request(message, wait=False)["rows"]
            held.move(rows)
        for seq, batch in self._unacknowledged.items():
            self._send(seq, batch)

    def _send_pending(self) -> None:
        if not (self._pending.items or self._pending.released):
            return
        batch, self._pending = self._pending, Batch()
        self._seq += 1
        # Noted before it is sent: if the session ends here, the next one sends it.
        self._unacknowledged[self._seq] = batch
        try:
            if self._session and self._session == self._connection.session:
                self._send(self._seq, batch)
                self._connection.poll(0.0)
                return
        except SessionLost:
            self._session = 0
        self._in_session(lambda: None)

    def _send(self, seq: int, batch: Batch) -> None:
        layouts: dict[str, Any] = {}
        items = []
        for table, layout, index, lengths, keys, priorities, episodes in batch.items:
            number = self._layouts.setdefault(layout, len(self._layouts))
            if number not in self._told:
                self._told.add(number)
                layouts[str(number)] = layout.to_wire()
            rows = np.empty_like(index)
            at = 0
            for group in layout.groups:
                end = at + group.length
                rows[:, at:end] = self._streams[group.stream].server_rows(index[:, at:end])
                at = end
            items.append([table, number, rows, lengths, keys, priorities, episodes])
        message = {
            "op": "insert",
            "writer": self._name,
            "seq": seq,
            "layouts": layouts,
            "write": [part for held in self._streams.values() for part in held.unsent()],
            "items": items,
            "release": [[name, self._streams[name].server_rows(rows)] for name, rows in batch.released],
        }
        self._connection.post(message)

    def _notice(self, message: dict[str, Any]) -> None:
        if message.get("notice") not in ("ack", "failed"):
            return
        batch = self._unacknowledged.pop(message.get("seq", 0), None)
        if batch is None:
            return
        self._in_flight -= batch.num_items
        for name, rows in batch.released:
            self._streams[name].free(rows)
        if message["notice"] == "failed":
            self._num_failed += batch.num_items
            self._failure = wire.unpack_error(message["error"])

    def _wait_until(self, done: Callable[[], bool], timeout: float | None) -> None:
        if self._connection.interrupted:
            timeout = _LAST_WORDS if timeout is None else min(timeout, _LAST_WORDS)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done():
            self._waits = True
            try:
                came = self._in_session(lambda: self._connection.poll(_left(deadline)))
            finally:
                self._waits = False
            if not came and deadline is not None and time.monotonic() >= deadline:
                if self._connection.interrupted:
                    raise ServerClosed("this client was interrupted: its program stops")
                raise DeadlineExceededError(
                    f"{self._in_flight} items are still waiting for room in their tables"
                )

    def _abandon(self) -> int:
        """Takes back what is not in its table; how many items of messages without an answer are in theirs."""
        try:
            message = {"op": "abandon", "writer": self._name}
            answer = self._connection.request(message, timeout=_ABANDON, wait=False)
        except (ReverbError, SessionLost):  # the server is gone or does not answer: nothing is known to be in
            return 0
        return int(answer["done"]) if answer["seq"] in self._unacknowledged else 0


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
