"""What all clients and sources of replay share."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from framework.replay.contracts import ReplayClient, Source
from framework.replay.types import Out, Sample


class BaseSource(Source):
    """A `Source` of one client."""

    spare: int | None = None
    keeps = False
    _client: Any

    def ask(self, table: str, n: int, timeout: float | None, pad: bool, least: int | None = None) -> Any:
        return table, n, None if timeout is None else time.monotonic() + timeout, pad

    def answer(self, asked: Any, out: Out) -> tuple[list[Any], Any]:
        table, n, deadline, pad = asked
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        sample, drawn = self.draw(table, n, left, out, pad)
        return [sample], drawn

    def drop(self, asked: Any) -> None:
        pass

    def weight(self, table: str) -> Callable[[], tuple[float, int, int]]:
        """Asks for what `Table.weight` returns; the result waits for the answer."""
        return functools.partial(self._client.weight, table)

    def release(self, drawn: Any) -> None:
        pass

    def can_sample(self, table: str, n: int) -> bool:
        return self._client.can_sample(table, n)

    def close(self) -> None:
        pass


class BaseClient(ReplayClient):
    """A `ReplayClient` whose methods call a `Table`'s, in this process or in the server's."""

    def sample_batch(
        self, table: str, batch_size: int, timeout: float | None = None, out: Out = None, pad: bool = False
    ) -> Sample:
        with self._reader() as source:
            sample, drawn = source.draw(table, batch_size, timeout, out, pad)
            source.release(drawn)
        return sample

    def single_samples(self, table: str, n: int, timeout: float | None = None) -> Iterator[Sample]:
        for _ in range(n):
            yield self.sample_batch(table, 1, timeout)

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        self._mutate(table, keys, priorities, ())

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float] | None = None, deletes: Sequence[int] | None = None
    ) -> None:
        updates = updates or {}
        self._mutate(table, list(updates.keys()), list(updates.values()), () if deletes is None else deletes)

    def can_sample(self, table: str, n: int = 1) -> bool:
        return bool(self._call_table(table, "can_sample", n))

    def refusals(self, timeout: float | None = None) -> list[str]:
        return [
            f"table {info.name!r} refuses the next {side}: {why}"
            for info in self.server_info(timeout=timeout).values()
            for side, why in (("sample", info.why_not_sample), ("insert", info.why_not_insert))
            if why
        ]

    def can_insert(self, table: str, n: int = 1) -> bool:
        return bool(self._call_table(table, "can_insert", n))

    def reset(self, table: str) -> None:
        self._call_table(table, "reset")

    def _reader(self) -> contextlib.AbstractContextManager[Source]:
        """Lends a source for one batch."""
        return contextlib.nullcontext(self.source())

    def _mutate(self, table: str, keys: Any, priorities: Any, deletes: Any) -> None:
        """Deletes the items `deletes`, then sets `priorities` of the items `keys`."""
        self._call_table(table, "mutate", keys, priorities, deletes)

    def _call_table(self, table: str, method: str, *arguments: Any) -> Any:
        """Calls a method of a `Table`. Clients that override the methods that use it do not need it."""
        raise NotImplementedError
