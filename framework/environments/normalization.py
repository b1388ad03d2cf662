"""Normalisation of observations and rewards by statistics that follow the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest, specs
from framework.core import Saveable
from framework.environments.base import FIRST, LAST, BatchedEnvironment
from framework.environments.wrappers import EnvironmentWrapper
from framework.types import Nest


class RunningStatistics(Saveable):
    """Mean and variance of a stream of arrays, one number per position, in float64.

    Batches are merged by Chan, Golub & LeVeque (1979), "Updating formulae and a pairwise algorithm for
    computing sample variances": with counts n_a, n_b, delta = mean_b - mean_a and n = n_a + n_b,
    mean = mean_a + delta n_b / n and M2 = M2_a + M2_b + delta² n_a n_b / n. The variance is M2 / n.
    """

    def __init__(self, shape: tuple[int, ...] = ()):
        self.count = 0
        self.mean = np.zeros(shape, np.float64)
        self._m2 = np.zeros(shape, np.float64)

    @property
    def variance(self) -> np.ndarray:
        """float64[*shape]; ones before there are two values."""
        return self._m2 / self.count if self.count > 1 else np.ones_like(self._m2)

    def update(self, batch: np.ndarray) -> None:
        """Takes in ``[n, *shape]``; n may be 0."""
        n = len(batch)
        if n == 0:
            return
        batch = np.asarray(batch, np.float64)
        mean = batch.mean(axis=0)
        self._merge(n, mean, ((batch - mean) ** 2).sum(axis=0))

    def merge(self, other: RunningStatistics) -> None:
        """Takes in all that another one has seen."""
        if other.count:
            self._merge(other.count, other.mean, other._m2)

    def _merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self._m2 = self._m2 + m2 + delta**2 * (self.count * count / total)
        self.count = total

    def save(self) -> dict[str, Any]:
        return {"count": self.count, "mean": np.array(self.mean), "m2": np.array(self._m2)}

    def restore(self, state: Mapping[str, Any]) -> None:
        mean, m2 = np.array(state["mean"], np.float64), np.array(state["m2"], np.float64)
        if mean.shape != self.mean.shape:
            raise ValueError(
                f"the saved statistics have shape {mean.shape}, expected {self.mean.shape}; restore them "
                "into an environment with the same observations."
            )
        self.count, self.mean, self._m2 = int(state["count"]), mean, m2


class NormalizeObservation(EnvironmentWrapper):
    """Floating observations as float32 (x - mean) / std, clipped; integers (pictures) stay as they are.

    Every env's observations count, each once. For evaluation give another environment the training
    environment's ``save()`` by ``restore``, and ``freeze()`` it.
    """

    def __init__(
        self, environment: BatchedEnvironment, clip: float = 10.0, epsilon: float = 1e-8, update: bool = True
    ):
        """Wraps an environment.

        Args:
          clip: bound of the result's absolute value, in standard deviations.
          epsilon: added to the variance, against division by zero.
          update: whether new observations change the statistics.
        """
        super().__init__(environment)
        self.update = update
        self._clip = clip
        self._epsilon = epsilon
        self.statistics: list[RunningStatistics | None] = [
            RunningStatistics(leaf.shape) if leaf.dtype.kind == "f" else None
            for leaf in tree.flatten(environment.observation_spec())
        ]
        self._build = nest.unflattener(environment.observation_spec())

    def observation_spec(self) -> Nest:
        def normalized(leaf: specs.Array) -> specs.Array:
            if leaf.dtype.kind != "f":
                return leaf
            return specs.BoundedArray(leaf.shape, np.float32, -self._clip, self._clip, name=leaf.name)

        return tree.map_structure(normalized, self._environment.observation_spec())

    def reset(self) -> dm_env.TimeStep:
        return self._normalize(self._environment.reset())

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._normalize(self._environment.step(action))

    def _normalize(self, timestep: dm_env.TimeStep) -> dm_env.TimeStep:
        columns = []
        for statistics, column in zip(self.statistics, tree.flatten(timestep.observation), strict=True):
            if statistics is not None:
                if self.update:
                    statistics.update(column)
                scale = 1.0 / np.sqrt(statistics.variance + self._epsilon)
                column = np.clip((column - statistics.mean) * scale, -self._clip, self._clip)
                column = column.astype(np.float32)
            columns.append(column)
        return timestep._replace(observation=self._build(columns))

    def freeze(self) -> None:
        self.update = False
        super().freeze()

    def own_state(self) -> dict[str, Any]:
        return {str(i): item.save() for i, item in enumerate(self.statistics) if item is not None}

    def set_own_state(self, state: dict[str, Any]) -> None:
        for index, item in enumerate(self.statistics):
            if item is not None:
                item.restore(state[str(index)])


class NormalizeReward(EnvironmentWrapper):
    """Rewards divided by the standard deviation of the running discounted return, and clipped.

    With G_t = discount · G_{t-1} + r_t within an episode, the reward becomes r_t / sqrt(var(G) + epsilon):
    the scale changes, the sign does not. The environment loop's episode returns stay in the environment's own
    scale: it sums ``unscaled_reward``.
    """

    def __init__(
        self,
        environment: BatchedEnvironment,
        discount: float = 0.99,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        update: bool = True,
    ):
        """Wraps an environment whose reward is a scalar.

        Args:
          discount: the agent's discount factor.
          clip: bound of the result's absolute value.
          epsilon: added to the variance, against division by zero.
          update: whether new rewards change the statistics.
        """
        super().__init__(environment)
        reward_spec = environment.reward_spec()
        if tree.is_nested(reward_spec) or reward_spec.shape != ():
            raise ValueError(
                f"{self.name}: NormalizeReward needs a scalar reward, got the spec {reward_spec}; "
                "normalise nested rewards in the environment."
            )
        self.update = update
        self._discount = discount
        self._clip = clip
        self._epsilon = epsilon
        self.statistics = RunningStatistics()
        self._returns = np.zeros(self.num_envs)
        self._unscaled = np.zeros(self.num_envs, np.float32)

    def reset(self) -> dm_env.TimeStep:
        self._returns[:] = 0.0
        timestep = self._environment.reset()
        self._unscaled = timestep.reward
        return timestep

    def step(self, action: Nest) -> dm_env.TimeStep:
        timestep = self._environment.step(action)
        self._unscaled = timestep.reward
        moved = timestep.step_type != FIRST
        if self.update:
            self._returns = self._discount * self._returns + timestep.reward
            self.statistics.update(self._returns[moved])
            self._returns[(timestep.step_type == LAST) | ~moved] = 0.0
        scale = 1.0 / np.sqrt(float(self.statistics.variance) + self._epsilon)
        reward = np.clip(timestep.reward * scale, -self._clip, self._clip).astype(np.float32)
        return timestep._replace(reward=reward)

    def unscaled_reward(self, timestep: dm_env.TimeStep) -> Nest:
        return self._unscaled

    def freeze(self) -> None:
        self.update = False
        super().freeze()

    def reward_spec(self) -> Nest:
        return specs.BoundedArray((), np.float32, -self._clip, self._clip, name="reward")

    def own_state(self) -> dict[str, Any]:
        return {"return": self.statistics.save()}

    def set_own_state(self, state: dict[str, Any]) -> None:
        self.statistics.restore(state["return"])
