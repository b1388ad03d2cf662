"""Several discrete choices as one action."""

from __future__ import annotations

import math
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import BatchedEnvironment
from framework.environments.fields import FieldChecker, allowed
from framework.environments.wrappers import EnvironmentWrapper
from framework.types import Nest


class CombineActions(EnvironmentWrapper):
    """All discrete parts of an action as one: a `DiscreteArray` of all combinations, for DQN and its family.

    The first part changes slowest. A mask of the parts becomes a mask of the combinations.
    """

    def __init__(self, environment: BatchedEnvironment):
        super().__init__(environment)
        actions = self.spec.actions
        self._leaves = tree.flatten(actions)
        self._sizes = specs.choices(actions)
        if len(self._sizes) != sum(math.prod(leaf.shape) for leaf in self._leaves):
            raise ValueError(
                f"action spec: got {actions!r}, expected discrete actions only. Use an agent for nests of "
                "actions, such as PPO."
            )
        mask = specs.action_mask(self.spec.observations)
        if mask is not None and not specs.has_action_mask(self.spec):
            shapes = [leaf.shape for leaf in tree.flatten(mask)]
            raise ValueError(
                f"{environment.name}: {specs.ACTION_MASK}: got shapes {shapes} in the observation, expected "
                f"{sum(self._sizes)} entries along one axis, one for each value of each discrete action in "
                f"{actions!r}. Fix the environment's mask."
            )
        self._build = nests.unflattener(actions)
        count = math.prod(self._sizes)
        self.spec = self.spec._replace(
            actions=specs.DiscreteArray(count, dtype=np.int64, name="action"),
            observations=_with_mask(
                self.spec.observations, specs.Array((count,), bool, name=specs.ACTION_MASK)
            ),
        )
        self._check_action = FieldChecker(self.name, "action", self.spec.actions, self.num_envs)

    def reset(self) -> dm_env.TimeStep:
        return self._combined(self._environment.reset())

    def step(self, action: Nest) -> dm_env.TimeStep:
        (chosen,) = self._check_action(action)
        parts = np.stack(np.unravel_index(chosen, self._sizes), -1)
        leaves, at = [], 0
        for leaf in self._leaves:
            size = math.prod(leaf.shape)
            values = leaf.minimum + parts[:, at : at + size].reshape(-1, *leaf.shape)
            leaves.append(values.astype(leaf.dtype))
            at += size
        return self._combined(self._environment.step(self._build(leaves)))

    def _combined(self, timestep: dm_env.TimeStep) -> dm_env.TimeStep:
        mask = specs.action_mask(timestep.observation)
        if mask is None:
            return timestep
        combined = np.ones((self.num_envs, 1), bool)
        for part in np.split(allowed(mask), np.cumsum(self._sizes)[:-1], axis=1):
            combined = (combined[:, :, None] & part[:, None, :]).reshape(self.num_envs, -1)
        return timestep._replace(observation=_with_mask(timestep.observation, combined))


def _with_mask(observation: Nest, mask: Any) -> Nest:
    """The observation with another mask, if it has one."""
    if isinstance(observation, tuple | list):
        entries = [_with_mask(entry, mask) for entry in observation]
        return type(observation)(*entries) if hasattr(observation, "_fields") else type(observation)(entries)
    if not isinstance(observation, dict):
        return observation
    return {
        name: mask if name == specs.ACTION_MASK else _with_mask(entry, mask)
        for name, entry in observation.items()
    }
