"""What a served replay does with the messages of its clients. Runs on the thread of `Service` only.

Operations (``op``) and their fields; ``*`` marks those without an answer:

- ``hello``: see `Operations.open`.
- ``declare``: ``stream``, ``columns {name: [shape, dtype]}`` → ``files {name: [path, shape, dtype]}``.
- ``lease``: ``stream``, ``n`` → ``rows`` int64 ``[n]``, held by the session.
- ``insert``*: ``writer``, ``seq``, ``write [[stream, rows, {column: array}]]``, ``items [[table, layout,
  index, lengths, keys, priorities, episodes]]``, ``release [[stream, rows]]``; a notice ``ack`` (or
  ``failed``) with its ``seq`` follows when all items are in. The inserts of one session are carried out in
  order.
- ``sync``: nothing → nothing; what the session inserted before has been tried.
- ``abandon``: ``writer`` → ``seq``, ``done``: how many items of the message ``seq``, the last that was begun,
  are in; nothing of the session gets in any more.
- ``sample``: ``table``, ``n``, ``timeout``, ``local``, ``reserve``, ``pad`` → ``info``, ``delivery`` and
  rows or arrays.
- ``finish``*: ``commit``, ``give_back``, ``unpin``: numbers of deliveries. ``sample`` may carry ``unpin``
  too.
- ``update``: ``table``, ``keys``, ``priorities``, ``deletes``.
- ``end``: ``session``; gives back what another session of the same client holds, as if it had ended.
- ``reset``, ``can_sample``, ``can_insert``, ``weight``, ``info``, ``checkpoint``.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from framework import nest as nests
from framework.replay import info as infos
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.remote.connection import PROTOCOL
from framework.replay.rows.binding import Binding
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import RowStore
from framework.replay.server.service import Parked, Reply, Session
from framework.replay.server.sessions import Draws, Held
from framework.replay.server.write_operations import WriteOperations
from framework.replay.shm import SharedMemory
from framework.replay.tables.delivery import Delivery, gather_parts
from framework.replay.tables.table import Table
from framework.replay.types import PaddedSample


class Operations(WriteOperations):
    """The `Handler` of a replay server.

    Args:
      tables: by name, attached to ``store``.
      store: whose columns are in ``memory``.
      memory: the server's shared memory.
      checkpoint: writes a checkpoint and returns its path.
    """

    def __init__(
        self, tables: dict[str, Table], store: RowStore, memory: SharedMemory, checkpoint: Callable[[], str]
    ) -> None:
        super().__init__(tables, store, memory)
        self._checkpoint = checkpoint
        self.wake: Callable[[], None] = lambda: None  # makes the service try what is parked
        self._layouts: list[Layout] = []
        self._layout_numbers: dict[Layout, int] = {}
        self._sessions: dict[int, Held] = {}
        # By number; random, so that those of an earlier life of this server mean nothing.
        self._next_delivery = secrets.randbits(48)
        # With whether the client may still give it back when it has its copy of the rows.
        self._deliveries: dict[int, tuple[Table, Delivery, Held, bool]] = {}
        self._server = secrets.token_hex(16)
        # Who can read this file is this user on this machine, and may use the shared memory.
        with open(os.path.join(memory.directory, "proof"), "w") as file:
            file.write(self._server)
        self._operations: dict[str, Callable[[Session, dict[str, Any]], Reply | Parked | None]] = {
            "declare": self._declare,
            "lease": self._lease,
            "insert": self._insert,
            "sample": self._sample,
            "finish": self._finish,
            "sync": self._sync,
            "abandon": self._abandon,
            "end": self._end,
            "update": self._update,
            "reset": self._reset,
            "can_sample": self._can_sample,
            "can_insert": self._can_insert,
            "weight": self._weight,
            "info": self._info,
            "checkpoint": self._save,
        }

    def open(self, session: Session) -> Reply:
        """Answers ``hello``: ``server`` (a name of this life of the server), ``directory``, ``tables``."""
        if session.hello.get("protocol") != PROTOCOL:
            raise ValueError(
                f"protocol: the client speaks {session.hello.get('protocol')!r}, this server {PROTOCOL}; "
                "use the same version on both sides"
            )
        held = Held(secrets.randbits(62))
        self._sessions[held.number] = held
        session.state["held"] = held
        session.closing.append(lambda: self._let_go(held))
        return {
            "server": self._server,
            "session": held.number,
            # Compressed columns cannot be read in place: such a server's clients are remote, all of them.
            "directory": "" if self._store.compress else self._memory.directory,
            "tables": sorted(self._tables),
        }

    def handle(self, session: Session, message: dict[str, Any]) -> Reply | Parked | None:
        operation = self._operations.get(message.get("op", ""))
        if operation is None:
            raise ValueError(f"op: got {message.get('op')!r}, expected one of {sorted(self._operations)}")
        try:
            return operation(session, message)
        except (IndexError, AttributeError) as error:  # what a message of the wrong shape runs into
            raise ValueError(f"{message['op']}: not a valid message: {error}") from error

    def _let_go(self, held: Held) -> None:
        held.ended = True
        self._sessions.pop(held.number, None)
        for number in held.deliveries:
            table, delivery, _, reserved = self._deliveries.pop(number)
            (table.give_back if reserved else table.release)(delivery)
        held.deliveries.clear()
        for leases in self._leases.values():
            leases.release_all(held.number)

    # Reading.

    def _sample(self, session: Session, message: dict[str, Any]) -> Parked:
        held: Held = session.state["held"]
        self._unpin(message.get("unpin", ()))
        table = self._table(message["table"])
        n = int(message["n"])
        if n < 1:
            raise ValueError(f"table {table.name!r}: got a request for {n} samples, expected at least 1")

        draws = Draws(table, n)

        def attempt() -> Reply | None:
            if held.ended:
                raise ServerClosed("the session has ended")
            delivery = draws.attempt()
            if delivery is None:
                return None
            try:
                return self._reply(held, table, delivery, message)
            except BaseException:
                table.give_back(delivery)
                raise

        def entered(change: int) -> None:
            table.count_waiting(0, change)
            if change < 0:
                draws.end()

        def expired() -> Reply:
            why = table.rate_limiter.why_not_sample(1) or "no item is left to sample"
            raise DeadlineExceededError(
                f"table {table.name!r}: cannot sample {n} items within {message['timeout']:g} s: {why}"
            )

        return Parked(("sample", table.name), attempt, message["timeout"], expired, entered)

    def _reply(self, held: Held, table: Table, delivery: Delivery, message: dict[str, Any]) -> Reply:
        first: Binding = delivery.parts[0][0]
        reply: Reply = {"info": list(delivery.info)}
        if message["local"]:
            parts, numbers = [], []
            for binding, places, index, lengths in delivery.parts:
                number = self._number(binding.layout)
                numbers.append(number)
                parts.append([number, places, index, lengths])
            reply["parts"] = parts
        else:
            sample = gather_parts(
                table.name, delivery.info, len(delivery), delivery.parts, None, message["pad"]
            )
            numbers = [self._number(first.layout)]
            reply["layout"] = numbers[0]
            reply["leaves"] = nests.flatten(sample.data)[0]
            if isinstance(sample, PaddedSample):
                reply["lengths"] = nests.flatten(sample.lengths)[0]
        reply["define"] = [self._definition(number) for number in numbers if number not in held.known]
        held.known.update(numbers)
        reserve = message["reserve"]
        if reserve or message["local"]:
            self._next_delivery += 1
            reply["delivery"] = self._next_delivery
            self._deliveries[self._next_delivery] = (table, delivery, held, reserve)
            held.deliveries.add(self._next_delivery)
        else:
            table.release(delivery)
        return reply

    def _number(self, layout: Layout) -> int:
        number = self._layout_numbers.get(layout)
        if number is None:
            number = self._layout_numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return number

    def _definition(self, number: int) -> list[Any]:
        layout = self._layouts[number]
        columns: dict[str, dict[str, list[Any]]] = {}
        for leaf in layout.leaves:
            stream = self._store.streams[layout.groups[leaf.group].stream]
            columns.setdefault(stream.name, {}).update(self._files(stream, [leaf.column]))
        return [number, layout.to_wire(), columns]

    def _unpin(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in self._deliveries and not self._deliveries[number][3]:
                self._settle(number, True)

    def _finish(self, session: Session, message: dict[str, Any]) -> None:
        # Any session may finish a delivery: the one that drew it may be waiting for the next.
        for action in ("commit", "give_back"):
            for number in message.get(action, ()):
                if number in self._deliveries:
                    self._settle(number, action == "commit")
        self._unpin(message.get("unpin", ()))

    def _settle(self, number: int, used: bool) -> None:
        table, delivery, held, _ = self._deliveries.pop(number)
        held.deliveries.discard(number)
        (table.release if used else table.give_back)(delivery)

    # The rest.

    def _sync(self, session: Session, message: dict[str, Any]) -> Reply:
        return {}

    def _end(self, session: Session, message: dict[str, Any]) -> Reply:
        held = self._sessions.get(message["session"])
        if held is not None:
            self._let_go(held)
        return {}

    def _update(self, session: Session, message: dict[str, Any]) -> Reply:
        table = self._table(message["table"])
        table.mutate(message["keys"], message["priorities"], message["deletes"])
        return {}

    def _reset(self, session: Session, message: dict[str, Any]) -> Reply:
        self._table(message["table"]).reset()
        return {}

    def _can_sample(self, session: Session, message: dict[str, Any]) -> Reply:
        return {"value": bool(self._table(message["table"]).can_sample(int(message["n"])))}

    def _can_insert(self, session: Session, message: dict[str, Any]) -> Reply:
        return {"value": bool(self._table(message["table"]).can_insert(int(message["n"])))}

    def _weight(self, session: Session, message: dict[str, Any]) -> Reply:
        total, number = self._table(message["table"]).weight()
        return {"sum": total, "number": number}

    def _info(self, session: Session, message: dict[str, Any]) -> Reply:
        return {"tables": [infos.to_wire(table.info) for table in self._tables.values()]}

    def _save(self, session: Session, message: dict[str, Any]) -> Parked:
        # In a thread of its own: others go on meanwhile, as far as the checkpointer lets them.
        outcome: list[str | BaseException] = []

        def save() -> None:
            try:
                outcome.append(self._checkpoint())
            except BaseException as error:
                outcome.append(error)
            self.wake()

        def attempt() -> Reply | None:
            if not outcome:
                return None
            result = outcome[0]
            if isinstance(result, BaseException):
                raise result
            return {"path": result}

        threading.Thread(target=save, name="replay-checkpoint", daemon=True).start()
        return Parked(("checkpoint", session.identity), attempt, message["timeout"])
