"""What a replay server does with the messages of its clients. Runs on the thread of `Service` only.

Every message has an `op`, and an `id` if it is to be answered. The operations and their fields:

- `hello`: `protocol` → `server` (a name of this life of the server), `directory`, `tables`, `stream_bytes`.
- `lease`: `name` of a stream, `stream` (the server's name, None before the first lease), `columns {name:
  [shape, dtype]}` to add, `n` → `stream`, `columns {name: [column, path, shape, dtype]}`, `rows` int64 `[n]`.
- `insert`: `layouts [[number, layout]]`, `write [[stream, rows, {column: array}]]`, `items [[table, layout,
  index, lengths, keys, priorities, episodes]]`, `release [[stream, rows]]`, `lease {stream: n}` → `rows
  {stream: rows}`, once all items are in their tables. The inserts of one client are carried out in order.
- `sample`: `table`, `n`, `timeout`, `local`, `hold`, `pad` → `info`, `define`, and `parts` (rows) or
  `layout`, `leaves` and `lengths` (arrays), and `delivery` if the client has to end it.
- `give_back`: `deliveries` that were not used.
- `update`: `table`, `keys`, `priorities`, `deletes`.
- `sync`: nothing → `inserted`, how many items of this client are in tables. It was sent after all that the
  client has sent before, so its answer comes after the answers to what could be carried out.
- `reset`, `can_sample`, `can_insert`, `weight`, `info`, `checkpoint`.
- `cancel` (of `Service`): requests of this client that wait are answered with an error.

Any message may carry `done`: the deliveries of which the client has read the rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay import info as infos
from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, UnknownTableError
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import RowStore
from framework.replay.server.sessions import Leases, Reply, Session, Waiting
from framework.replay.shm import SharedMemory
from framework.replay.tables.items import Delivery, NewItems
from framework.replay.tables.table import Table
from framework.replay.types import PaddedSample

_MAX_LEASE = 1 << 20
# What one request may ask for: samples, and bytes of arrays in one answer.
_MAX_SAMPLES = 1 << 20
_MAX_ANSWER_BYTES = 1 << 30
_MAX_LAYOUTS = 4096  # of one client


class Operations:
    """The `Handler` of a replay server.

    Args:
      tables: by name, attached to `store`.
      store: whose columns are in `memory`.
      memory: the server's shared memory.
      checkpoint: writes a checkpoint and returns its path.
      wake: has the service try the requests that wait; set once there is a service.
    """

    def __init__(
        self, tables: dict[str, Table], store: RowStore, memory: SharedMemory, checkpoint: Callable[[], str]
    ) -> None:
        self._tables = tables
        self._store = store
        self._memory = memory
        self.checkpoint = checkpoint
        self.wake: Callable[[], None] = lambda: None
        self.leases: dict[str, Leases] = {}
        # Random, so that those of an earlier life of this server mean nothing.
        self.next_delivery = itertools.count(secrets.randbits(48)).__next__
        self._server = secrets.token_hex(16)
        # A client that can read this file is of this user and on this machine, and may use the memory.
        with open(os.path.join(memory.directory, "proof"), "w") as file:
            file.write(self._server)
        self._operations: dict[str, Callable[[Session, dict[str, Any]], Reply | Waiting]] = {
            "lease": self._lease,
            "insert": functools.partial(_Insert, self),
            "sync": self._sync,
            "sample": functools.partial(_Sample, self),
            "give_back": self._give_back,
            "update": self._update,
            "reset": self._reset,
            "can_sample": self._can_sample,
            "can_insert": self._can_insert,
            "weight": self._weight,
            "info": self._info,
            "checkpoint": functools.partial(_Save, self),
        }

    def open(self, session: Session) -> Reply:
        """Answers `hello`."""
        protocol = session.hello.get("protocol")
        if type(protocol) is not int or protocol != wire.PROTOCOL:
            raise ValueError(
                f"protocol: got {protocol!r}, expected {wire.PROTOCOL}. Use the same version on both sides."
            )
        return {
            "server": self._server,
            # Compressed columns cannot be read in place: such a server's clients are all remote.
            "directory": "" if self._store.compress else self._memory.directory,
            "tables": sorted(self._tables),
        }

    def handle(self, session: Session, message: dict[str, Any]) -> Reply | Waiting:
        """Carries out one message; see the module."""
        operation = self._operations.get(message["op"])
        if operation is None:
            raise ValueError(f"op: got {message['op']!r}, expected one of {sorted(self._operations)}")
        try:
            for number in message.get("done", ()):
                self._settle(session, number, True)
            return operation(session, message)
        except (IndexError, AttributeError, OverflowError) as error:  # the fields have other types than ours
            raise ValueError(f"{message['op']}: got a message that is not valid: {error}") from error

    def close(self, session: Session) -> None:
        """Takes back what a session held. Samples that its client has not confirmed were never drawn."""
        for number, (_, _, held) in list(session.deliveries.items()):
            self._settle(session, number, not held)
        for leases in self.leases.values():
            leases.release_all(session.number)

    def table(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            raise UnknownTableError(f"table {name!r} was not found; this server has {sorted(self._tables)}")
        return table

    # --- writing ---

    def _lease(self, session: Session, message: dict[str, Any]) -> Reply:
        columns = {key: (tuple(shape), np.dtype(kind)) for key, (shape, kind) in message["columns"].items()}
        if any(not key or not isinstance(key, str) for key in (message["name"], *columns)):
            raise ValueError(f"names: got {[message['name'], *columns]}, expected non-empty strings")
        n = _number(message, "n", 0, _MAX_LEASE)
        stream, names = self._store.claim(message["name"], columns, message["stream"])
        leases = self.leases.get(stream.name)
        if leases is None:
            leases = self.leases[stream.name] = Leases(stream)
        return {
            "stream": stream.name,
            "columns": {name: [own, *self.files(stream.name, own)] for name, own in names.items()},
            "rows": leases.lease(session.number, n),
        }

    def files(self, stream: str, column: str) -> list[Any]:
        """Path, shape and dtype of a column; an empty path if it cannot be mapped."""
        array = self._store.streams[stream].columns[column]
        path = "" if self._store.compress else self._memory.path(stream, column)
        return [path, list(array.shape), array.dtype.str]

    def _sync(self, session: Session, message: dict[str, Any]) -> Reply:
        return {"inserted": session.inserted}

    # --- reading ---

    def _give_back(self, session: Session, message: dict[str, Any]) -> Reply:
        for number in message["deliveries"]:
            self._settle(session, number, False)
        return {}

    def _settle(self, session: Session, number: int, used: bool) -> None:
        """Ends a delivery; numbers that mean nothing are ignored."""
        held = session.deliveries.pop(number, None)
        if held is not None:
            table, delivery, _ = held
            (table.release if used else table.give_back)(delivery)

    # --- the rest ---

    def _update(self, session: Session, message: dict[str, Any]) -> Reply:
        table = self.table(message["table"])
        table.mutate(message["keys"], message["priorities"], message["deletes"])
        return {}

    def _reset(self, session: Session, message: dict[str, Any]) -> Reply:
        self.table(message["table"]).reset()
        return {}

    def _can_sample(self, session: Session, message: dict[str, Any]) -> Reply:
        return {"value": bool(self.table(message["table"]).can_sample(int(message["n"])))}

    def _can_insert(self, session: Session, message: dict[str, Any]) -> Reply:
        return {"value": bool(self.table(message["table"]).can_insert(int(message["n"])))}

    def _weight(self, session: Session, message: dict[str, Any]) -> Reply:
        total, number = self.table(message["table"]).weight()
        return {"sum": total, "number": number}

    def _info(self, session: Session, message: dict[str, Any]) -> Reply:
        return {"tables": [infos.to_wire(table.info) for table in self._tables.values()]}


class _Insert(Waiting):
    """Items on their way into their tables, in order."""

    def __init__(self, operations: Operations, session: Session, message: dict[str, Any]) -> None:
        super().__init__(("insert", session.number), None)
        self.session = session
        self._operations = operations
        self._message = message
        self._batches: list[tuple[Table, NewItems]] | None = None  # None until it is this message's turn
        self._counted: dict[str, Table] = {}

    def attempt(self) -> Reply | None:
        session, message, leases = self.session, self._message, self._operations.leases
        error: Exception | None = None
        try:
            if self._batches is None:
                self._batches = self._check()
            while self._batches:
                table, items = self._batches[0]
                done = table.insert_now(items)
                session.inserted += done
                if done < len(items.keys):
                    self._batches[0] = table, items.part(done, len(items.keys))
                    if self.number and not self._counted:  # it waited behind others of its line until now
                        self.count(1)
                    return None
                del self._batches[0]
        except Exception as raised:
            error = raised
        for name, rows in message["release"]:  # after an error too: the client does not do it again
            leases[name].release(session.number, rows)
        if error is not None:
            raise error
        leased = {}
        for name, n in message["lease"].items():
            # Without room the client gets none. It asks again when it needs them, and is told why.
            with contextlib.suppress(MemoryError):
                leased[name] = leases[name].lease(session.number, max(0, min(int(n), _MAX_LEASE)))
        return {"rows": leased}

    def _check(self) -> list[tuple[Table, NewItems]]:
        """Writes the rows of the message and checks all of its items, before any of them is inserted."""
        session, message, leases = self.session, self._message, self._operations.leases
        for number, layout in message["layouts"]:
            if len(session.layouts) >= _MAX_LAYOUTS:
                raise ValueError(f"layouts: got more than {_MAX_LAYOUTS} from one client")
            session.layouts[int(number)] = Layout.from_wire(layout)
        for name, rows, columns in message["write"]:
            leases[name].check(session.number, rows)
            for column, values in columns.items():
                leases[name].stream.write(column, rows, values)
        batches = []
        for name, number, index, lengths, keys, priorities, episodes in message["items"]:
            table, layout, n = self._operations.table(name), session.layouts[number], len(index)
            for label, array, shape, dtype in (
                ("index", index, (n, layout.width), np.int64),
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
            at = 0
            for group in layout.groups:
                leases[group.stream].check(session.number, index[:, at : at + group.length].ravel())
                at += group.length
            items = table.new_items(layout, index, priorities, keys.copy(), lengths, episodes)
            batches.append((table, items))
        return batches

    def count(self, change: int) -> None:
        if change > 0:
            self._counted = {batch[0].name: batch[0] for batch in self._batches or ()}
        for table in self._counted.values():
            table.count_waiting(1, change)


class _Sample(Waiting):
    """Samples that are drawn as the rate limiter of their table allows."""

    def __init__(self, operations: Operations, session: Session, message: dict[str, Any]) -> None:
        self._table = operations.table(message["table"])
        self._n = _number(message, "n", 1, _MAX_SAMPLES)
        super().__init__(("sample", self._table.name), message["timeout"])
        self.session = session
        self._operations = operations
        self._message = message
        self._delivery: Delivery | None = None

    def attempt(self) -> Reply | None:
        before = self._delivery
        delivery = self._delivery = self._table.draw(self._n, before)
        if delivery is None or len(delivery.slots) < self._n:
            if delivery is not before:
                self._operations.wake()  # perhaps there are more: a large request lets others in between
            return None
        try:
            reply = self._describe(delivery)
        except BaseException:
            self.drop()
            raise
        self._delivery = None
        return reply

    def _describe(self, delivery: Delivery) -> Reply:
        """The answer for samples that were drawn; notes what the client holds of them."""
        session, message = self.session, self._message
        local, hold = bool(message["local"]), bool(message["hold"])
        reply: Reply = {"info": list(delivery.info), "define": []}
        if not local:
            n = len(delivery.slots)
            num_bytes = max(part[0].item_bytes for part in delivery.parts) * n
            if num_bytes > _MAX_ANSWER_BYTES:
                raise ValueError(
                    f"table {self._table.name!r}: got a request for {n} samples of {num_bytes} "
                    f"bytes, expected at most {_MAX_ANSWER_BYTES} bytes. Ask for smaller batches."
                )
            sample = delivery.gather(pad=bool(message["pad"]))
            reply["leaves"] = nests.flatten(sample.data)[0]
            if isinstance(sample, PaddedSample):
                reply["lengths"] = nests.flatten(sample.lengths)[0]
        parts = []
        for binding, places, index, lengths in delivery.parts:
            layout = binding.layout
            number = session.known.get(layout)
            if number is None:
                number = session.known[layout] = len(session.known)
                # A layout, and where its columns are: `[[stream, column, path, shape, dtype]]`.
                columns = {(layout.groups[leaf.group].stream, leaf.column) for leaf in layout.leaves}
                files = [[*each, *self._operations.files(*each)] for each in sorted(columns)] if local else []
                reply["define"].append([number, layout.to_wire(), files])
            parts.append([number, places, index, lengths])
        if local:
            reply["parts"] = parts
        else:
            reply["layout"] = parts[0][0]
        if local or hold:
            reply["delivery"] = self._operations.next_delivery()
            session.deliveries[reply["delivery"]] = (self._table, delivery, hold)
        else:
            self._table.release(delivery)
        return reply

    def late(self) -> Exception:
        why = self._table.rate_limiter.refusals()[0] or "no item is left to sample"
        return DeadlineExceededError(
            f"table {self._table.name!r}: cannot sample {self._n} items within {self.timeout:g} s: {why}"
        )

    def count(self, change: int) -> None:
        self._table.count_waiting(0, change)

    def drop(self) -> None:
        if self._delivery is not None:
            self._table.give_back(self._delivery)
            self._delivery = None


class _Save(Waiting):
    """A checkpoint, written by a thread of its own: others go on as far as the checkpointer allows."""

    def __init__(self, operations: Operations, session: Session, message: dict[str, Any]) -> None:
        super().__init__(("checkpoint", session.number), message["timeout"])
        self._operations = operations
        self._outcome: str | Exception | None = None
        threading.Thread(target=self._save, name="replay-checkpoint", daemon=True).start()

    def _save(self) -> None:
        try:
            self._outcome = self._operations.checkpoint()
        except Exception as error:  # raised by the next attempt, for the client
            self._outcome = error
        self._operations.wake()

    def attempt(self) -> Reply | None:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return None if self._outcome is None else {"path": self._outcome}


def _number(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = message[name]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, expected a number from {low} to {high}. Ask for less.")
    return value
