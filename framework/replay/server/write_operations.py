"""What a served replay does with what writers send: rows are leased and written, items inserted; see
``framework.replay.server.operations`` for the messages."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, UnknownTableError
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import RowStore, Stream
from framework.replay.server.service import Parked, Reply, Session
from framework.replay.server.sessions import Held, Leases
from framework.replay.shm import SharedMemory
from framework.replay.tables.table import Table

# Writers whose last insert is remembered, so that what they send again after a lost connection counts once.
_MAX_WRITERS = 16384
_MAX_LEASE = 1 << 20


class WriteOperations:
    """The writing half of ``Operations``; see there for the arguments."""

    def __init__(self, tables: dict[str, Table], store: RowStore, memory: SharedMemory) -> None:
        self._tables = tables
        self._store = store
        self._memory = memory
        self._leases: dict[str, Leases] = {}
        self._writers: OrderedDict[str, list[int]] = OrderedDict()  # [seq, items of it that are in]

    def _table(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            raise UnknownTableError(f"table {name!r} was not found; this server has {sorted(self._tables)}")
        return table

    def _declare(self, session: Session, message: dict[str, Any]) -> Reply:
        name = message["stream"]
        columns = {key: (tuple(shape), np.dtype(kind)) for key, (shape, kind) in message["columns"].items()}
        if any(not key or not isinstance(key, str) for key in (name, *columns)):
            raise ValueError(f"stream and column names: got {[name, *columns]}, expected non-empty strings")
        stream = self._store.stream(name, columns)
        if name not in self._leases:
            self._leases[name] = Leases(stream)
        return {"files": self._files(stream, list(columns))}

    def _files(self, stream: Stream, columns: Sequence[str]) -> dict[str, list[Any]]:
        if self._store.compress:
            return {}
        return {
            name: [self._memory.path(stream.name, name), list(array.shape), array.dtype.str]
            for name in columns
            for array in [stream.columns[name]]
        }

    def _lease(self, session: Session, message: dict[str, Any]) -> Reply:
        n = int(message["n"])
        if not 0 < n <= _MAX_LEASE:
            raise ValueError(f"lease: got n = {n}, expected 1 to {_MAX_LEASE}")
        held: Held = session.state["held"]
        return {"rows": self._leases[message["stream"]].lease(held.number, n)}

    def _insert(self, session: Session, message: dict[str, Any]) -> Reply | Parked | None:
        held: Held = session.state["held"]
        writer, seq = str(message["writer"]), int(message["seq"])
        for number, layout in message.get("layouts", {}).items():
            held.layouts[int(number)] = Layout.from_wire(layout)

        def release() -> None:
            for name, rows in message.get("release", ()):
                self._leases[name].release(held.number, rows)

        def failed(error: BaseException) -> Reply:
            with contextlib.suppress(ValueError, KeyError):  # the error that is reported came first
                release()
            return {"notice": "failed", "seq": seq, "error": wire.pack_error(error)}

        try:
            for name, rows, columns in message.get("write", ()):
                leases = self._leases[name]
                leases.check(held.number, rows)
                span = leases.stream.span(rows)
                for column, values in columns.items():
                    leases.stream.columns[column][span] = values
            batches = [self._batch(held, item) for item in message["items"]]
        except (ValueError, KeyError, MemoryError, TypeError) as error:
            return failed(error)

        def attempt() -> Reply | None:
            if held.abandoned:
                return {"notice": "dropped", "seq": seq}
            # Looked up when it is this message's turn: the one before it may have waited until now.
            progress = self._writers.setdefault(writer, [seq, 0])
            self._writers.move_to_end(writer)
            while len(self._writers) > _MAX_WRITERS:
                self._writers.popitem(last=False)
            if progress[0] < seq:
                progress[:] = [seq, 0]
            begin = 0
            for table, layout, index, lengths, keys, priorities, episodes in batches:
                end = begin + len(index)
                done = progress[1] - begin if progress[0] == seq else len(index)
                if done < len(index):
                    rest = [None if a is None else a[done:] for a in (priorities, keys, lengths, episodes)]
                    try:
                        table.insert(layout, index[done:], *rest, timeout=0)
                    except DeadlineExceededError as error:
                        progress[1] += int(error.args[1])
                        return None
                    except ValueError as error:
                        progress[1] = end
                        return failed(error)
                    progress[1] = end
                begin = end
            try:
                release()
            except ValueError as error:
                return failed(error)
            return {"notice": "ack", "seq": seq}

        tables = {batch[0] for batch in batches}

        def entered(change: int) -> None:
            for table in tables:
                table.count_waiting(1, change)

        return Parked(("insert", session.identity), attempt, entered=entered)

    def _abandon(self, session: Session, message: dict[str, Any]) -> Reply:
        session.state["held"].abandoned = True
        seq, done = self._writers.get(str(message["writer"]), (0, 0))
        return {"seq": seq, "done": done}

    def _batch(self, held: Held, item: Sequence[Any]) -> tuple[Any, ...]:
        name, number, index, lengths, keys, priorities, episodes = item
        table = self._table(name)
        layout = held.layouts[number]
        n = len(index)
        if index.dtype != np.int64 or index.shape != (n, layout.width):
            raise ValueError(f"index: got {index.dtype}{index.shape}, expected int64 [{n}, {layout.width}]")
        for label, array, shape, dtype in (
            ("keys", keys, (n,), np.uint64),
            ("episodes", episodes, (n,), np.uint64),
            ("lengths", lengths, (n, len(layout.groups)), np.int32),
        ):
            if array is not None and (array.shape != shape or array.dtype != dtype):
                raise ValueError(
                    f"{label}: got {array.dtype}{array.shape}, expected {np.dtype(dtype)}{shape}"
                )
        if lengths is not None and n:
            most = np.array([group.length for group in layout.groups])
            if (lengths < 1).any() or (lengths > most).any():
                raise ValueError(
                    f"lengths: got {lengths.min()} to {lengths.max()}, expected 1 to {most.tolist()}"
                )
        if priorities is not None:
            priorities = table.check_priorities(priorities, n)
        at = 0
        for group in layout.groups:
            if group.stream not in self._leases:
                raise ValueError(f"stream {group.stream!r} was never written")
            self._leases[group.stream].check(held.number, index[:, at : at + group.length].ravel())
            at += group.length
        table.bind(layout)
        return table, layout, index, lengths, keys.copy(), priorities, episodes
