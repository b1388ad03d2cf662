"""The client of a dm-reverb server; see `framework.replay.dm_reverb`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from framework.replay import contracts
from framework.replay.dm_reverb import convert
from framework.replay.dm_reverb.writer import ReverbWriter
from framework.replay.errors import (
    DeadlineExceededError,
    ServerClosed,
    UnknownTableError,
    WouldBlockError,
)
from framework.replay.types import PaddedSample, ReplaySample, TableInfo

START_SECONDS = 120.0  # that a server of another process may take to come up, TensorFlow's import included
_LOOK = 0.005  # seconds between two looks at a table that gives nothing: dm-reverb tells nobody


class Client(contracts.Client):
    """Talks to a dm-reverb server; has the methods of our other clients.

    Args:
      server_address: ``"localhost:8000"``.
      concurrent: whether other threads use the tables too. If not, a call that would wait for ever is a
        ``WouldBlockError``.
      tables: the ``reverb.Table``s, if they are in this process.
    """

    def __init__(
        self, server_address: str, *, concurrent: bool = True, tables: Mapping[str, Any] | None = None
    ) -> None:
        import reverb

        self.concurrent = concurrent
        #: The ``reverb.Client``, for what this class does not offer.
        self.native = reverb.Client(server_address)
        self._address = server_address
        self._tables = tables
        self._changed = threading.Condition()
        self._interrupted = False
        self._closed = False
        self._writers: list[ReverbWriter] = []
        self._kept: dict[str, list[Any]] = {}  # samples that were drawn and not handed out
        self._coming: dict[str, int] = {}  # samples that calls on their way will get
        self._max_priority: dict[str, float] = {}
        self._signatures: dict[str, Any] | None = None
        self._stacker = convert.Stacker()

    # Writing.

    def batch_writer(self, max_in_flight_items: int | None = None) -> ReverbWriter:
        """A writer for B envs; see `ReverbWriter`."""
        writer = ReverbWriter(self, max_in_flight_items)
        self._writers.append(writer)
        return writer

    def forget_writer(self, writer: ReverbWriter) -> None:
        """Called by a writer that is closed."""
        if writer in self._writers:
            self._writers.remove(writer)

    def settle(self) -> None:
        """What the writers of this client hold back is in the tables, as far as the rate limiters let
        it in."""
        for writer in list(self._writers):
            writer.settle_if_idle()

    def max_priority(self, table: str) -> float:
        """The largest priority that this client has given to items of the table; 1.0 at first."""
        return self._max_priority.get(table, 1.0)

    def saw_priorities(self, table: str, priorities: np.ndarray) -> None:
        """Called with the priorities that items of the table get."""
        if len(priorities):
            highest = float(priorities.max())
            self._max_priority[table] = max(self._max_priority.get(table, 0.0), highest)

    # Sampling.

    def sample_batch(
        self,
        table: str,
        batch_size: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
    ) -> ReplaySample | PaddedSample:
        """``batch_size`` samples stacked; see ``EmbeddedClient.sample_batch`` for arguments and errors.

        Samples that were drawn when the call failed are kept for the next one, which hands them out.
        """
        if batch_size < 1:
            raise ValueError(f"table {table!r}, n: got {batch_size}, expected at least 1 sample")
        samples = self._draw(table, batch_size, timeout, lambda: False)
        return self._stacker.stack(table, samples, self._signature(table), out, pad)

    def source(self) -> _Source:
        """What a `Dataset` draws from."""
        return _Source(self)

    def _draw(self, table: str, n: int, timeout: float | None, cancelled: Callable[[], bool]) -> list[Any]:
        self._signature(table)  # UnknownTableError rather than a wait
        deadline = None if timeout is None else time.monotonic() + timeout
        samples: list[Any] = []
        try:
            while len(samples) < n:
                if self._interrupted or cancelled():
                    raise ServerClosed("the client was interrupted or closed")
                info = self._settled_info(table)
                with self._changed:
                    kept = self._kept.setdefault(table, [])
                    samples += kept[: n - len(samples)]
                    del kept[: len(samples)]
                    missing = n - len(samples)
                    coming = self._coming.get(table, 0)
                    allowed = convert.samples_to_be_had(info, missing + coming, certain=True) - coming
                    self._coming[table] = coming + max(0, allowed)
                if missing and allowed > 0:
                    samples += self._take(table, allowed, cancelled)
                    continue
                if not missing:
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineExceededError(f"table {table!r}: no {n} samples within {timeout} s")
                if not self.concurrent:
                    raise WouldBlockError(
                        f"table {table!r}: the rate limiter refuses {missing} of {n} samples, and nobody "
                        "else runs that could insert"
                    )
                with self._changed:
                    if not self._interrupted:
                        self._changed.wait(_LOOK if left is None else min(_LOOK, left))
        except BaseException:
            self._keep(table, samples)
            raise
        return samples

    def _take(self, table: str, n: int, cancelled: Callable[[], bool]) -> list[Any]:
        """``n`` samples that the table will give at once, unless a reader elsewhere is faster.

        dm-reverb cannot end a call that waits, so it is made by a thread that can be left behind. What it
        still gets is kept.
        """

        def call() -> list[Any]:
            try:
                return list(self.native.sample(table, n, emit_timesteps=False))
            finally:
                with self._changed:
                    self._coming[table] -= n

        if not self.concurrent:
            return call()
        got: list[list[Any]] = []
        failed: list[BaseException] = []
        left_behind = False

        def work() -> None:
            try:
                samples = call()
            except BaseException as error:
                failed.append(error)
            else:
                with self._changed:
                    if left_behind:
                        self._keep(table, samples)
                    got.append(samples)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=work, name="reverb-sample", daemon=True).start()
        with self._changed:
            while not (got or failed):
                if self._interrupted or cancelled():
                    left_behind = True
                    raise ServerClosed("the client was interrupted or closed")
                self._changed.wait()
        if failed:
            raise failed[0]
        return got[0]

    def _keep(self, table: str, samples: Sequence[Any]) -> None:
        with self._changed:
            self._kept.setdefault(table, []).extend(samples)

    # Items.

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets priorities float64 ``[N]`` of the items ``keys`` uint64 ``[N]``; keys that are gone are
        ignored."""
        keys = np.asarray(keys, np.uint64).ravel()
        priorities = convert.check_priorities(priorities, len(keys))
        self._mutate(table, dict(zip(keys.tolist(), priorities.tolist(), strict=True)), [])

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Sequence[int] | None = None,
    ) -> None:
        """Deletes items, then sets priorities. ValueError for a priority that is negative or not a number,
        and nothing is changed then."""
        updates = dict(updates or {})
        convert.check_priorities(list(updates.values()), len(updates))
        self._mutate(table, updates, [] if deletes is None else [int(key) for key in deletes])

    def _mutate(self, table: str, updates: dict[int, float], deletes: list[int]) -> None:
        self._check()
        self._signature(table)
        self.settle()
        if updates or deletes:
            self.native.mutate_priorities(table, updates, deletes)
            self.saw_priorities(table, np.array(list(updates.values())))

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""
        self._check()
        self._signature(table)
        self.settle()
        self.native.reset(table)
        with self._changed:
            self._kept.pop(table, None)
            self._max_priority.pop(table, None)

    # Looking.

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Whether ``n`` samples could be had now without waiting."""
        missing = n - len(self._kept.get(table, ()))
        return (
            missing <= 0
            or convert.samples_to_be_had(self._settled_info(table), missing, certain=False) == missing
        )

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether ``n`` items could be inserted now without waiting."""
        self.settle()
        return self.has_room(table, n)

    def has_room(self, table: str, n: int) -> bool:
        """`can_insert` for items that are not waiting already."""
        return convert.limiter_of(self._info(table)).can_insert(n)

    def all_have_room(self) -> bool:
        """Whether no rate limiter would refuse one more item."""
        return all(convert.limiter_of(i).can_insert(1) for i in self._all_info(None).values())

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """What is to be known of each table; ``timeout`` in seconds, rounded up to whole ones."""
        self.settle()
        return self._all_info(timeout)

    def has_signature(self, table: str) -> bool:
        """Whether the table has one; ValueError if there is no such table."""
        try:
            return self._signature(table) is not None
        except UnknownTableError as error:
            raise ValueError(str(error)) from None

    def _settled_info(self, table: str) -> TableInfo:
        self.settle()
        return self._info(table)

    def _info(self, table: str) -> TableInfo:
        if self._tables is not None and table in self._tables:
            self._check()
            return convert.to_info(self._tables[table].info, self.max_priority(table))
        return _find(self._all_info(None), table)

    def _all_info(self, timeout: float | None) -> dict[str, TableInfo]:
        self._check()
        if self._tables is not None:
            return {name: self._info(name) for name in self._tables}
        # Never without a limit: dm-reverb would wait for a server that is gone, and nobody could end that.
        native = self._ask(5 if timeout is None else max(1, math.ceil(timeout)), timeout is None)
        return {name: convert.to_info(info, self.max_priority(name)) for name, info in native.items()}

    def _ask(self, seconds: int, again: bool) -> dict[str, Any]:
        from reverb import errors

        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return self.native.server_info(timeout=seconds)
            except errors.DeadlineExceededError as error:
                self._check()
                if not again or self._interrupted or time.monotonic() > deadline:
                    raise DeadlineExceededError(f"no dm-reverb server answers at {self._address}") from error

    def _signature(self, table: str) -> Any:
        if self._signatures is None:
            self._signatures = {name: info.signature for name, info in self._all_info(None).items()}
        return _find(self._signatures, table)

    # The end.

    def checkpoint(self) -> str:
        """Has the server write a checkpoint; its path."""
        self.settle()
        self._check()
        return self.native.checkpoint()

    def is_interrupted(self) -> bool:
        """Whether ``interrupt`` or ``close`` was called."""
        return self._interrupted

    def interrupt(self) -> None:
        """Every call of this client that waits, and every later one that could, ends with
        ``ServerClosed``."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Has the calls that wait look whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends this client; what its writers hold back is inserted as far as that goes without waiting."""
        for writer in list(self._writers):
            writer.close(timeout=0)
        self.abandon()

    def abandon(self) -> None:
        """Called when the server stops: no call goes through any more."""
        self._closed = True
        self.interrupt()

    def _check(self) -> None:
        if self._closed:
            raise ServerClosed("the server was stopped, or the client closed")


