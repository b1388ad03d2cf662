"""Items of n-step transitions that need to know their whole episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from framework.adders.block import Block
from framework.adders.nstep import NStepFormat
from framework.types import FIRST, MID


class WholeFormat(NStepFormat):
    """The base of formats that keep the rows of an episode until it ends.

    Args:
      n_step: as in `NStepTransitionAdder`.
      discount: as in `NStepTransitionAdder`.
      reward_clip: as in `NStepTransitionAdder`.
      max_steps: number of steps of an episode that are kept until it ends. A longer one is treated as if each
        `max_steps` of its steps were an episode.

    Attributes:
      least: the number of rows before a block that the windows of n steps need.
      begins: int64 `[B]`, the time index of the first step of each env's open episode.
    """

    def __init__(self, n_step: int, discount: float, reward_clip: float | None, max_steps: int):
        super().__init__(n_step, discount, False, reward_clip)
        self._max_steps = max_steps
        self.least = n_step if n_step > 1 else 0

    def begin(self, block: Block) -> None:
        super().begin(block)
        self.begins = np.full(block.num_envs, block.history)
        self._length = len(block.rows)

    def windows(self, block: Block, end: int) -> tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]] | None:
        if len(block.rows) != self._length:  # The arrays have grown with the history, and are others.
            self.sum_over(block)
            self._length = len(block.rows)
        return super().windows(block, end)

    def finish(self, block: Block, end: int) -> tuple[np.ndarray, ...]:
        """Returns the parts of episodes that end here; the block keeps the rows of the others.

        Returns:
          int64 `[p]` each: the time indices of their first rows and of their closing rows, and their envs.
        """
        found, history, begins = [], block.history, self.begins
        kinds = block.step_types[history : end + 1]
        for time, env in np.argwhere(kinds != MID):
            is_first, time = kinds[time, env] == FIRST, time + history
            found.append((begins[env], time - is_first, env))  # The row before FIRST closes.
            begins[env] = time + 1 - is_first
        for env in np.flatnonzero(end - begins >= self._max_steps):
            found.append((begins[env], end, env))
            begins[env] = end
        block.next_history = max(self.least, end - int(begins.min()))
        self.begins = begins - (end - block.next_history)
        parts = np.array([part for part in found if part[0] < part[1]], np.int64)
        return tuple(parts.reshape(-1, 3).T)
