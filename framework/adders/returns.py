"""The running return of each env, for statistics of returns that unrolls do not cut."""

from __future__ import annotations

from typing import Any

import numpy as np

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
      reward_clip: rewards are clipped to +- this before they are summed; None keeps them.
    """

    def __init__(self, adder: Adder, discount: float, reward_clip: float | None = None):
        super().__init__([adder])
        self._discount = np.float32(discount)
        self._limit = np.inf if reward_clip is None else reward_clip
        self._returns = np.zeros((), np.float32)

    def add_first(self, timestep: Any) -> None:
        super().add_first(timestep)
        self._returns = np.zeros(np.shape(timestep.step_type), np.float32)

    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        super().add(action, next_timestep, {**extras, RUNNING_RETURN: self._returns})
        begins = np.equal(next_timestep.step_type, FIRST)
        rewards = 0 if begins.all() else np.clip(next_timestep.reward, -self._limit, self._limit)
        after = self._discount * self._returns + rewards
        self._returns = np.where(begins, np.float32(0), after).astype(np.float32)