class _Source(contracts.Source):
    """What a `Dataset` draws from. dm-reverb counts a sample when it is drawn and takes none back: what was
    not handed out is kept by the client for its next reader."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._interrupted = False

    def draw(
        self, table: str, n: int, timeout: float | None, out: list[Any] | None, pad: bool
    ) -> tuple[ReplaySample | PaddedSample, tuple[str, list[Any]]]:
        client = self._client
        samples = client._draw(table, n, timeout, lambda: self._interrupted)
        try:
            return client._stacker.stack(table, samples, client._signature(table), out, pad), (table, samples)
        except BaseException:
            client._keep(table, samples)
            raise

    def release(self, drawn: tuple[str, list[Any]]) -> None:
        return

    def give_back(self, drawn: tuple[str, list[Any]]) -> None:
        self._client._keep(*drawn)

    def can_sample(self, table: str, n: int) -> bool:
        """Whether a draw would not wait."""
        return self._client.can_sample(table, n)

    def interrupt(self) -> None:
        """Ends a draw that waits."""
        self._interrupted = True
        self._client.wake()

    def close(self) -> None:
        """Nothing is held here."""


def _find(named: Mapping[str, Any], table: str) -> Any:
    if table not in named:
        raise UnknownTableError(f"table {table!r} was not found; there are {sorted(named)}")
    return named[table]
