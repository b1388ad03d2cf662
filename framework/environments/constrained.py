"""An environment with costs beside the rewards, for agents that keep them below a limit."""

from __future__ import annotations

import dm_env
import numpy as np

from framework import specs
from framework.config_checks import whole_number
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment
from framework.environments.fields import FieldChecker
from framework.environments.testing import make_spec
from framework.types import Nest


class WindingRoad(BatchedEnvironment):
    """A car that should be fast, but not in bends.

    The road bends to and fro: its curvature is (1 + sin θ) / 2 where θ is 2π times the way, in units of 20
    steps at full speed. Action float32[1]: the acceleration, ±1 being ±0.1 a step. The speed v stays between
    0 and 1. Observation float32[3]: v, sin θ and cos θ. The reward is a dict: `reward`, the way of the step,
    which is v, and `cost`, the lateral acceleration, which is v² times the curvature. An episode begins
    standing, anywhere on the road, and is truncated after `max_steps` steps.
    """

    name = "tasks:WindingRoad"

    def __init__(self, num_envs: int = 1, seed: int | None = None, max_steps: int = 100):
        """Makes B envs.

        Args:
          num_envs: B.
          seed: seed of the starts.
          max_steps: steps after which an episode is truncated.
        """
        self.num_envs, self._max_steps = num_envs, whole_number("max_steps", max_steps, 1)
        self.spec = make_spec(
            specs.BoundedArray((3,), np.float32, -1.0, 1.0, name="observation"),
            specs.BoundedArray((1,), np.float32, -1.0, 1.0, name="action"),
            {name: specs.Array((), np.float32, name=name) for name in (specs.COST, specs.REWARD)},
        )
        self._check_action = FieldChecker(self.name, "action", self.spec.actions, num_envs)
        self._rng = np.random.default_rng(seed)
        self._seeds: dict[int, int] = {}  # By env, its next episode's.
        self._speeds, self._angles = np.zeros((2, num_envs))
        self._steps = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, bool)  # Envs whose next step starts an episode.

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._seeds.update((int(env), int(seeds[env])) for env in np.flatnonzero(envs))

    def reset(self) -> dm_env.TimeStep:
        self._over[:] = True
        return self._advance(np.zeros(self.num_envs))

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._advance(self._check_action(action)[0][:, 0])

    def _advance(self, acceleration: np.ndarray) -> dm_env.TimeStep:
        first = self._over
        speeds = np.clip(self._speeds + 0.1 * np.clip(acceleration, -1, 1), 0, 1)
        self._speeds = np.where(first, 0.0, speeds)
        self._angles = (self._angles + np.pi / 10 * self._speeds) % (2 * np.pi)
        for env in np.flatnonzero(first).tolist():
            rng = np.random.default_rng(self._seeds.pop(env)) if env in self._seeds else self._rng
            self._angles[env] = rng.uniform(0, 2 * np.pi)
        self._steps = np.where(first, 0, self._steps + 1)
        self._over = self._steps >= self._max_steps
        cost = self._speeds**2 * (1 + np.sin(self._angles)) / 2
        seen = [self._speeds, np.sin(self._angles), np.cos(self._angles)]
        return dm_env.TimeStep(
            step_type=np.where(first, FIRST, np.where(self._over, LAST, MID)),
            reward={specs.COST: cost.astype(np.float32), specs.REWARD: self._speeds.astype(np.float32)},
            discount=np.ones(self.num_envs, np.float32),
            observation=np.stack(seen, 1).astype(np.float32),
        )
