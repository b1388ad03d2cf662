"""Carries out the messages of a replay server's clients, on the thread of `Service`.

Every message has an `op`, and an `id` if it is to be answered. The operations and their fields:

- `hello`: `protocol` → `server` (a name of this life of the server), `directory` (of its columns), `tables`.
- `declare`: `name` of a stream, `stream` (the server's name, None at first), `columns {name: [shape, dtype]}`
  to add → `stream`, `columns {name: [column, path, shape, dtype]}`.
- `lease`: `stream` (the server's name), `n` → `rows` int64 `[n]`.
- `insert`: `layouts [[number, layout]]`, `write [[stream, rows, {column: array}]]`, `items [[table, layout,
  index, lengths, keys, priorities, episodes]]`, `release [[stream, rows]]`, `lease {stream: n}` → `rows
  {stream: rows}`, once all items are in their tables. The inserts of one client are carried out in order.
- `sample`: `table`, `n`, `least`, `timeout`, `local`, `hold`, `pad` → `info`, and `define` and `parts` (rows)
  or `structure`, `leaves`, and `lengths` (arrays), and `delivery` if the client has to end it. If there is a
  `least`, it waits for that number of samples only, and the answer has `weight`; see `Table.weight`.
- `give_back`: `deliveries` that were not used, but for the first `used` samples of each.
- `mutate`, `reset`, `can_sample`, `can_insert`, `weight`: `table`, `arguments` of that method of `Table` →
  `value`.
- `sync`: nothing → `inserted`, how many items of this client are in tables, and `why` others wait. The answer
  comes after the answers to all earlier requests that could be carried out.
- `info`, `checkpoint`.
- `cancel` (of `Service`): requests of this client that wait are answered with an error.

Any message may carry `done`: the deliveries whose rows the client has read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, StoreFullError
from framework.replay.rows.layout import Layout, gather
from framework.replay.rows.store import RowStore
from framework.replay.server.holdings import Held, Holdings
from framework.replay.shm import SharedMemory
from framework.replay.tables.delivery import Delivery
from framework.replay.tables.rate_limiters import INSERTERS, SAMPLERS
from framework.replay.tables.table import Table
from framework.replay.types import ByName, PaddedSample
from framework.replay.writers import MAX_EPISODES, NewItems, check_held

# What one request may ask for: rows, samples, and bytes of arrays in one answer.
_MAX_LEASE = 1 << 20
_MAX_SAMPLES = 1 << 20
_MAX_ANSWER_BYTES = 1 << 30


Reply = dict[str, Any]
# An operation that may have to wait. It yields its `Request`, then None as long as it must wait, then the
# answer, or an error that is the answer. The service takes a step after `wake`, and closes the generator when
# the request ends, with or without an answer.
Steps = Generator[Any, None, None]


@dataclasses.dataclass(eq=False)
class ClientSession:
    """One client connection and what it holds on the server.

    Attributes:
      identity: ZeroMQ's name of the connection.
      descriptor: the connection's; the service sets it.
      waiting: requests that wait.
      held: the rows that the client has leased, and the columns that it has declared.
      layouts: layouts that the client has defined, by its numbers.
      known: layouts that the server has sent to the client, with the server's numbers.
      deliveries: samples that the client holds: the table, the delivery, and whether the samples are given
        back (True) or released (False) when the session ends.
      unwritten: the held rows whose data found no room, by stream.
      inserted: number of items that this client has inserted into tables.
    """

    identity: bytes
    descriptor: int = -1
    waiting: set[Request] = dataclasses.field(default_factory=set)
    held: Held = dataclasses.field(default_factory=Held)
    layouts: dict[int, Layout] = dataclasses.field(default_factory=dict)
    known: dict[Layout, int] = dataclasses.field(default_factory=dict)
    deliveries: dict[int, tuple[Table, Delivery, bool]] = dataclasses.field(default_factory=dict)
    unwritten: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    inserted: int = 0

    def end(self, numbers: Iterable[int], give_back: bool, used: int = 0) -> None:
        """Ends deliveries; unknown numbers are ignored. The first `used` samples are not given back."""
        for number in numbers:
            if number in self.deliveries:
                table, delivery, _ = self.deliveries.pop(number)
                if give_back:
                    table.give_back(delivery, used)
                else:
                    table.release(delivery)


@dataclasses.dataclass(eq=False)
class Request:
    """A request that may have to wait.

    Attributes:
      line: requests of one line go through in order; the first that must wait holds up the others.
      timeout: seconds that it may wait; None for no limit, 0 for no wait.
      tables: the tables whose changes it waits for.
      side: the side on which it waits for them, `SAMPLERS` or `INSERTERS`.
      n: number of samples that it is for.
      delivery: the samples drawn so far; None if it is for none.
      done_bytes: bytes of its message that it no longer needs.
      steps: the operation; the service sets it.
      session: the session of the client; the service sets it.
      id: the client's number of the message; the service sets it.
      num_bytes: bytes that it keeps while it waits; the service sets it.
    """

    line: Hashable
    timeout: float | None
    tables: Collection[Table] = ()
    side: int = SAMPLERS
    n: int = 0
    delivery: Delivery | None = None
    done_bytes: int = 0
    steps: Steps = dataclasses.field(init=False)
    session: ClientSession = dataclasses.field(init=False)
    id: int | None = None
    num_bytes: int = 0

    def late(self) -> DeadlineExceededError:
        """Returns the error of a request whose timeout expired, before `steps` are closed."""
        done = 0 if self.delivery is None else len(self.delivery.slots)
        why = [table.waiting.refusal(self.side, self.n, done) for table in self.tables]
        return DeadlineExceededError("; ".join([*why, "the timeout expired"]))


Operation = Callable[[ClientSession, Reply], Reply | Steps]


class Operations:
    """What a replay server does; `Service` calls the methods, on its thread.

    Args:
      tables: attached to `store`.
      store: holds the rows; its columns are in `memory`.
      memory: the server's shared memory.
      checkpoint: writes a checkpoint and returns its path.

    Attributes:
      operations: what carries out a message, by its `op`. Invalid fields may raise any `Exception`.
      wake: tells the service to try the waiting requests again; set once the service exists.
      has_room: whether an answer of this size may be made now; set once the service exists.
    """

    def __init__(
        self,
        tables: ByName[Table],
        store: RowStore,
        memory: SharedMemory,
        checkpoint: Callable[[], str],
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.has_room: Callable[[int], bool] = lambda num_bytes: True
        self._tables = tables
        self._store = store
        self._memory = memory
        self._holdings = Holdings(store, list(tables.values()))
        self._checkpoint = checkpoint
        self._saver = concurrent.futures.ThreadPoolExecutor(1, "replay-checkpoint")  # one at a time
        # A random start, so that numbers of an earlier server at this address are unknown here.
        self._deliveries = itertools.count(secrets.randbits(48))
        self._server = secrets.token_hex(16)
        own = ("checkpoint", "declare", "give_back", "info", "insert", "lease", "sample", "sync")
        calls = ("mutate", "reset", "can_sample", "can_insert", "weight")
        self.operations: dict[str, Operation] = {name: getattr(self, name) for name in own}
        self.operations.update(dict.fromkeys(calls, self.call_table))

    def open(self, session: ClientSession, hello: dict[str, Any]) -> Reply:
        """Answers `hello`."""
        protocol = hello.get("protocol")
        if type(protocol) is not int or protocol != wire.PROTOCOL:
            raise ValueError(f"protocol: got {protocol!r}, expected {wire.PROTOCOL}. Use one version.")
        return {
            "server": self._server,
            # Clients cannot read compressed columns in place, so all of them get arrays in messages.
            "directory": "" if self._store.compress else self._memory.directory,
            "tables": sorted(self._tables),
        }

    def call_table(self, session: ClientSession, message: dict[str, Any]) -> Reply:
        """Calls the method of a table that the message names."""
        return {"value": getattr(self._tables[message["table"]], message["op"])(*message["arguments"])}

    def info(self, session: ClientSession, message: dict[str, Any]) -> Reply:
        """Describes the tables."""
        return {"tables": [table.info.to_wire() for table in self._tables.values()]}

    def close(self, session: ClientSession) -> None:
        """Takes back what a session held. Samples that its client did not confirm count as never drawn."""
        for table, delivery, unused in session.deliveries.values():
            (table.give_back if unused else table.release)(delivery)
        session.deliveries.clear()
        self._holdings.close(session.held)

    # --- writing ---

    def declare(self, session: ClientSession, message: dict[str, Any]) -> Reply:
        """Adds columns to a stream of the client."""
        columns = {
            key: (tuple(shape), wire.parse_dtype(kind, f"column {key!r}"))
            for key, (shape, kind) in message["columns"].items()
        }
        if any(type(size) is not int or size < 0 for shape, _ in columns.values() for size in shape):
            raise ValueError("columns: got a shape that has not only sizes from 0 on")
        stream, names = self._holdings.declare(session.held, message["name"], columns, message["stream"])
        files = {name: [own, *self._file(stream, own)] for name, own in names.items()}
        return {"stream": stream, "columns": files}

    def _file(self, stream: str, column: str) -> list[Any]:
        """Returns path, shape and dtype of a column; the path is empty if it cannot be mapped."""
        array = self._store.streams[stream].columns[column]
        path = "" if self._store.compress else self._memory.path(stream, column)
        return [path, list(array.shape), array.dtype.str]

    def lease(self, session: ClientSession, message: dict[str, Any]) -> Reply:
        """Leases rows to the client."""
        n = _number("n", message["n"], 0, _MAX_LEASE)
        return {"rows": self._holdings.lease(session.held, message["stream"], n)}

    def sync(self, session: ClientSession, message: dict[str, Any]) -> Reply:
        """Says how many items of the client are in tables, and why the others wait."""
        full = {table for each in session.waiting for table in each.tables if not table.can_insert(1)}
        why = "; ".join(sorted(table.waiting.refusal(INSERTERS, 1, 0) for table in full))
        return {"inserted": session.inserted, "why": why}

    def insert(self, session: ClientSession, message: dict[str, Any]) -> Steps:
        """Inserts the items of a message, in order, as the rate limiters allow; then leases rows."""
        tables = {self._tables[item[0]] for item in message["items"]}
        error: Exception | None = None
        held, written = session.held.rows, 0
        try:
            for number, layout in message["layouts"]:  # Later messages use them, too, even if this one fails.
                session.layouts[int(number)] = Layout.from_wire(layout)
            written = self._write(session, message.pop("write"))
        except Exception as raised:
            error = raised
        yield Request(("insert", session), None, tables, INSERTERS, done_bytes=written)
        try:
            if error is not None:
                raise error
            for table, items in self._check(session, message):
                session.inserted += table.insert_now(items)
                while items.done < len(items.keys):
                    yield from _wait(table, INSERTERS)
                    session.inserted += table.insert_now(items)
        except Exception as raised:
            error = raised
        for name, rows in message["release"]:  # after an error, too: the client does not repeat it
            at = check_held(name, held.get(name), rows)
            if type(at) is not slice and len(np.unique(rows)) < len(rows):
                raise ValueError(f"rows of stream {name!r}: got one row twice, expected each once")
            if len(rows):
                if name in session.unwritten:
                    session.unwritten[name].difference_update(rows.tolist())
                self._holdings.release(session.held, name, rows)
        if error is not None:
            raise error
        leased = {}
        for name, n in message["lease"].items():
            # If memory is short, the client gets no rows, asks again when it needs them, and gets an error.
            with contextlib.suppress(MemoryError):
                leased[name] = self._holdings.lease(session.held, name, max(0, min(int(n), _MAX_LEASE)))
        yield {"rows": leased}

    def _write(self, session: ClientSession, parts: Any) -> int:
        """Writes the rows of a message that has just come, which need not wait, and returns their bytes."""
        held, num_bytes = session.held.rows, 0
        for at, (name, rows, columns) in enumerate(parts):
            check_held(name, held.get(name), rows)
            try:
                for column, values in columns.items():
                    self._store.streams[name].write(column, rows, values)
                    num_bytes += values.nbytes
            except Exception:
                # The client learns of it later, and may send more items of these rows before.
                for stream, missing, _ in parts[at:]:
                    check_held(stream, held.get(stream), missing)
                    session.unwritten.setdefault(stream, set()).update(missing.tolist())
                raise
        return num_bytes

    def _check(self, session: ClientSession, message: dict[str, Any]) -> list[tuple[Table, NewItems]]:
        """Checks all items of a message, before any of them is inserted."""
        held = session.held.rows
        batches = []
        for name, number, index, lengths, keys, priorities, episodes in message["items"]:
            table, layout, n = self._tables[name], session.layouts[number], len(index)
            most = 0 if episodes is None else min(MAX_EPISODES, episodes.shape[-1])
            for label, array, shape, dtype in (
                ("index", index, (n, layout.width), np.int64),
                ("keys", keys, (n,), np.uint64),
                ("episodes", episodes, (n, most), np.uint64),
                ("lengths", lengths, (n, len(layout.groups)), np.int32),
            ):
                if array is not None and (array.shape != shape or array.dtype != dtype):
                    raise ValueError(
                        f"{label}: got {array.dtype}{array.shape}, expected {np.dtype(dtype)}{shape}"
                    )
            if layout.ragged is (lengths is None):
                raise ValueError("lengths: expected them if, and only if, the layout is ragged")
            if lengths is not None:
                layout.check_lengths(lengths)
            for stream, begin, end in layout.parts:
                rows = index[:, begin:end].ravel()
                check_held(stream, held.get(stream), rows)
                unwritten = session.unwritten.get(stream)
                if unwritten and not unwritten.isdisjoint(rows.tolist()):
                    raise StoreFullError(f"items of table {name!r}: there was no room for some of their rows")
            items = NewItems(index, keys.copy(), priorities, lengths, episodes)
            table.check_items(layout, items)
            batches.append((table, items))
        return batches

    # --- reading ---

    def give_back(self, session: ClientSession, message: dict[str, Any]) -> Reply:
        """Undoes draws whose samples were not used."""
        used = _number("used", message.get("used", 0), 0, _MAX_SAMPLES)
        session.end(message["deliveries"], True, used)
        return {}

    def sample(self, session: ClientSession, message: dict[str, Any]) -> Steps:
        """Draws samples, at least `least` and at most `n`, as the rate limiter allows."""
        table, n = self._tables[message["table"]], _number("n", message["n"], 1, _MAX_SAMPLES)
        least = n if message.get("least") is None else _number("least", message["least"], 1, n)
        delivery = Delivery()
        yield Request(("sample", table.name), message["timeout"], {table}, SAMPLERS, least, delivery)
        try:
            got = 0
            while not table.draw(n, delivery) and len(delivery.slots) < least:
                if len(delivery.slots) > got:
                    self.wake()  # a large request lets others in between its draws
                got = len(delivery.slots)
                yield from _wait(table, SAMPLERS)
            if not message["local"]:
                num_bytes = max(part[0].item_bytes for part in delivery.parts) * len(delivery.slots)
                if num_bytes > _MAX_ANSWER_BYTES:
                    raise ValueError(
                        f"table {table.name!r}: got a request for {len(delivery.slots)} samples of "
                        f"{num_bytes} bytes, expected at most {_MAX_ANSWER_BYTES} bytes. Ask for smaller "
                        "batches."
                    )
                while not self.has_room(num_bytes):
                    yield from _wait(table, SAMPLERS)
            reply = self._describe(session, message, table, delivery)
            if message.get("least") is not None:
                reply["weight"] = table.weight()
        except BaseException:
            table.give_back(delivery)
            raise
        yield reply

    def _describe(
        self, session: ClientSession, message: dict[str, Any], table: Table, delivery: Delivery
    ) -> Reply:
        """Returns the answer for drawn samples, and notes which of them the client holds."""
        local, hold = bool(message["local"]), bool(message["hold"])
        reply: Reply = {"info": list(delivery.info), "define": [], "parts": []}
        if not local:
            sample = gather(table.name, delivery.info, delivery.parts, pad=bool(message["pad"]))
            reply["leaves"], reply["structure"] = nests.flatten(sample.data)
            if isinstance(sample, PaddedSample):
                reply["lengths"] = nests.flatten(sample.lengths)[0]
        for binding, places, index, lengths in delivery.parts if local else ():
            layout = binding.layout
            number = session.known.get(layout)
            if number is None:
                number = session.known[layout] = len(session.known)
                # A layout, and where its columns are: `[[stream, column, path, shape, dtype]]`.
                columns = {(layout.groups[leaf.group].stream, leaf.column) for leaf in layout.leaves}
                files = [[*each, *self._file(*each)] for each in sorted(columns)]
                reply["define"].append([number, layout.to_wire(), files])
            reply["parts"].append([number, places, index, lengths])
        if local or hold:
            reply["delivery"] = next(self._deliveries)
            session.deliveries[reply["delivery"]] = (table, delivery, hold)
        else:
            table.release(delivery)
        return reply

    # --- checkpoints ---

    def checkpoint(self, session: ClientSession, message: dict[str, Any]) -> Steps:
        """Writes a checkpoint in another thread, so that the service continues."""
        yield Request(("checkpoint", session), message["timeout"])
        future = self._saver.submit(self._checkpoint)
        future.add_done_callback(lambda _: self.wake())
        try:
            while not future.done():
                yield None
            # Whatever a checkpointer raises is the answer, and no defect of the server.
            failure = future.exception()
            yield {"path": future.result()} if failure is None else failure
        finally:
            future.cancel()  # has no effect once the checkpointer runs


def _wait(table: Table, side: int) -> Steps:
    """Waits until the next step or the end of the request; counts the time as spent waiting for `table`."""
    began = time.monotonic()
    try:
        yield None
    finally:
        table.waiting.count(side, 0, time.monotonic() - began)


def _number(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, expected a number from {low} to {high}. Ask for less.")
    return value
