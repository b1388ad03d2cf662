"""Items that are whole unrolls: complete the moment the last step is made, for agents that wait for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from framework.adders.base import QUEUE_TABLE
from framework.adders.block import NO_EXTRAS, PriorityFns
from framework.adders.sequence import EndOfEpisodeBehavior, SequenceAdder
from framework.types import FIRST, Nest

_RETRY = 0.05  # seconds between two tries to get an unroll into a table that has no room, if no step follows


class UnrollAdder(SequenceAdder):
    """Writes a ``Step`` item of ``unroll_length + 1`` rows per env after each ``unroll_length`` steps.

    A row of the environment's step type is there for each step, so that all envs write at the same time::

        calls of add     1     2     3     4   |   5     6     7     8   |
        env 0           o0    o1    o2    o3  (o4) o4   o5   o6    o7  (o8)      an episode that goes on
        mask             1     1     1     1    0   1    1    1     1    0
        env 1           o0    o1    o2    o'0 (o'1) o'1 ...                      one of two steps, a reset
        mask             1     1     0     1    0   1

    The last row of an item (in brackets) is closing: it holds the newest observation, to bootstrap from,
    and is there again as the first row of the next item, where its action is. A ``SequenceAdder`` whose
    items overlap by one row takes the action into that row, so that it completes an item only when the
    *next* unroll has begun: too late for an actor that waits for what is learned from this one.

    ``start_of_episode`` is also set in the first row of each item. A recurrent learner starts that row from
    the stored state, which is the initial one if an episode begins there, and looks at later rows only.
    """

    def __init__(
        self,
        client: Any,
        unroll_length: int,
        *,
        extras_of_first_row: Collection[str] = (),
        priority_fns: PriorityFns | None = None,
    ):
        """Makes an adder for one batched environment.

        Args:
          client: any client of ``framework.replay``.
          unroll_length: steps of the environment in an item, at least 2: one alone may be a reset.
          extras_of_first_row: as in ``SequenceAdder``.
          priority_fns: as in ``SequenceAdder``.
        """
        if unroll_length != int(unroll_length) or unroll_length < 2:
            raise ValueError(f"unroll_length: got {unroll_length!r}, expected a whole number of at least 2.")
        rows = int(unroll_length) + 1
        self._unroll_length = int(unroll_length)
        self._made = 0  # steps of the unroll under way
        super().__init__(
            client,
            rows,
            rows,
            EndOfEpisodeBehavior.CONTINUE,
            extras_of_first_row=extras_of_first_row,
            priority_fns={QUEUE_TABLE: None} if priority_fns is None else priority_fns,
            # An unroll waits until the one before is in the tables: what is learned from stays new, however
            # many items a writer could keep in flight.
            max_in_flight_items=1,
            max_delay=_RETRY,
        )

    def add_first(self, timestep: Any) -> None:
        with self._lock:
            # A reset in the middle ends a row; before the first action there is none to end.
            ends_row = self._open and self._action is not None
            super().add_first(timestep)
            if ends_row:
                self._count(timestep)

    def add(self, action: Nest, next_timestep: Any, extras: Nest = NO_EXTRAS) -> None:
        with self._lock:
            super().add(action, next_timestep, extras)
            self._count(next_timestep)

    def reset(self) -> None:
        with self._lock:
            super().reset()
            self._made = 0

    def ready(self) -> bool:
        with self._lock:
            # Only the last step of an unroll makes items.
            if self._open and self._made < self._unroll_length - 1:
                return not self._closed
            return super().ready()

    def flush_pending(self) -> None:
        # Whoever reads asks often; rows that are no item yet need not be written for that.
        if self._made == 0:
            super().flush_pending()

    def _staged(self) -> None:
        """Between the ends of unrolls there is nothing to see, so nothing to write."""

    def _count(self, timestep: Any) -> None:
        self._made += 1
        if self._made < self._unroll_length:
            return
        self._made = 0
        firsts = np.full_like(np.asarray(timestep.step_type), FIRST)
        super().add_first(timestep._replace(step_type=firsts))
        # Who waits for this unroll should not wait for the staging too.
        super().flush_pending()
