"""Items of whole unrolls, complete with their last step, for actors that wait for the learner."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import numpy as np

from framework.adders.base import QUEUE_TABLE
from framework.adders.block import NO_ROW, STEPS, Block, ItemBatch
from framework.adders.block_adder import BlockAdder
from framework.adders.item_writer import PriorityFns
from framework.adders.rows import RowFormat, StepRows, step_signature
from framework.config_checks import whole_number
from framework.types import FIRST


class UnrollAdder(BlockAdder):
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

    signature = staticmethod(step_signature)

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
        steps = whole_number("unroll_length", unroll_length, 2)
        super().__init__(
            client,
            UnrollFormat(StepRows(steps + 1, extras_of_first_row, writes_empty=True)),
            new_block=functools.partial(Block, steps=steps),
            priority_fns={QUEUE_TABLE: None} if priority_fns is None else priority_fns,
            max_in_flight_items=None if client.concurrent else 1,
            max_in_flight_blocks=whole_number("unrolls_in_flight", unrolls_in_flight, 1),
            max_delay=None,
            continues=True,
        )


class UnrollFormat(RowFormat):
    """The format of an `UnrollAdder`: one item of each block and env."""

    def emit(self, block: Block, end: int) -> ItemBatch:
        new = np.ones((end + 1, block.num_envs), np.bool_)
        real = np.zeros_like(new)
        real[:-1] = block.transitions()
        self.rows.append(block, new, real)
        envs = np.arange(block.num_envs)
        items = self.rows.items(block, np.full_like(envs, end), envs, np.full_like(envs, end + 1), real)
        block.release(STEPS, block.rows[end])
        block.rows[end] = NO_ROW
        # The next unroll begins with the same observation, as the first of an episode.
        block.step_types[end] = FIRST
        return items
