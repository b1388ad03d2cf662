"""The client of a dm-reverb server; see `framework.replay.dm_reverb`."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

from framework.replay.base import BaseClient, BaseSource
from framework.replay.dm_reverb import convert
from framework.replay.dm_reverb.writer import ReverbWriter, ServerTables
from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.types import Drawn, Out, TableInfo, check_keys, check_priorities
from framework.replay.writers import Writers

# Seconds between two polls of a table without samples: dm-reverb offers no notification.
_LOOK = 0.005


class DmReverbClient(ServerTables, BaseClient):
    """A client of a dm-reverb server; see `contracts.ReplayClient`.

    Args:
      server_address: address of the server, such as `"localhost:8000"`.
      concurrent: whether other threads use the tables too. If not, a call that would wait forever raises
        `WouldBlockError`.
    """

    def __init__(self, server_address: str, *, concurrent: bool = True) -> None:
        super().__init__(server_address, concurrent)
        self._writers = Writers(elsewhere=True)
        # By table: drawn samples that were not returned yet, and the number being drawn.
        self._drawn: dict[str, list[Any]] = collections.defaultdict(list)
        self._coming: dict[str, int] = collections.Counter()
        self._failed: BaseException | None = None

    # Writing.

    def batch_writer(self, max_in_flight_items: int | None = None) -> ReverbWriter:
        """Returns a writer for B envs; see `ReverbWriter`."""
        writer = ReverbWriter(self, max_in_flight_items, self._writers, self.can_insert)
        self._writers.add(writer)
        return writer

    # Sampling.

    def source(self) -> _Source:
        """Returns the source that a `Dataset` draws from."""
        return _Source(self)

    def keep(self, table: str, samples: list[Any]) -> None:
        """Keeps samples for the next draw, because dm-reverb has counted them and cannot take them back."""
        with self.changed:
            self._drawn[table] += samples

    def take(self, table: str, n: int, timeout: float | None, cancelled: Callable[[], bool]) -> list[Any]:
        """Returns n samples. Ends with `ServerClosed` once `cancelled()`.

        If the call fails, the samples drawn so far are kept, and the next call returns them.
        """
        if n < 1:
            raise ValueError(f"table {table!r}, n: got {n}, expected at least 1 sample.")
        deadline = None if timeout is None else time.monotonic() + timeout
        drawn = self._drawn[table]
        while True:
            if self.interrupted or cancelled():
                raise ServerClosed("The client was interrupted or closed.")
            with self.changed:
                if self._failed is not None:
                    failed, self._failed = self._failed, None
                    raise failed
                if len(drawn) >= n:
                    samples, drawn[:n] = drawn[:n], []
                    return samples
            self._writers.show()
            info = self.infos()[table]
            with self.changed:
                missing = n - len(drawn)
                more = convert.samples_to_be_had(info, missing, certain=True) - self._coming[table]
                self._coming[table] += max(0, more)
            if more > 0 and self.concurrent:
                threading.Thread(
                    target=self._fetch, args=(table, more), name="reverb-sample", daemon=True
                ).start()
            elif more > 0:
                self._fetch(table, more)
            elif deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"table {table!r}: got fewer than {n} samples in {timeout} s.")
            elif not self.concurrent:
                raise WouldBlockError(
                    f"table {table!r}: the rate limiter refuses {missing} of {n} samples, and no other "
                    "thread can insert items."
                )
            with self.changed:
                if not self.interrupted and len(drawn) < n:
                    self.changed.wait(_LOOK)

    def _fetch(self, table: str, n: int) -> None:
        """Draws n samples, which the table has now, unless another reader draws them first.

        dm-reverb cannot cancel a call that waits. A concurrent client therefore calls this in a thread that
        can be abandoned.
        """
        samples: list[Any] = []
        failed: Exception | None = None
        try:
            samples = convert.draw(self.native, table, n)
        except Exception as error:  # the call that waits for the samples raises it
            failed = error
        with self.changed:
            self._coming[table] -= n
            self._drawn[table] += samples
            self._failed = failed or self._failed
            self.changed.notify_all()

    # Items.

    def _mutate(self, table: str, keys: Any, priorities: Any, deletes: Any) -> None:
        keys = check_keys(table, keys)
        priorities = check_priorities(table, priorities, len(keys))
        self.signature(table)  # raises UnknownTableError
        self._writers.show()
        updates = dict(zip(keys.tolist(), priorities.tolist(), strict=True))
        self.native.mutate_priorities(table, updates, [int(key) for key in deletes])
        self.saw_priorities(table, priorities)

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""
        self.signature(table)  # raises UnknownTableError
        self._writers.show()
        self.native.reset(table)
        with self.changed:
            self._drawn[table].clear()
        self.max_priorities.pop(table, None)

    # Inspecting.

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Returns whether n samples can be drawn now without waiting."""
        self._writers.show()
        missing = max(0, n - len(self._drawn[table]))
        return convert.samples_to_be_had(self.infos()[table], missing, certain=False) == missing

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Returns whether n items can be inserted now without waiting."""
        self._writers.show()
        return self.has_room(table, n)

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Returns a description of each table. `timeout` is rounded up to whole seconds."""
        self._writers.show()
        return self.infos(timeout)

    def checkpoint(self) -> str:
        """Makes the server write a checkpoint; returns its path."""
        self.check_open()
        self._writers.show()
        return self.native.checkpoint()

    # Closing.

    def close(self) -> None:
        """Closes this client; inserts its writers' items as far as the tables have room."""
        self._writers.call_all("close", 0)
        self.interrupt(close=True)


class _Source(BaseSource):
    """See `contracts.Source`. The client's next reader gets the samples that are given back."""

    def __init__(self, client: DmReverbClient) -> None:
        self._client = client
        self._interrupted = False

    def draw(self, table: str, n: int, timeout: float | None, out: Out, pad: bool) -> Drawn:
        signature = self._client.signature(table)
        samples = self._client.take(table, n, timeout, lambda: self._interrupted)
        try:
            return convert.stack(table, samples, signature, out, pad), (table, samples)
        except BaseException:
            self._client.keep(table, samples)
            raise

    def give_back(self, drawn: tuple[str, list[Any]]) -> None:
        self._client.keep(*drawn)

    def interrupt(self) -> None:
        with self._client.changed:
            self._interrupted = True
            self._client.changed.notify_all()
