"""The client of a server in another process, on this machine or elsewhere.

On the server's machine rows are read from and written to shared memory, and only indices travel; from
elsewhere arrays travel in the messages. The caller does not notice.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from framework.replay import info as infos
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.remote.channel import Channel
from framework.replay.remote.connection import DEFAULT_RECONNECT_TIMEOUT, Connection, SessionLost
from framework.replay.remote.mapping import Mirror
from framework.replay.remote.writer import ServedWriter
from framework.replay.reverb_api.client import ReverbApi
from framework.replay.rows.layout import Layout, pack_function
from framework.replay.tables.delivery import gather_parts
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo, TableInfo
from launch.rpc.sockets import CurveKeys

# How long the end of a dataset looks for its server.
_LAST_WORDS = 2.0
# How long a server may take to write a checkpoint of all its tables.
_CHECKPOINT_S = 600.0


class Reservation:
    """Samples that were gathered for this client and count once they are handed out."""

    __slots__ = ("number", "sample")

    def __init__(self, sample: Any, number: int) -> None:
        self.sample = sample
        self.number = number


class ServedSource:
    """Draws batches that count when they are handed out; for one `Dataset`.

    One thread may draw while another settles: each does it on a connection of its own.
    """

    def __init__(self, client: ServedClient) -> None:
        self._client = client
        self._draws, self._interrupt = client._channel.private()
        self._settles = client._channel.connection()
        self._lock = threading.Lock()  # settling and looking happen in different threads
        self._unseen = False  # whether something was sent that the server may not have seen yet

    def draw(
        self, table: str, n: int, timeout: float | None, out: list[Any] | None, pad: bool
    ) -> Reservation:
        """``n`` samples of a table, gathered and reserved; ServerClosed after `interrupt`."""
        return self._client._draw(self._draws, table, n, timeout, out, pad, True)

    def settle(self, reservations: Sequence[Reservation], handed_out: bool) -> None:
        """Commits reservations or gives them back."""
        action = "commit" if handed_out else "give_back"
        message = {"op": "finish", action: [each.number for each in reservations]}
        with self._lock:
            self._unseen = True
            while True:
                try:
                    self._settles.open(_LAST_WORDS)
                    self._settles.post(message)
                    return
                except SessionLost:
                    continue
                except (ServerClosed, DeadlineExceededError):
                    return  # the server is gone, and its reservations with it

    def show(self) -> None:
        """The server has seen what was settled before this returns."""
        with self._lock:
            if self._unseen:
                self._say({"op": "sync"})
                self._unseen = False

    def _say(self, message: dict[str, Any]) -> None:
        # A lost session, or a server that is gone, has given everything back already.
        with contextlib.suppress(SessionLost, ServerClosed, DeadlineExceededError):
            self._settles.open(_LAST_WORDS)
            self._settles.request(message, timeout=_LAST_WORDS, wait=False)

    def can_sample(self, table: str, n: int) -> bool:
        """Whether a draw would not wait."""
        return self._client.can_sample(table, n)

    def interrupt(self) -> None:
        """Ends a draw that waits."""
        self.show()  # the end of the draw ends its session, which gives back what was not committed before
        self._interrupt.set()

    def close(self) -> None:
        """What was drawn and not settled is given back when this returns. Nobody may be in `draw`."""
        with self._lock:
            # Also what the server has drawn for a request that was interrupted.
            self._say({"op": "end", "session": self._draws.welcome.get("session", 0)})
            self._settles.close()
        self._draws.close()


class ServedClient(ReverbApi):
    """See the module; made by `replay.Client`.

    Args:
      address: ``tcp://host:port`` or ``ipc://path``.
      curve: the keys of the program, if the server has any.
      local: None uses shared memory where possible; False never does.
      reconnect_timeout: seconds for which calls wait for a server that is not there.
    """

    concurrent = True

    def __init__(
        self,
        address: str,
        curve: CurveKeys | None = None,
        local: bool | None = None,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT,
    ) -> None:
        self._arguments = (address, curve, local, reconnect_timeout)
        self.address = address
        self._local = local is not False
        self._channel = Channel(address, curve, reconnect_timeout=reconnect_timeout)
        self._mirror: Mirror | None = None
        self._lock = threading.Lock()
        self._writers: list[ServedWriter] = []
        self._sources: weakref.WeakSet[ServedSource] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        return type(self), self._arguments

    def __repr__(self) -> str:
        return f"replay.Client({self.address!r})"

    # Reading.

    def sample_batch(
        self,
        table: str,
        batch_size: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
    ) -> ReplaySample | PaddedSample:
        """``batch_size`` samples stacked; see `EmbeddedClient.sample_batch`."""
        with self._channel.borrow() as connection:
            return self._draw(connection, table, batch_size, timeout, out, pad, False).sample

    def source(self) -> ServedSource:
        """What a `Dataset` draws from."""
        source = ServedSource(self)
        self._sources.add(source)
        return source

    def _draw(
        self,
        connection: Connection,
        table: str,
        n: int,
        timeout: float | None,
        out: list[Any] | None,
        pad: bool,
        reserve: bool,
    ) -> Reservation:
        self._show()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                connection.open(None if left is None else left + 1.0)
                mirror = self._mirror_of(connection)
                local = self._local and mirror.local
                message = {
                    "op": "sample",
                    "table": table,
                    "n": n,
                    "local": local,
                    "reserve": reserve,
                    "pad": pad,
                    "unpin": connection.state.pop("unpin", []),
                }
                answer = connection.request(message, left, wait=True)
            except SessionLost:
                continue
            info = SampleInfo(*[array.copy() for array in answer["info"]])
            known = connection.state.setdefault("layouts", {})
            for number, layout, columns in answer["define"]:
                known[number] = (
                    mirror.bind(Layout.from_wire(layout), columns, table)
                    if local
                    else pack_function(Layout.from_wire(layout))
                )
            sample: ReplaySample | PaddedSample
            if local:
                try:
                    parts = [(known[part[0]], *part[1:]) for part in answer["parts"]]
                    sample = gather_parts(table, info, n, parts, out, pad)
                finally:
                    connection.state.setdefault("unpin", []).append(answer["delivery"])
            else:
                pack = known[answer["layout"]]
                leaves = [
                    _into(array, None if out is None else out[at])
                    for at, array in enumerate(answer["leaves"])
                ]
                sample = ReplaySample(info, pack(leaves))
                if pad:
                    sample = PaddedSample(*sample, pack(answer["lengths"]))
            return Reservation(sample, answer.get("delivery", 0))

    def _mirror_of(self, connection: Connection) -> Mirror:
        """The view of the server's memory that fits the connection's session."""
        welcome = connection.welcome
        with self._lock:
            if self._mirror is None or self._mirror.server != welcome["server"]:
                self._mirror = Mirror(welcome["server"], welcome["directory"])
            return self._mirror

    # Writing.

    def batch_writer(self, max_in_flight_items: int | None = None) -> ServedWriter:
        """A writer for B envs; see `contracts.Writer`.

        Args:
          max_in_flight_items: items created and not yet in their table; more of them make ``create_items``
            wait.
        """
        writer = ServedWriter(
            self._channel.connection(), self._mirror_of, self._local, max_in_flight_items, self._forget
        )
        with self._lock:
            self._writers.append(writer)
        return writer

    def _forget(self, writer: ServedWriter) -> None:
        with self._lock:
            if writer in self._writers:
                self._writers.remove(writer)

    def _show(self) -> None:
        """What this client's writers have created is in its tables before anything is read."""
        if not self._writers:
            return
        with self._lock:
            writers = list(self._writers)
        for writer in writers:
            writer.settle_unless_waiting()

    # The rest.

    def _call(self, message: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        self._show()
        return self._channel.call(message, timeout)

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets priorities float64 ``[N]`` of the items ``keys`` uint64 ``[N]``; keys that are gone are
        ignored."""
        self._mutate(table, keys, priorities, ())

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float] | None = None, deletes: Sequence[int] | None = None
    ) -> None:
        """Deletes items, then sets priorities; all or nothing."""
        updates = updates or {}
        self._mutate(table, list(updates.keys()), list(updates.values()), () if deletes is None else deletes)

    def _mutate(self, table: str, keys: Any, priorities: Any, deletes: Any) -> None:
        self._call(
            {
                "op": "update",
                "table": table,
                "keys": np.asarray(keys, np.uint64),
                "priorities": np.asarray(priorities, np.float64),
                "deletes": np.asarray(deletes, np.uint64),
            }
        )

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Whether ``n`` samples could be had now without waiting."""
        return bool(self._call({"op": "can_sample", "table": table, "n": n})["value"])

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether ``n`` items could be inserted now without waiting."""
        return bool(self._call({"op": "can_insert", "table": table, "n": n})["value"])

    def weight(self, table: str) -> tuple[float, int]:
        """See ``EmbeddedClient.weight``."""
        answer = self._call({"op": "weight", "table": table})
        return float(answer["sum"]), int(answer["number"])

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""
        self._call({"op": "reset", "table": table})

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """What is to be known of each table; DeadlineExceededError if the server does not answer in time."""
        for source in list(self._sources):
            source.show()
        answer = self._call({"op": "info"}, timeout)
        return {table["name"]: infos.from_wire(table) for table in answer["tables"]}

    def checkpoint(self) -> str:
        """Writes a checkpoint on the server; returns its path there."""
        self._show()
        # No limiter holds it back, so it is made after an interrupt too: a stopping program's last one.
        message = {"op": "checkpoint", "timeout": _CHECKPOINT_S}
        return str(self._channel.call(message, timeout=_CHECKPOINT_S)["path"])

    def move(self, address: str | None) -> None:
        """The server is at ``address`` from now on, restored from its checkpoint; None: it is nowhere and
        will come back, so that calls wait for it longer than ``reconnect_timeout``.

        An engine that places nodes anew calls this (``launch``'s ``ray``); sessions that are open end by
        themselves, as their server has gone.
        """
        self._channel.move(address)
        if address is not None:
            self.address = address

    def interrupt(self) -> None:
        """Every call of this client that waits, and every later one that would, ends with
        ``ServerClosed``."""
        self._channel.interrupt()

    def close(self) -> None:
        """Ends this client; its writers flush as far as that goes without waiting."""
        with self._lock:
            writers = list(self._writers)
        for writer in writers:
            writer.close(timeout=0)
        self._channel.interrupt()
        self._channel.close()

    def __enter__(self) -> ServedClient:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _into(array: np.ndarray, out: Any) -> np.ndarray:
    if out is None:
        return array if array.flags.writeable else array.copy()
    if out.shape != array.shape:
        raise ValueError(f"out: got shape {out.shape}, expected {array.shape}")
    out[...] = array
    return out
