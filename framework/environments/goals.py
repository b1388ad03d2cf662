"""Environments whose observations show a goal: rewards as functions of goals, for hindsight, and a maze."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import dm_env
import numpy as np

from framework import specs
from framework.config_checks import whole_number
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment
from framework.environments.fields import FieldChecker
from framework.environments.single import SingleEnv
from framework.environments.testing import make_spec
from framework.types import Nest


class GoalOutcomes:
    """The `outcome` of a `specs.GoalReward`: an environment's functions of goals, as gymnasium names them.

    `compute_reward(achieved_goal, desired_goal, info)` takes goals `[n, ...]` and returns rewards `[n]`.
    `compute_terminated`, if there is one, is asked about one goal at a time, because most in
    gymnasium-robotics take a single one. `info` is empty.

    Args:
      name: the environment's, for errors.
      make: makes an environment, from which the functions are taken. It is called in the process that needs
        them, when it does: a simulator cannot be pickled.
    """

    def __init__(self, name: str, make: Callable[[], SingleEnv]):
        self._name, self._make = name, make
        self._env: SingleEnv | None = None

    def __reduce__(self) -> tuple[type[GoalOutcomes], tuple[str, Callable[[], SingleEnv]]]:
        return type(self), (self._name, self._make)

    def __call__(self, achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._env is None:
            self._env = self._make()
        reward, terminated = map(self._env.method, ("compute_reward", "compute_terminated"))
        if reward is None:
            raise ValueError(
                f"{self._name}: got no compute_reward(achieved_goal, desired_goal, info), expected a method "
                "that takes arrays [n, ...] and returns the rewards [n] of goals. Hindsight needs it."
            )
        ends = np.zeros(len(achieved), np.bool_)
        if terminated is not None:
            ends[:] = [terminated(*pair, {}) for pair in zip(achieved, desired, strict=True)]
        return np.asarray(reward(achieved, desired, {})), ends


def declare(environment: BatchedEnvironment, make: Callable[[], SingleEnv]) -> None:
    """Gives an environment with goals the spec of a reward that is a function of them; see `GoalOutcomes`."""
    spec = environment.spec
    if specs.has_goals(spec) and not isinstance(spec.rewards, specs.GoalReward):
        outcome = GoalOutcomes(environment.name, make)
        reward = specs.GoalReward((), spec.rewards.dtype, spec.rewards.name, outcome)
        environment.spec = spec._replace(rewards=reward)


class PointMaze(BatchedEnvironment):
    """A point goes to a goal in a room with a wall in its middle.

    The room is [-1, 1]²; the wall is at y = 0, from x = -0.3 to 0.3. A move stops at it, and slides along it.
    Observations are a dict of float32[2]: `observation` and `achieved_goal` are the position, which starts
    below the wall, and `desired_goal` is a place anywhere in the room, both uniform. Action float32[2]: the
    move, ±1 being ±0.1. The reward is 0 within 0.05 of the goal, and -1 elsewhere. Episodes are truncated
    after `max_steps` steps, and not ended by the goal. `is_success` is among the `infos`.
    """

    name = "tasks:PointMaze"

    def __init__(self, num_envs: int = 1, seed: int | None = None, max_steps: int = 50):
        """Makes B envs.

        Args:
          num_envs: B.
          seed: seed of the starts and goals.
          max_steps: steps after which an episode is truncated.
        """
        self.num_envs, self._max_steps = num_envs, whole_number("max_steps", max_steps, 1)
        place = specs.BoundedArray((2,), np.float32, -1.0, 1.0)
        self.spec = make_spec(
            dict.fromkeys(("observation", specs.ACHIEVED_GOAL, specs.DESIRED_GOAL), place),
            specs.BoundedArray((2,), np.float32, -1.0, 1.0, name="action"),
        )
        self._check_action = FieldChecker(self.name, "action", self.spec.actions, num_envs)
        self._rng = np.random.default_rng(seed)
        self._seeds: dict[int, int] = {}  # By env, its next episode's.
        self._places, self._goals = np.zeros((2, num_envs, 2), np.float32)
        self._steps = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, bool)  # envs whose next step starts an episode
        self._is_success = np.full(num_envs, np.nan)

    @property
    def infos(self) -> Mapping[str, np.ndarray]:
        return {"is_success": self._is_success}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Nest) -> np.ndarray:
        """Rewards `[n]` of goals `[n, 2]`."""
        return (np.linalg.norm(achieved_goal - desired_goal, axis=-1) <= 0.05).astype(np.float32) - 1

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._seeds.update((int(env), int(seeds[env])) for env in np.flatnonzero(envs))

    def reset(self) -> dm_env.TimeStep:
        self._over[:] = True
        return self._advance(np.zeros((self.num_envs, 2), np.float32))

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._advance(self._check_action(action)[0])

    def _advance(self, move: np.ndarray) -> dm_env.TimeStep:
        first = self._over
        # New arrays: time steps that were returned stay as they are.
        x, y = self._places.T
        to_x, to_y = np.clip(self._places + 0.1 * np.clip(move, -1, 1), -1, 1).T
        crosses = (y > 0) != (to_y > 0)
        share = y / np.where(crosses, y - to_y, 1)  # of the move, until it is at the wall
        blocked = crosses & (np.abs(x + share * (to_x - x)) < 0.3)
        self._places = np.stack([to_x, np.where(blocked, y, to_y)], axis=1).astype(np.float32)
        self._goals = self._goals.copy()
        for env in np.flatnonzero(first).tolist():
            rng = np.random.default_rng(self._seeds.pop(env)) if env in self._seeds else self._rng
            self._places[env] = rng.uniform([-1, -1], [1, -0.1])
            self._goals[env] = rng.uniform(-1, 1, 2)
        self._steps = np.where(first, 0, self._steps + 1)
        self._over = self._steps >= self._max_steps
        reward = self.compute_reward(self._places, self._goals, {})
        self._is_success = np.where(first, np.nan, reward + 1.0)
        return dm_env.TimeStep(
            step_type=np.where(first, FIRST, np.where(self._over, LAST, MID)),
            reward=np.where(first, 0, reward).astype(np.float32),
            discount=np.ones(self.num_envs, np.float32),
            observation={
                "observation": self._places.copy(),  # The caller may change it.
                specs.ACHIEVED_GOAL: self._places.copy(),
                specs.DESIRED_GOAL: self._goals.copy(),
            },
        )
