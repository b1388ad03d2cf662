"""The running return of each env, for statistics of returns that unrolls do not cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from framework.adders.base import Adder
from framework.adders.wrappers import ForkingAdder
from framework.types import FIRST, Nest

RUNNING_RETURN = "running_return"


class RunningReturnAdder(ForkingAdder):
    """Adds to the extras, which must be a dict, each env's return before the step, as `running_return`.

    That of row t is float32 `[B]` R_t, with R_{t+1} = discount R_t + r_{t+1}, and R = 0 where an episode
    starts: the return of baselines' `VecNormalize` (Dhariwal et al., 2017), which is a sum over the past.

    Args:
      adder: takes the steps.
      discount: per env step.
      rewards: a nest like the rewards, of any leaves; the running returns are one, too.
    """

    def __init__(self, adder: Adder, discount: float, rewards: Nest = 0.0):
        super().__init__([adder])
        self._discount = np.float32(discount)
        self._returns: Any = rewards

    def add_first(self, timestep: Any) -> None:
        super().add_first(timestep)
        shape = np.shape(timestep.step_type)
        self._returns = tree.map_structure(lambda _: np.zeros(shape, np.float32), self._returns)

    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        super().add(action, next_timestep, {**extras, RUNNING_RETURN: self._returns})
        begins = np.equal(next_timestep.step_type, FIRST)

        def after(before: np.ndarray, reward: np.ndarray) -> np.ndarray:
            return np.where(begins, np.float32(0), self._discount * before + reward).astype(np.float32)

        rewards = self._returns if begins.all() else next_timestep.reward
        self._returns = tree.map_structure(after, self._returns, rewards)
