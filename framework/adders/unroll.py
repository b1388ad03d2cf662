"""Items that are whole unrolls: complete the moment the last step is made, for agents that wait for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from framework.adders.base import Adder
from framework.adders.block import FIRST, PriorityFns
from framework.adders.sequence import EndOfEpisodeBehavior, SequenceAdder
from framework.types import Nest


class UnrollAdder(Adder):
    """Writes a ``Step`` item of ``unroll_length + 1`` rows per lane after each ``unroll_length`` steps.

    A row of the environment's step type is there for each step, so that all lanes write at the same time::

        calls of add     1     2     3     4   |   5     6     7     8   |
        lane 0           o0    o1    o2    o3  (o4) o4   o5   o6    o7  (o8)      an episode that goes on
        mask             1     1     1     1    0   1    1    1     1    0
        lane 1           o0    o1    o2    o'0 (o'1) o'1 ...                      one of two steps, a reset
        mask             1     1     0     1    0   1

    The last row of an item (in brackets) is closing: it holds the newest observation, to bootstrap from,
    and is there again as the first row of the next item, where its action is. A ``SequenceAdder`` whose
    items overlap by one row takes the action into that row, so that it completes an item only when the
    *next* unroll has begun: too late for an actor that waits for what is learned from this one.

    ``start_of_episode`` is also set in the first row of each item. A recurrent learner starts that row from
    the stored state, which is the initial one if an episode begins there, and looks at later rows only.
    """

    def __init__(self, client: Any, unroll_length: int, *, priority_fns: PriorityFns | None = None):
        """Makes an adder for one batched environment.

        Args:
          client: any client of ``framework.replay``.
          unroll_length: steps of the environment in an item, at least 2: one alone may be a reset.
          priority_fns: as in ``SequenceAdder``.
        """
        if unroll_length != int(unroll_length) or unroll_length < 2:
            raise ValueError(f"unroll_length: got {unroll_length!r}, expected a whole number of at least 2.")
        rows = int(unroll_length) + 1
        self._adder = SequenceAdder(
            client, rows, rows, EndOfEpisodeBehavior.CONTINUE, priority_fns=priority_fns
        )
        self._unroll_length = int(unroll_length)
        self._steps = 0  # rows of the item under way
        self._open = self._acted = False

    def add_first(self, timestep: Any) -> None:
        # A reset in the middle ends a row; before the first action there is none to end.
        ends_row = self._open and self._acted
        self._adder.add_first(timestep)
        self._open = True
        if ends_row:
            self._count(timestep)

    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        self._adder.add(action, next_timestep, extras)
        self._acted = True
        self._count(next_timestep)

    def reset(self) -> None:
        self._adder.reset()
        self._steps = 0
        self._open = False

    def ready(self) -> bool:
        return self._adder.ready()

    def flush(self, timeout: float | None = None) -> None:
        self._adder.flush(timeout)

    def close(self, timeout: float | None = None) -> int:
        return self._adder.close(timeout)

    def _count(self, timestep: Any) -> None:
        self._steps += 1
        if self._steps < self._unroll_length:
            return
        self._steps = 0
        firsts = np.full_like(np.asarray(timestep.step_type), FIRST)
        self._adder.add_first(timestep._replace(step_type=firsts))
        # Who waits for this unroll should not wait for the staging too.
        self._adder.flush_pending()
