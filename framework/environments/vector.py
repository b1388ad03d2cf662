"""B environments inside one gymnasium vector environment that computes them together."""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import (
    FIRST,
    LAST,
    MID,
    ActionChecker,
    BatchedEnvironment,
    EnvironmentFault,
    check_finite,
)
from framework.types import Nest


class VectorEnvironment(BatchedEnvironment):
    """A `gymnasium.vector.VectorEnv` in `NEXT_STEP` autoreset mode.

    All envs may share one random generator (CartPole's do): then env i's episodes depend on how many
    envs there are, unlike with the other ways to step.
    """

    def __init__(self, name: str, environment: Any, seed: int | None):
        """Takes over `environment`, which must not have been reset yet.

        Raises:
          ValueError: the environment resets in another mode than NEXT_STEP.
        """
        self.name = name
        self._environment = environment
        self.num_envs = int(environment.num_envs)
        mode = autoreset_mode(environment)
        if mode != "NextStep":
            raise ValueError(
                f"{name}: the vector environment's autoreset mode is {mode!r}, expected NEXT_STEP: otherwise "
                "the last observation of an episode is lost. Use stepping='inline' or 'processes', or make "
                "the vector environment with autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP."
            )
        self._seed = seed
        observation_space = environment.single_observation_space
        action_space = environment.single_action_space
        self.spec = specs.from_spaces(observation_space, action_space)
        self._columns = specs.leaves(self.spec.observations)
        self._single = not tree.is_nested(self.spec.observations)
        self._build_observation = nests.unflattener(self.spec.observations)
        self._build_action = nests.unflattener(self.spec.actions)
        self._observation_offsets = specs.discrete_offsets(observation_space)
        self._action_offsets = specs.discrete_offsets(action_space)
        self._check_action = ActionChecker(name, self.spec.actions, self.num_envs)
        self._over: np.ndarray | None = None  # bool[B]: envs whose last step was LAST; None before a reset

    def reset(self) -> dm_env.TimeStep:
        seed, self._seed = self._seed, None
        try:
            observation, _ = self._environment.reset(seed=seed)
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: reset() raised {type(error).__name__}: {error}.") from error
        envs = self.num_envs
        self._over = np.zeros(envs, bool)
        return dm_env.TimeStep(
            step_type=np.full(envs, FIRST, np.int64),
            reward=np.zeros(envs, np.float32),
            discount=np.ones(envs, np.float32),
            observation=self._observe(observation),
        )

    def step(self, action: Nest) -> dm_env.TimeStep:
        arrays = self._check_action(action)
        if self._over is None:  # dm_env: a step before any reset is a reset
            return self.reset()
        arrays = [
            array + offset if offset else array
            for array, offset in zip(arrays, self._action_offsets, strict=True)
        ]
        try:
            observation, reward, terminated, truncated, _ = self._environment.step(self._build_action(arrays))
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: step() raised {type(error).__name__}: {error}.") from error
        over = terminated | truncated
        step_type = np.where(over, LAST, MID)
        reward = np.asarray(reward, np.float32)
        if reward.shape != (self.num_envs,):
            raise EnvironmentFault(
                f"{self.name}: reward has shape {reward.shape}, expected {(self.num_envs,)}: one per env."
            )
        discount = 1.0 - terminated.astype(np.float32)
        if self._over.any():
            step_type[self._over] = FIRST
            reward = np.where(self._over, np.float32(0), reward)
            discount[self._over] = 1.0
            over = over & ~self._over
        self._over = over
        check_finite(self.name, "reward", (), reward)
        return dm_env.TimeStep(step_type, reward, discount, self._observe(observation))

    def _observe(self, observation: Nest) -> Nest:
        columns = []
        for (path, leaf), offset in zip(self._columns, self._observation_offsets, strict=True):
            array = np.asarray(observation if self._single else specs.pick(observation, path))
            if array.shape != (self.num_envs, *leaf.shape):
                raise EnvironmentFault(
                    f"{self.name}: {specs.path_name('observation', path)} has shape {array.shape}, expected "
                    f"{(self.num_envs, *leaf.shape)}."
                )
            if array.dtype != leaf.dtype:
                array = array.astype(leaf.dtype)
            check_finite(self.name, "observation", path, array)
            columns.append(array - offset if offset else array)
        return columns[0] if self._single else self._build_observation(columns)

    def render(self, env: int = 0) -> np.ndarray:
        pictures = self._environment.render()
        if pictures is None:
            raise NotImplementedError(f"{self.name}: make the environment with render_mode='rgb_array'.")
        return np.asarray(pictures[env])

    def close(self) -> None:
        self._environment.close()


def autoreset_mode(environment: Any) -> str | None:
    """`NextStep`, `SameStep` or `Disabled` as a gymnasium vector environment declares it, or None."""
    mode = (getattr(environment, "metadata", None) or {}).get("autoreset_mode")
    return getattr(mode, "value", mode)
