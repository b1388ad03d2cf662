"""Items of whole unrolls, complete with their last step, for actors that wait for the learner."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from framework.adders.base import QUEUE_TABLE
from framework.adders.block import NO_EXTRAS, PriorityFns
from framework.adders.sequence import EndOfEpisodeBehavior, SequenceAdder
from framework.config_checks import whole_number
from framework.types import FIRST, Nest


class UnrollAdder(SequenceAdder):
    """Writes a `Step` item of `unroll_length + 1` rows per env after each `unroll_length` steps.

    Each step gives one row, even if it is a reset, so that all envs write at the same time:

    ```text
    calls of add     1     2     3     4   |   5     6     7     8   |
    env 0           o0    o1    o2    o3  (o4) o4   o5   o6    o7  (o8)      an episode that goes on
    mask             1     1     1     1    0   1    1    1     1    0
    env 1           o0    o1    o2    o'0 (o'1) o'1 ...                      one of two steps, a reset
    mask             1     1     0     1    0   1
    ```

    The last row of an item (in parentheses) is closing: it holds the newest observation, to bootstrap from.
    The same observation is in the first row of the next item, together with its action. A `SequenceAdder`
    whose items overlap by one row needs the action in that row, so it completes an item only after the first
    step of the *next* unroll. That is too late for an actor that waits until the learner has used this
    unroll.

    `start_of_episode` is also set in the first row of each item. A recurrent learner starts that row from the
    stored state, which is the initial state if an episode begins there. It reads `start_of_episode` in later
    rows only.

    An env in which no step of an unroll is a transition (an agent that waits for others) writes an item, too,
    whose mask is 0. Each unroll is therefore one batch.
    """

    _writes_early = False
    _writes_empty = True

    # The last step of an unroll advances twice. In a block of one step, the second could wait for room.
    _min_steps = 2

    # Each block looks at all rows of its unroll. A whole unroll is one block, if it has the room.
    _max_rows = sys.maxsize

    def __init__(
        self,
        client: Any,
        unroll_length: int,
        *,
        extras_of_first_row: Collection[str] = (),
        priority_fns: PriorityFns | None = None,
        unrolls_in_flight: int = 1,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          unroll_length: number of environment steps in an item, at least 2, because one step may be a reset.
          extras_of_first_row: as in `SequenceAdder`.
          priority_fns: as in `SequenceAdder`.
          unrolls_in_flight: number of unrolls, at least 1, that may be on their way to the table, or wait for
            room, while the next is made. If there are more, the last `add` of an unroll waits for the oldest.
            Has no effect with a client that is not concurrent.
        """
        self._unrolls_in_flight = whole_number("unrolls_in_flight", unrolls_in_flight, 1)
        self._unroll_length = whole_number("unroll_length", unroll_length, 2)
        rows = self._unroll_length + 1
        self._made = 0  # steps of the current unroll
        super().__init__(
            client,
            rows,
            rows,
            EndOfEpisodeBehavior.CONTINUE,
            extras_of_first_row=extras_of_first_row,
            priority_fns={QUEUE_TABLE: None} if priority_fns is None else priority_fns,
            max_in_flight_items=None if client.concurrent else 1,
        )

    def _allocate(self, observation: Nest) -> None:
        super()._allocate(observation)
        if self._concurrent:
            self._max_in_flight = self._unrolls_in_flight * self._width

    def add(self, action: Nest, next_timestep: Any, extras: Nest = NO_EXTRAS) -> None:
        with self._lock:
            # A step that is a reset in all envs is a row, too, though no transition has declared the fields.
            if self._open and len(self._fields) == 1 and next_timestep.reward is not None:
                self._declare(action, next_timestep, extras)
            super().add(action, next_timestep, extras)

    def ready(self) -> bool:
        # Only the last step of an unroll makes items.
        if self._open and self._made < self._unroll_length - 1:
            return not self._closed
        return super().ready()

    def make_room(self) -> None:
        if not self._concurrent and self._made + 1 == self._unroll_length:
            self._flush_writer(None)
        super().make_room()

    def _advance(self, kind: Any) -> None:
        ends = self._made + 1 == self._unroll_length
        if ends and not self._concurrent:
            self._flush_writer(None)
        super()._advance(kind)
        self._made += 1
        if ends:
            self._made = 0
            # Repeats the observation as the first of an episode, so that the row before it closes.
            self._observation.repeat(self._t)
            super()._advance(FIRST)
            self._write_block()
            if self._concurrent:
                # Sends the unroll, and waits for those before it, so that the learner gets new experience.
                self._writer.flush(keep=self._max_in_flight)

    def _forget(self) -> None:
        super()._forget()
        self._made = 0
