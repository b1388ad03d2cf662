"""The client of a dm-reverb server; see `framework.replay.dm_reverb`."""

from __future__ import annotations

import collections
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from framework.replay import contracts
from framework.replay.dm_reverb import convert
from framework.replay.dm_reverb.tables import ServerTables
from framework.replay.dm_reverb.writer import ReverbWriter
from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.types import PaddedSample, ReplaySample, TableInfo

# Seconds between two looks at a table that gives nothing: dm-reverb cannot be asked to tell.
_LOOK = 0.005


class Client(contracts.Client):
    """Talks to a dm-reverb server; has the methods of our other clients.

    Args:
      server_address: `"localhost:8000"`.
      concurrent: whether other threads use the tables too. If not, a call that would wait without end is a
        `WouldBlockError`.
    """

    def __init__(self, server_address: str, *, concurrent: bool = True) -> None:
        self.concurrent = concurrent
        self.address: str | None = server_address
        self._tables = ServerTables(server_address, concurrent)
        #: The `reverb.Client`, for what this class does not offer.
        self.native = self._tables.native
        self._changed = self._tables.changed
        self._writers: weakref.WeakSet[ReverbWriter] = weakref.WeakSet()
        # Of each table: samples that are drawn and not handed out, and how many are being drawn.
        self._drawn: dict[str, list[Any]] = collections.defaultdict(list)
        self._coming: dict[str, int] = collections.Counter()
        self._failed: BaseException | None = None

    # Writing.

    def batch_writer(self, max_in_flight_items: int | None = None) -> ReverbWriter:
        """A writer for B envs; see `ReverbWriter`."""
        writer = ReverbWriter(self._tables, max_in_flight_items)
        self._writers.add(writer)
        return writer

    def _settle(self) -> None:
        """What the writers of this client have created is in the tables, as far as it has room."""
        for writer in list(self._writers):
            writer.settle()

    # Sampling.

    def sample_batch(
        self,
        table: str,
        batch_size: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
    ) -> ReplaySample | PaddedSample:
        """`batch_size` samples, stacked; see `EmbeddedClient.sample_batch` for arguments and errors.

        Samples that were drawn when the call failed are kept: the next call hands them out.
        """
        if batch_size < 1:
            raise ValueError(f"table {table!r}, n: got {batch_size}, expected at least 1 sample")
        return self.draw(table, batch_size, timeout, out, pad, lambda: False)[0]

    def source(self) -> _Source:
        """What a `Dataset` draws from."""
        return _Source(self)

    def draw(
        self,
        table: str,
        n: int,
        timeout: float | None,
        out: list[Any] | None,
        pad: bool,
        cancelled: Callable[[], bool],
    ) -> tuple[ReplaySample | PaddedSample, list[Any]]:
        """`sample_batch` that ends with ServerClosed when it is `cancelled`; and what `keep` takes."""
        signature = self._tables.signature(table)
        samples = self._take(table, n, timeout, cancelled)
        try:
            return convert.stack(table, samples, signature, out, pad), samples
        except BaseException:
            self.keep(table, samples)
            raise

    def keep(self, table: str, samples: list[Any]) -> None:
        """Keeps samples for the next draw: dm-reverb has counted them and takes none back."""
        with self._changed:
            self._drawn[table] += samples

    def _take(self, table: str, n: int, timeout: float | None, cancelled: Callable[[], bool]) -> list[Any]:
        """n samples that are drawn, and handed out to this call."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._tables.interrupted or cancelled():
                raise ServerClosed("the client was interrupted or closed")
            with self._changed:
                drawn = self._drawn[table]
                if self._failed is not None:
                    failed, self._failed = self._failed, None
                    raise failed
                if len(drawn) >= n:
                    samples, drawn[:n] = drawn[:n], []
                    return samples
            self._settle()
            info = self._tables.info(table)
            with self._changed:
                missing = n - len(drawn)
                more = convert.samples_to_be_had(info, missing, certain=True) - self._coming[table]
                self._coming[table] += max(0, more)
            if more > 0:
                self._fetch(table, more)
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceededError(f"table {table!r}: no {n} samples within {timeout} s")
            if not self.concurrent:
                raise WouldBlockError(
                    f"table {table!r}: the rate limiter refuses {missing} of {n} samples, and no other "
                    "thread runs that could insert"
                )
            with self._changed:
                if not self._tables.interrupted and len(drawn) < n:
                    self._changed.wait(_LOOK if left is None else min(_LOOK, left))

    def _fetch(self, table: str, n: int) -> None:
        """Has n samples drawn, which the table gives at once unless a reader elsewhere is faster.

        dm-reverb cannot end a call that waits, so a thread makes it that can be left behind.
        """

        def fetch() -> None:
            samples: list[Any] = []
            failed: BaseException | None = None
            try:
                samples = list(self.native.sample(table, n, emit_timesteps=False))
            except Exception as error:  # raised by the call that waits for the samples
                failed = error
            with self._changed:
                self._coming[table] -= n
                self._drawn[table] += samples
                self._failed = failed or self._failed
                self._changed.notify_all()

        if not self.concurrent:
            fetch()
            return
        with self._changed:
            threading.Thread(target=fetch, name="reverb-sample", daemon=True).start()
            self._changed.wait(_LOOK)

    # Items.

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets priorities float64 `[N]` of the items `keys` uint64 `[N]`; keys that are gone are ignored."""
        keys = np.asarray(keys, np.uint64).ravel().tolist()
        priorities = convert.check_priorities(priorities, len(keys))
        self.mutate_priorities(table, dict(zip(keys, priorities.tolist(), strict=True)))

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Sequence[int] | None = None,
    ) -> None:
        """Deletes items, then sets priorities.

        Raises:
          ValueError: a priority is negative or not finite. Nothing is changed.
        """
        updates = dict(updates or {})
        priorities = convert.check_priorities(list(updates.values()), len(updates))
        self._tables.check_open()
        self._tables.signature(table)  # an unknown table is our error
        self._settle()
        if updates or deletes:
            self.native.mutate_priorities(table, updates, [int(key) for key in deletes or ()])
            self._tables.saw_priorities(table, priorities)

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""
        self._tables.check_open()
        self._tables.signature(table)
        self._settle()
        self.native.reset(table)
        with self._changed:
            self._drawn.pop(table, None)
        self._tables.forget_priorities(table)

    # Looking.

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Whether n samples could be had now without waiting."""
        self._settle()
        missing = n - len(self._drawn[table])
        return missing <= 0 or (
            convert.samples_to_be_had(self._tables.info(table), missing, certain=False) == missing
        )

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether n items could be inserted now without waiting."""
        self._settle()
        return self._tables.has_room(table, n)

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """A description of each table; `timeout` in seconds, rounded up to whole ones."""
        self._settle()
        return self._tables.infos(timeout)

    def checkpoint(self) -> str:
        """Has the server write a checkpoint; returns its path."""
        self._tables.check_open()
        self._settle()
        return self.native.checkpoint()

    # The end.

    def interrupt(self) -> None:
        """Every call of this client that waits, and every later one that could, ends with ServerClosed."""
        self._tables.interrupt()

    def wake(self) -> None:
        """Makes the calls that wait look whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends this client; what its writers hold is inserted as far as it has room."""
        for writer in list(self._writers):
            writer.close(timeout=0)
        self.abandon()

    def abandon(self) -> None:
        """Called when the server stops: no call goes through after it."""
        self._tables.interrupt(close=True)


class _Source(contracts.Source):
    """See `contracts.Source`. The client's next reader gets what is given back."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._interrupted = False

    def draw(
        self, table: str, n: int, timeout: float | None, out: list[Any] | None, pad: bool
    ) -> tuple[ReplaySample | PaddedSample, tuple[str, list[Any]]]:
        sample, samples = self._client.draw(table, n, timeout, out, pad, lambda: self._interrupted)
        return sample, (table, samples)

    def release(self, drawn: tuple[str, list[Any]]) -> None:
        return

    def give_back(self, drawn: tuple[str, list[Any]]) -> None:
        self._client.keep(*drawn)

    def can_sample(self, table: str, n: int) -> bool:
        return self._client.can_sample(table, n)

    def interrupt(self) -> None:
        self._interrupted = True
        self._client.wake()

    def close(self) -> None:
        return
