"""The client of a server in another process, on this machine or elsewhere.

On the server's machine, rows are read from and written to shared memory, and only indices travel. From
elsewhere, arrays travel in the messages. The interface is the same.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from framework import nest as nests
from framework.replay.base import BaseClient, BaseSource
from framework.replay.contracts import Source
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.remote.connection import LAST_WORDS_S, OpenRequest, ReplayConnection, SessionLost
from framework.replay.remote.pool import ConnectionPool
from framework.replay.remote.writer import ServedWriter
from framework.replay.rows.layout import Binding, Layout, gather
from framework.replay.types import Drawn, Out, PaddedSample, ReplaySample, Sample, SampleInfo, TableInfo

# Seconds in which a server must have written a checkpoint of all its tables.
_CHECKPOINT_S = 600.0
# Single samples that one message brings: their number, and their bytes, above which messages cost less.
SINGLES, SINGLES_BYTES = 256, 1 << 20


class ServedSource(BaseSource):
    """Draws batches for one `Dataset`; see `contracts.Source`. One thread draws; any thread may release.

    Args:
      client: the client; before each draw, its writers insert what they have created.
      connection: a connection of this source only.
      hold: whether samples are given back if the session ends before they are released.

    Attributes:
      told: what `Table.weight` was after the last draw with `least`.
    """

    _client: RemoteClient

    def __init__(self, client: RemoteClient, connection: ReplayConnection, hold: bool = True) -> None:
        self._client = client
        self._connection = connection
        self._hold = hold
        self.told: tuple[float, int, int] | None = None

    def draw(self, table: str, n: int, timeout: float | None, out: Out, pad: bool) -> Drawn:
        samples, drawn = self.answer(self.ask(table, n, timeout, pad), out)
        return samples[0], drawn

    def ask(self, table: str, n: int, timeout: float | None, pad: bool, least: int | None = None) -> _Draw:
        self._client.writers.show()
        message = {"op": "sample", "table": table, "n": n, "least": least, "hold": self._hold, "pad": pad}
        return message, timeout, self._connection.ask(message, timeout, wait=True)

    def answer(self, asked: _Draw, out: Out) -> tuple[list[Any], tuple[int, int | None]]:
        connection, hold, drawn = self._connection, self._hold, (-1, None)
        message, timeout, sent = asked
        table, pad = message["table"], message["pad"]
        try:
            answer = connection.call(message, timeout, True, sent)
            drawn = connection.session, answer.get("delivery")
            self.told = answer.get("weight")
            info = SampleInfo(*[array.copy() for array in answer["info"]])
            layouts, mapped = connection.layouts, connection.mapped
            if mapped.local:
                if answer["define"]:
                    self._define(table, answer)
                parts = [(layouts[part[0]], *part[1:]) for part in answer["parts"]]
                return [gather(table, info, parts, out, pad)], drawn
            pack = nests.packer(answer["structure"])
            leaves = [
                _into(array, None if out is None else out[at]) for at, array in enumerate(answer["leaves"])
            ]
            if pad:
                lengths = [None if each is None else _into(each, None) for each in answer["lengths"]]
                return [PaddedSample(info, pack(leaves), pack(lengths))], drawn
            return [ReplaySample(info, pack(leaves))], drawn
        except BaseException as error:
            connection.end_if_interrupted(error)
            (self.give_back if hold else self.release)(drawn)
            raise

    def _define(self, table: str, answer: dict[str, Any]) -> None:
        """Binds the layouts that the server defines in an answer, once in each session."""
        mapped = self._connection.mapped
        for number, description, files in answer["define"]:
            for file in files:
                mapped.column(*file)
            # A mapped store has what a binding gathers from.
            binding = Binding(Layout.from_wire(description), mapped, table)  # type: ignore[arg-type]
            self._connection.layouts[number] = binding

    def release(self, drawn: tuple[int, int | None]) -> None:
        session, delivery = drawn
        if session == self._connection.session and delivery is not None:
            self._connection.done.append(delivery)

    def give_back(self, drawn: tuple[int, int | None], used: int = 0) -> None:
        """See `Source`; the first `used` samples of the draw are not given back."""
        session, delivery = drawn
        if session == self._connection.session:  # one that has ended has given everything back
            self._tell({"op": "give_back", "deliveries": [delivery], "used": used})

    def drop(self, asked: _Draw) -> None:
        sent = asked[2]
        if sent is None:
            return
        with contextlib.suppress(
            Exception
        ):  # Then it has nothing to give back: it is canceled, or has failed.
            self._connection.post({"op": "cancel"})
            soon = time.monotonic() + LAST_WORDS_S
            answer = self._connection.answer(sent._replace(deadline=soon, watch=False))
            self._define(asked[0]["table"], answer)
            self.give_back((sent.session, answer["delivery"]))

    def weight(self, table: str) -> Callable[[], tuple[float, int, int]]:
        self._client.writers.show()
        message = {"op": "weight", "table": table, "arguments": []}
        sent = self._connection.ask(message)

        def answer() -> tuple[float, int, int]:
            total, count, allowed = self._connection.call(message, asked=sent)["value"]
            return total, count, allowed

        return answer

    def interrupt(self) -> None:
        self._connection.wake.set()

    def close(self) -> None:
        if self._connection.done:
            self._tell({"op": "sync"})
        self._connection.close()

    def _tell(self, message: dict[str, Any]) -> None:
        """Sends a message, and waits until the server has carried it out or cannot be reached."""
        with contextlib.suppress(SessionLost, ServerClosed, DeadlineExceededError):
            self._connection.request(message, timeout=LAST_WORDS_S)


# The message of a draw, its timeout, and the request, if there was a session.
_Draw = tuple[dict[str, Any], float | None, OpenRequest | None]
_Client = TypeVar("_Client", bound="RemoteClient")


class RemoteClient(ConnectionPool, BaseClient):
    """See the module, and `ReplayChannel` for the arguments; made by `replay.Client`."""

    concurrent = True

    def _begin(self) -> None:
        super()._begin()
        _clients.add(self)
        self.writers = self._channel.writers

    def begin_in_child(self) -> None:
        self.writers.call_all("end_in_child")
        super().begin_in_child()

    def __reduce__(self) -> Any:
        to = self._channel
        return type(self), (to.address, to.curve, to.local, to.reconnect_timeout)

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._channel.address

    def __repr__(self) -> str:
        return f"replay.Client({self.address!r})"

    # Reading.

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Source]:
        with self.borrow() as connection:
            yield ServedSource(self, connection, hold=False)

    def source(self) -> ServedSource:
        """Returns a source of samples for a `Dataset`."""
        return ServedSource(self, self.connection())

    def single_samples(self, table: str, n: int, timeout: float | None = None) -> Iterator[Sample]:
        """See `ReplayClient`; a message asks for one sample at least, and for as many as were yielded."""
        if n == 1:  # which needs no connection of its own
            yield self.sample_batch(table, 1, timeout)
            return
        done, most = 0, SINGLES
        with contextlib.closing(self.source()) as source:
            while done < n:
                block = min(done + 1, n - done, most)
                try:
                    (batch,), drawn = source.answer(source.ask(table, block, timeout, block > 1, 1), None)
                except ValueError:  # Items with different leaves do not fit into one batch.
                    if block == 1:
                        raise
                    most = 1
                    continue
                size, used = len(batch.info.key), 0
                leaves, structure = nests.flatten(batch.data)
                lengths = nests.flatten(batch.lengths)[0] if block > 1 else [None] * len(leaves)
                pack, num_bytes = nests.packer(structure), sum([leaf.nbytes for leaf in leaves])
                most = min(most, max(1, SINGLES_BYTES * size // max(1, num_bytes)))
                try:
                    while used < size:
                        at, used = slice(used, used + 1), used + 1
                        cut = [
                            leaf[at].copy() if each is None else leaf[at, : each[at.start]].copy()
                            for leaf, each in zip(leaves, lengths, strict=True)
                        ]
                        yield ReplaySample(SampleInfo(*[each[at] for each in batch.info]), pack(cut))
                finally:
                    source.give_back(drawn, used) if used < size else source.release(drawn)
                done += used

    # Writing.

    def batch_writer(self, max_in_flight_items: int | None = None) -> ServedWriter:
        """Returns a writer for B envs; see `BatchWriter`.

        Args:
          max_in_flight_items: items that may wait for room before `create_items` waits too; None for 512.
        """
        self.writers.end_dropped()
        connection = self.connection()
        writer = ServedWriter(connection, max_in_flight_items, self.writers, self.can_insert)
        self.writers.add(writer, connection)
        return writer

    # The rest.

    def _call(self, message: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        self.writers.show()
        return self.call(message, timeout)

    def _call_table(self, table: str, method: str, *arguments: Any) -> Any:
        plain = [each if isinstance(each, int) else np.asarray(each) for each in arguments]
        return self._call({"op": method, "table": table, "arguments": plain})["value"]

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Returns a description of each table; `DeadlineExceededError` if no answer comes in time."""
        answer = self._call({"op": "info"}, timeout)
        infos = [TableInfo.from_wire(each) for each in answer["tables"]]
        return {info.name: info for info in infos}

    def checkpoint(self) -> str:
        """Writes a checkpoint on the server; returns its path there."""
        # No rate limiter delays it, so an interrupted client can write the last checkpoint of its program.
        return str(self._call({"op": "checkpoint", "timeout": _CHECKPOINT_S}, _CHECKPOINT_S)["path"])

    def move(self, address: str | None) -> None:
        """Makes later calls use the server at `address`, which was restored from a checkpoint.

        An engine that can move nodes (`launch`'s `ray`) calls this.

        Args:
          address: None while the server is being moved: calls then wait longer than `reconnect_timeout`.
        """
        self._channel.move(address)

    def close(self) -> None:
        """Ends this client. Its writers insert what they can without waiting."""
        self.interrupt()  # first, because a thread that waits in a writer holds its lock
        try:
            self.writers.call_all("close", 0)
        finally:
            super().close()

    def __enter__(self: _Client) -> _Client:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


# The clients of this process, so that a forked child can tell them.
_clients: weakref.WeakSet[RemoteClient] = weakref.WeakSet()


def _begin_in_child() -> None:
    for client in list(_clients):
        client.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


def _into(array: np.ndarray, out: Any) -> np.ndarray:
    if out is None:
        return array if array.flags.writeable else array.copy()
    if out.shape != array.shape:
        raise ValueError(f"out: got shape {out.shape}, expected {array.shape}")
    out[...] = array
    return out
