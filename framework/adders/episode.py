"""Items of whole episodes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from framework.adders.block import NO_ROW, STEPS, Block, ItemBatch
from framework.adders.block_adder import BlockAdder
from framework.adders.item_writer import PriorityFns, sees_items
from framework.adders.rows import PaddingFn, RowFormat, StepRows, step_signature
from framework.config_checks import whole_number
from framework.types import FIRST, LAST


class EpisodeAdder(BlockAdder):
    """Writes one `Step` item for each finished episode, with all its T + 1 rows.

    Unfinished episodes are not written: a FIRST step or `reset()` in mid-episode drops the open one.
    `num_dropped_episodes` counts them. `end_episodes()` finishes it.
    """

    signature = staticmethod(step_signature)

    def __init__(
        self,
        client: Any,
        max_sequence_length: int,
        padding_fn: PaddingFn | None = None,
        *,
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
        limit_name: str = "max_sequence_length",
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          max_sequence_length: the largest number of rows (observations) of an episode, at least 2; it has
            one transition fewer. A step that would make an episode longer raises `ValueError` and is not
            added.
          padding_fn: takes the `(shape, dtype)` of one row's leaf and returns the value that fills items up
            to `max_sequence_length`, as `numpy.zeros` does. Rows of padding have `start_of_episode` False and
            mask 0. None writes items that are as long as their episode.
          priority_fns: `{table: fn or None}`; each item goes to each table. `fn` takes a `Step` of k items
            (leaves `[k, max_sequence_length, ...]`, padded) and returns k priorities. None means the largest
            priority so far.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too; None
            means 512.
          max_delay: seconds; see `BlockAdder`.
          limit_name: the name of the setting that limits the episodes, for the error.
        """
        length = whole_number("max_sequence_length", max_sequence_length, 2)
        super().__init__(
            client,
            EpisodeFormat(StepRows(length, ragged=padding_fn is None, padding_fn=padding_fn), limit_name),
            new_block=functools.partial(Block, keeps_observations=sees_items(priority_fns)),
            priority_fns=priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
        )

    def time_step_rows(self) -> None:
        return  # Each block has a history of another length, which moves the rows.


@dataclasses.dataclass(eq=False)
class EpisodeFormat(RowFormat):
    """The format of an `EpisodeAdder`."""

    limit_name: str

    def check(self, block: Block, step_types: np.ndarray) -> None:
        length = self.rows.length
        if block.end - block.history + 1 + self.rows.before.max() < length:
            return
        over = (self.rows.numbers(block)[-1] >= length) & (step_types != FIRST)
        if over.any():
            raise ValueError(
                f"{self.limit_name}: got episodes of more than {length} observations in envs "
                f"{np.flatnonzero(over).tolist()}, expected at most {length - 1} steps. Give a larger "
                f"{self.limit_name}, or limit the environment's steps, as StepLimit does. To drop these "
                "episodes and go on, call reset() or add_first()."
            )

    def emit(self, block: Block, end: int) -> ItemBatch:
        new, real, counts = self.rows.new_rows(block)
        # Rows stay in the arrays until their episode ends.
        block.next_history = int(np.where(block.step_types[end] == LAST, 0, counts[end] - 1).max())
        self.rows.append(block, new, real)
        times, envs = np.nonzero(new & ~real)
        sizes = counts[times, envs]
        is_whole = block.step_types[times, envs] >= LAST  # or ENDED
        items = self.rows.items(block, times[is_whole], envs[is_whole], sizes[is_whole], real)
        for time, env, size in zip(times, envs, sizes, strict=True):
            rows = block.rows[time - size + 1 : time + 1, env]
            block.release(STEPS, rows)
            rows[:] = NO_ROW
        items.num_dropped_episodes = int(np.count_nonzero((sizes > 1) & ~is_whole))
        return items
