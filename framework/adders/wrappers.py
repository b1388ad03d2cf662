"""Adders that wrap other adders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from framework.adders.base import Adder
from framework.environments.rows import TimeStepRows
from framework.types import Nest


class ForkingAdder(Adder):
    """Passes every call to several adders: one stream of experience gives items of several kinds."""

    def __init__(self, adders: Sequence[Adder]):
        self._adders = list(adders)
        if not self._adders:
            raise ValueError("adders: got none, expected at least one.")

    def add_first(self, timestep: Any) -> None:
        for adder in self._adders:
            adder.add_first(timestep)

    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        for adder in self._adders:
            adder.add(action, next_timestep, extras)

    def time_step_rows(self) -> TimeStepRows | None:
        first = self._adders[0]
        return first.time_step_rows() if isinstance(first, Adder) else None  # The others copy them.

    def end_episodes(self) -> None:
        for adder in self._adders:
            adder.end_episodes()

    def reset(self) -> None:
        for adder in self._adders:
            adder.reset()

    def ready(self) -> bool:
        return all(adder.ready() for adder in self._adders)

    def room(self) -> int:
        return min(adder.room() if isinstance(adder, Adder) else 1 for adder in self._adders)

    def flush_pending(self, late: bool = False) -> None:
        for adder in self._adders:
            if isinstance(adder, Adder):  # One of a user's own may have the abstract methods only.
                adder.flush_pending(late)

    def make_room(self) -> None:
        for adder in self._adders:
            adder.make_room()

    def flush(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for adder in self._adders:
            adder.flush(_left(deadline))

    def close(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        dropped = 0
        error: Exception | None = None
        for adder in self._adders:
            try:
                dropped += adder.close(_left(deadline))
            except Exception as raised:  # The others have items to write, too.
                error = error or raised
        if error is not None:
            raise error
        return dropped


class IgnoreExtrasAdder(ForkingAdder):
    """Passes every call to an adder without the extras."""

    def __init__(self, adder: Adder):
        super().__init__([adder])

    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        super().add(action, next_timestep)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
