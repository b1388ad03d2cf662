"""Returns of whole episodes, as extras: what was earned before a step, and what is earned from it on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tree

from framework.adders.base import Adder
from framework.adders.block import Block, ItemBatch
from framework.adders.block_adder import BlockAdder
from framework.adders.item_writer import PriorityFns, sees_items
from framework.adders.whole import WholeFormat
from framework.adders.wrappers import ForkingAdder
from framework.config_checks import whole_number
from framework.specs import path_name
from framework.types import FIRST, Nest

RUNNING_RETURN = "running_return"
RETURN_TO_GO = "return_to_go"


class RunningReturnAdder(ForkingAdder):
    """Adds to the extras, a dict or nothing, each env's return before the step, as `running_return`.

    That of row t is float32 `[B]` R_t, with R_{t+1} = discount R_t + r_{t+1}, and R = 0 where an episode
    starts: the return of baselines' `VecNormalize` (Dhariwal et al., 2017), which is a sum over the past.

    Args:
      adder: takes the steps.
      discount: per env step.
      rewards: a nest like the rewards, of any leaves; the running returns are one, too.
      reward_clip: rewards are clipped to +- this before they are summed; None keeps them.
    """

    def __init__(self, adder: Adder, discount: float, rewards: Nest = 0.0, reward_clip: float | None = None):
        super().__init__([adder])
        self._discount = np.float32(discount)
        self._limit = np.inf if reward_clip is None else reward_clip
        self._returns: Any = rewards

    def add_first(self, timestep: Any) -> None:
        super().add_first(timestep)
        shape = np.shape(timestep.step_type)
        self._returns = tree.map_structure(lambda _: np.zeros(shape, np.float32), self._returns)

    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        super().add(action, next_timestep, {**dict(extras), RUNNING_RETURN: self._returns})
        begins = np.equal(next_timestep.step_type, FIRST)

        def after(before: np.ndarray, reward: np.ndarray) -> np.ndarray:
            total = self._discount * before + np.clip(reward, -self._limit, self._limit)
            return np.where(begins, np.float32(0), total).astype(np.float32)

        rewards = self._returns if begins.all() else next_timestep.reward
        self._returns = tree.map_structure(after, self._returns, rewards)


class ReturnToGoAdder(BlockAdder):
    """Adds to the extras, which must be a dict, the discounted return from each step on, as `return_to_go`.

    The items are a `NStepTransitionAdder`'s; they are written when their episode ends. The return of
    an item is float32, from the first step of its window to the end of the episode:

    ```text
    G_t = r_t + g d_t G_{t+1}
    ```

    A terminated episode ends with d = 0. A truncated one is taken to go on with its mean reward: G_T = mean /
    (1 - g), or 0 if g is 1. If all of its rewards are r, each G is r / (1 - g), as for failed
    episodes in the code of Nakamoto et al. (2023). With G_T = 0, negative returns would rise near the end.
    """

    def __init__(
        self,
        client: Any,
        n_step: int,
        discount: float,
        *,
        max_steps: int = 10_000,
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
        frame_stack: int | None = None,
        reward_clip: float | None = None,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          n_step: as in `NStepTransitionAdder`.
          discount: the agent's discount g, in [0, 1].
          max_steps: number of steps of an episode that are kept until it ends. A longer one is treated as if
            each `max_steps` of its steps were an episode.
          priority_fns: as in `NStepTransitionAdder`.
          max_in_flight_items: as in `NStepTransitionAdder`.
          max_delay: seconds; see `BlockAdder`.
          frame_stack: as in `NStepTransitionAdder`.
          reward_clip: as in `NStepTransitionAdder`. Returns are of clipped rewards.
        """
        n, most = whole_number("n_step", n_step, 1), whole_number("max_steps", max_steps, 1)
        item_format = ReturnToGoFormat(n, float(discount), reward_clip, most)
        new_block = functools.partial(
            Block,
            history=item_format.least,
            max_rows=max_in_flight_items,
            keeps_observations=sees_items(priority_fns),
            stacks=frame_stack,
        )
        super().__init__(
            client,
            item_format,
            new_block=new_block,
            priority_fns=priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
        )

    def add(self, action: Nest, next_timestep: Any, extras: Nest = ()) -> None:
        not_known = np.zeros(np.shape(next_timestep.step_type), np.float32)
        super().add(action, next_timestep, {**dict(extras), RETURN_TO_GO: not_known})

    def time_step_rows(self) -> None:
        return  # Each block has a history of another length, which moves the rows.


class ReturnToGoFormat(WholeFormat):
    """The format of a `ReturnToGoAdder`: windows wait until their episode ends."""

    def begin(self, block: Block) -> None:
        super().begin(block)
        if len(block.fields["reward"].arrays) > 1 or block.fields["reward"].arrays[0].ndim > 2:
            raise ValueError(
                f"reward: got {block.fields['reward'].template!r}, expected one number for each env to have "
                "returns."
            )
        self._waiting: list[np.ndarray] = []  # What `items` takes, of windows whose return is not known.

    def emit(self, block: Block, end: int) -> ItemBatch:
        if (windows := self.windows(block, end)) is not None:
            start, stop, sums = windows
            new = [start, stop, *sums]
            old = self._waiting or [each[:0] for each in new]
            self._waiting = [np.concatenate(pair) for pair in zip(old, new, strict=True)]
        self._sum(block, *self.finish(block, end))
        if not self._waiting:
            return ItemBatch()
        width, by = block.num_envs, end - block.next_history  # By how much the rows move to the front.
        known = self._waiting[0] // width - by < self.begins[self._waiting[0] % width]
        start, stop, *sums = (each[known] for each in self._waiting)
        items = self.items(block, start, stop, sums) if len(start) else ItemBatch()
        start, stop, *sums = (each[~known] for each in self._waiting)
        self._waiting = [start - by * width, stop - by * width, *sums]
        return items

    def _sum(self, block: Block, first: np.ndarray, last: np.ndarray, env: np.ndarray) -> None:
        """Sets the returns of parts of episodes, `[p]` each; see `finish`."""
        rewards, discounts = (block.fields[name].arrays[0] for name in ("reward", "discount"))
        extras = block.fields["extras"]
        returns = extras.arrays[extras.names.index(path_name("extras", (RETURN_TO_GO,)))]
        parts = zip(first, last, env, strict=True)
        means = [float(rewards[begin:end, which].mean()) for begin, end, which in parts]
        after = np.array(means) / (1.0 - self._g) if self._g < 1 else np.zeros(len(first))
        for step in range(1, int((last - first).max(initial=0)) + 1):
            inside = np.flatnonzero(last - step >= first)
            at = last[inside] - step, env[inside]
            after[inside] = rewards[at] + self._g * discounts[at] * after[inside]
            returns[at] = after[inside]
