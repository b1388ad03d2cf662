"""Items of rows of a fixed length, overlapping or not."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection
from typing import Any

import numpy as np

from framework.adders.block import Block, ItemBatch
from framework.adders.block_adder import BlockAdder
from framework.adders.item_writer import PriorityFns, sees_items
from framework.adders.rows import RowFormat, StepRows, step_signature
from framework.config_checks import whole_number
from framework.specs import frame_stack, leaves, path_name
from framework.types import LAST, Nest


class EndOfEpisodeBehavior(enum.Enum):
    """How an adder handles the rows at the end of an episode that do not fill a sequence.

    An episode of T = 7 steps has the rows 1 ... 8; row 8 is the closing row. With `sequence_length` 3 and
    `period` 3:

    ```text
    ZERO_PAD    1 2 3 | 4 5 6 | 7 8 0          zeros up to the next write point
    TRUNCATE    1 2 3 | 4 5 6 | 7 8            a shorter item
    WRITE       1 2 3 | 4 5 6 | 6 7 8          the last three rows; episodes with fewer rows are dropped
    CONTINUE    1 2 3 | 4 5 6 | 7 8 1' | ...   the item goes on with rows of the next episode
    ```
    """

    ZERO_PAD = "zero_pad"
    TRUNCATE = "truncate"
    WRITE = "write"
    CONTINUE = "continue"


class SequenceAdder(BlockAdder):
    """Writes `Step` items: rows [k, k + L) when an episode has L rows, then every `period` rows.

    An episode of T steps has T + 1 rows. `EndOfEpisodeBehavior` says how the rows that do not fill a sequence
    are handled. `mask` tells transitions from the closing row and padding. Overlapping sequences of one
    episode share their rows, and padding takes no memory. An item without a transition is not written. An
    episode that is cut short by a FIRST step ends like a truncated one, with its last observation in the
    closing row.
    """

    signature = staticmethod(step_signature)

    def __init__(
        self,
        client: Any,
        sequence_length: int,
        period: int,
        end_of_episode_behavior: EndOfEpisodeBehavior | str = EndOfEpisodeBehavior.ZERO_PAD,
        *,
        extras_of_first_row: Collection[str] = (),
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
        observation_spec: Nest | None = None,
        priorities_see_observations: bool = True,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          sequence_length: number of rows in an item, at least 1.
          period: number of rows from the start of one item to the start of the next, in
            [1, `sequence_length`].
          end_of_episode_behavior: an `EndOfEpisodeBehavior` or its name, upper or lower case.
          extras_of_first_row: keys of the extras that an item needs for its first row only, such as a
            recurrent state. In an item they have no time axis; other rows' are not stored.
          priority_fns: `{table: fn or None}`; each item goes to each table. `fn` takes a `Step` of k items
            (leaves `[k, L, ...]`, shorter items padded with zeros) and returns k priorities. None means the
            largest priority so far.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too; None
            means 512.
          max_delay: seconds; see `BlockAdder`.
          observation_spec: nest of the specs of one env's observations. Each frame of a leaf with a spec of
            `specs.frame_stack` is stored once, instead of k times. In an item, such a leaf is `[L * k, ...]`,
            the k frames of each of the L rows; `restacked` makes `[L, k, ...]` of it. Not with TRUNCATE.
            None stores observations as they are.
          priorities_see_observations: whether the items that `priority_fns` get have observations. Without
            them these are None, and copies of images are saved.
        """
        length = whole_number("sequence_length", sequence_length, 1)
        if whole_number("period", period, 1) > length:
            raise ValueError(
                f"period: got {period} with sequence_length {sequence_length}, expected at most the sequence "
                "length. Rows between two sequences would be lost."
            )
        at_end = _as_behavior(end_of_episode_behavior)
        continues = at_end is EndOfEpisodeBehavior.CONTINUE
        ragged = at_end is EndOfEpisodeBehavior.TRUNCATE  # including items of full length
        rows = StepRows(length, extras_of_first_row, ragged=ragged, continues=continues)
        stacks: dict[str, int] = {}  # the number of frames of each column that is a stack
        if observation_spec is not None and not ragged:
            for path, leaf in leaves(observation_spec):
                if (k := frame_stack(leaf)) is not None:
                    stacks[path_name("observation", path)] = k
        if len(set(stacks.values())) > 1:
            stacks = {}  # rows of different numbers of frames
        sees_observations = priorities_see_observations and sees_items(priority_fns)
        super().__init__(
            client,
            SequenceFormat(rows, period, at_end),
            new_block=functools.partial(
                Block, history=length - 1, keeps_observations=sees_observations, stacks=stacks
            ),
            priority_fns=priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
            continues=continues,
        )


@dataclasses.dataclass(eq=False)
class SequenceFormat(RowFormat):
    """The format of a `SequenceAdder`."""

    period: int
    at_end: EndOfEpisodeBehavior

    def emit(self, block: Block, end: int) -> ItemBatch:
        length, period = self.rows.length, self.period
        new, real, counts = self.rows.new_rows(block)
        self.rows.append(block, new, real)
        full = new & (counts >= length) & ((counts - length) % period == 0)
        size = np.where(full, length, 0)  # real and closing rows in the item that ends here; 0: no item
        tails = new & ~real & ~full
        num_dropped = 0
        if self.at_end is not EndOfEpisodeBehavior.CONTINUE and tails.any():
            if self.at_end is EndOfEpisodeBehavior.WRITE:
                num_dropped = int(np.count_nonzero(tails & (counts > 1) & (counts < length)))
                size[tails & (counts >= length)] = length
            else:
                # The write point that the episode did not reach; the item starts `length` rows before it.
                missing = np.where(counts < length, length - counts, -(counts - length) % period)
                size[tails] = (length - missing)[tails]
        steps, envs = np.nonzero(size)
        # Items are ordered as add() completed their rows, whatever the size of the blocks: a LAST row is
        # complete together with the row before it.
        order = np.lexsort((steps, envs, steps - (block.step_types[steps, envs] == LAST)))
        steps, envs = steps[order], envs[order]
        items = self.rows.items(block, steps, envs, size[steps, envs], real)
        items.num_dropped_episodes = num_dropped
        return items


def _as_behavior(value: EndOfEpisodeBehavior | str) -> EndOfEpisodeBehavior:
    if isinstance(value, EndOfEpisodeBehavior):
        return value
    try:
        return EndOfEpisodeBehavior[str(value).upper()]
    except KeyError:
        names = ", ".join(behavior.name for behavior in EndOfEpisodeBehavior)
        raise ValueError(f"end_of_episode_behavior: got {value!r}, expected one of {names}.") from None
