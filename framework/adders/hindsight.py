"""Items of n-step transitions, and the same ones with goals that were achieved later in their episode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

from framework.adders.block import Block, ItemBatch
from framework.adders.block_adder import BlockAdder
from framework.adders.item_writer import PriorityFns
from framework.adders.nstep import NStepTransitionAdder
from framework.adders.whole import WholeFormat
from framework.config_checks import whole_number
from framework.specs import ACHIEVED_GOAL, DESIRED_GOAL, GoalOutcome, path_name

STRATEGIES = ("future", "final", "episode")
_ACHIEVED, _DESIRED = (path_name("observation", (name,)) for name in (ACHIEVED_GOAL, DESIRED_GOAL))


class HindsightAdder(BlockAdder):
    """Hindsight experience replay (Andrychowicz et al., 2017, section 3.3): each step with other goals, too.

    Observations are a dict with an `achieved_goal` and a `desired_goal`. The adder writes the items of a
    `NStepTransitionAdder`, in its order. When an episode ends, however it does, each of its steps is written
    `num_goals` times more, over the n steps from it (or to the end of the episode). Their desired goal, in
    both observations, is what was achieved

    - `future`: after a step of the episode from this one on, drawn uniformly, as in the paper;
    - `episode`: after a step of the episode, drawn uniformly;
    - `final`: at the end of the episode.

    Rewards and discounts belong to the new goal. An episode that terminates at a goal does so at the new
    one, and goes on at its own. An episode of T steps gives T + n - 1 + num_goals * T items.

    An observation is stored once: the desired goal of an item is a row of the achieved ones.
    """

    signature = NStepTransitionAdder.signature

    def __init__(
        self,
        client: Any,
        n_step: int,
        discount: float,
        outcome: GoalOutcome,
        *,
        num_goals: int = 4,
        strategy: str = "future",
        max_steps: int = 1000,
        seed: int = 0,
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
        reward_clip: float | None = None,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          n_step: the largest number of steps in a window; at least 1.
          discount: the agent's discount g, in [0, 1].
          outcome: of goals; see `specs.GoalReward` and `specs.goal_outcome`.
          num_goals: number of goals with which each step is written again, at least 1.
          strategy: "future", "final" or "episode".
          max_steps: number of steps of an episode that are kept until it ends. A longer one is treated as if
            each `max_steps` of its steps were an episode.
          seed: of the goals.
          priority_fns: as in `NStepTransitionAdder`.
          max_in_flight_items: as in `NStepTransitionAdder`.
          max_delay: seconds; see `BlockAdder`.
          reward_clip: each reward is clipped to +- this before rewards are summed; None keeps it.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy: got {strategy!r}, expected one of {', '.join(STRATEGIES)}.")
        item_format = HindsightFormat(
            whole_number("n_step", n_step, 1),
            float(discount),
            reward_clip,
            outcome,
            whole_number("num_goals", num_goals, 1),
            strategy,
            whole_number("max_steps", max_steps, 1),
            np.random.default_rng(seed),
        )
        super().__init__(
            client,
            item_format,
            new_block=functools.partial(Block, history=item_format.least, max_rows=max_in_flight_items),
            priority_fns=priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
        )

    def time_step_rows(self) -> None:
        return  # Each block has a history of another length, which moves the rows.


class HindsightFormat(WholeFormat):
    """The format of a `HindsightAdder`, whose arguments it takes."""

    def __init__(
        self,
        n_step: int,
        discount: float,
        reward_clip: float | None,
        outcome: GoalOutcome,
        num_goals: int,
        strategy: str,
        max_steps: int,
        random: np.random.Generator,
    ):
        super().__init__(n_step, discount, reward_clip, max_steps)
        self._outcome, self._num_goals, self._strategy = outcome, num_goals, strategy
        self._random = random
        self._checked = False  # whether `outcome` gave the rewards of an episode

    def begin(self, block: Block) -> None:
        super().begin(block)
        names, reward = block.fields["observation"].names, block.fields["reward"].template
        shapes = dict(
            zip(names, (each.shape[2:] for each in block.fields["observation"].arrays), strict=True)
        )
        if not {_ACHIEVED, _DESIRED} <= {*names} or shapes[_ACHIEVED] != shapes[_DESIRED]:
            raise ValueError(
                f"goals: got observations of the shapes {shapes}, expected a dict with {ACHIEVED_GOAL} and "
                f"{DESIRED_GOAL} of one shape. Use NStepTransitionAdder where there are no goals."
            )
        if tree.is_nested(reward) or np.shape(reward) != block.batch:
            raise ValueError(f"reward: got {reward!r}, expected one number for each env to have goals.")

    def emit(self, block: Block, end: int) -> Sequence[ItemBatch]:
        windows = self.windows(block, end)
        own = ItemBatch() if windows is None else self.items(block, *windows)
        finished = self.finish(block, end)
        return [own, self._again(block, *finished) if len(finished[0]) else ItemBatch()]

    def _again(self, block: Block, first: np.ndarray, last: np.ndarray, env: np.ndarray) -> ItemBatch:
        """Returns the items with other goals of parts of episodes, `[p]` each; see `finish`."""
        width, fields = block.num_envs, block.fields
        count = last - first
        time = np.concatenate([np.arange(*part) for part in zip(first, last, strict=True)])
        first, last, env = (np.repeat(each, count) for each in (first, last, env))
        self._check(block, time * width + env)
        time, first, last, env = (
            np.repeat(each, self._num_goals) for each in (time, first, last, env)
        )  # [k]
        earliest = {"future": time + 1, "episode": first + 1, "final": last}[self._strategy]
        goal = self._random.integers(earliest, last + 1) * width + env
        start, stop = time * width + env, np.minimum(time + self._n, last) * width + env
        goals = fields["observation"].take(goal)[_ACHIEVED]
        rewards, products = np.zeros(len(start)), np.ones(len(start))
        for step in reversed(range(self._n)):
            # Backwards in time: R <- r + g d R and D <- g d D; there is one g fewer than steps.
            at = start + step * width
            inside = np.flatnonzero(at < stop)
            reward, factor = self._outcomes(block, at[inside], goals[inside])
            g = np.where(at[inside] + width == stop[inside], 1.0, self._g)
            rewards[inside] = reward + g * factor * rewards[inside]
            products[inside] *= g * factor
        kinds = [fields[name].arrays[0].dtype for name in ("reward", "discount")]
        sums = rewards.astype(np.result_type(*kinds)), products.astype(kinds[1])
        return self.items(block, start, stop, sums, {_DESIRED: (_ACHIEVED, goal)})

    def _outcomes(self, block: Block, index: np.ndarray, goals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rewards and discounts, `[k]`, of the steps from rows `index` with other `goals`."""
        after = block.fields["observation"].take(index + block.num_envs)
        rewards, ends = self._call(after[_ACHIEVED], goals)
        discounts = block.fields["discount"].arrays[0].reshape(-1)[index]
        if len(over := np.flatnonzero(discounts == 0)):
            own = self._call(after[_ACHIEVED][over], after[_DESIRED][over])[1]
            discounts[over[own]] = 1.0  # It ended at its own goal.
        if self._reward_clip is not None:
            rewards = np.clip(rewards, -self._reward_clip, self._reward_clip)
        return rewards, np.where(ends, 0.0, discounts)

    def _call(self, achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = [np.asarray(each) for each in self._outcome(achieved, desired)]
        for name, each in zip(("rewards", "ends"), found, strict=True):
            if each.shape != (len(achieved),):
                raise ValueError(
                    f"goals: got {name} of shape {each.shape} for {len(achieved)} goals, expected one for "
                    "each. Compute over the last axes of the goals, as in numpy.linalg.norm(..., axis=-1)."
                )
        return found[0], found[1].astype(np.bool_)

    def _check(self, block: Block, index: np.ndarray) -> None:
        """Raises ValueError unless `outcome` gives the rewards of the first episodes with their own goals."""
        if not self._checked:
            own = block.fields["observation"].take(index + block.num_envs)[_DESIRED]
            rewards, given = (
                self._outcomes(block, index, own)[0],
                block.fields["reward"].arrays[0].reshape(-1)[index],
            )
            wrong = ~np.isclose(rewards, given, 1e-3, 1e-4)
            if wrong.any():
                raise ValueError(
                    f"goals: got the reward {given[wrong][0]} from a step for which compute_reward returns "
                    f"{rewards[wrong][0]}, expected equal ones. Leave out wrappers that change rewards or "
                    "goals; a reward that needs more than the goals has no hindsight."
                )
            self._checked = True
