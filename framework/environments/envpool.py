"""EnvPool's environments (Weng et al., 2022): B envs that C++ threads step together."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from framework import specs
from framework.environments.stepping import VectorEnvironment
from framework.types import Nest


class EnvPoolEnvironment(VectorEnvironment):
    """A task of EnvPool, whose own preprocessing the options set.

    Stacks of Atari's gray frames are `StackedBoundedArray`s, so replay stores each frame once.

    Args:
      task: a name of `envpool.list_all_envs()`, such as `Pong-v5`.
      num_envs: B.
      seed: seed of all envs. None: a different one in every run.
      options: fields of the task's config, such as `num_threads` (0 is one per core) or `stack_num`.

    Raises:
      ValueError: There is no such task or option, or an env of the task has several players.
    """

    def __init__(self, task: str, num_envs: int = 1, seed: int | None = None, **options: Any):
        import envpool

        name = f"envpool:{task}"
        if task not in envpool.list_all_envs():
            raise ValueError(f"unknown environment {name!r}; envpool.list_all_envs() names EnvPool's tasks.")
        config = envpool.make_spec(task).config
        unknown = sorted(set(options) - set(config._fields))
        if unknown or config.max_num_players != 1:
            what = f"the options {unknown}" if unknown else f"{config.max_num_players} players in an env"
            known = ", ".join(config._fields)
            raise ValueError(f"{name}: got {what}, expected one player and options among {known}.")
        seed = int(np.random.SeedSequence(seed).generate_state(1)[0] % 2**31)
        pool = envpool.make_gymnasium(task, num_envs=num_envs, **{"seed": seed, **options})
        super().__init__(name, _Pool(pool, num_envs), None)
        config = pool.spec.config
        if "gray_scale" in config._fields and config.gray_scale and config.stack_num > 1:
            self.spec = self.spec._replace(observations=tree.map_structure(_as_stack, self.spec.observations))


def _as_stack(leaf: specs.BoundedArray) -> specs.StackedBoundedArray:
    return specs.StackedBoundedArray(leaf.shape, leaf.dtype, leaf.minimum, leaf.maximum, name=leaf.name)


class _Pool:
    """A pool with the attributes of a `gymnasium.vector.VectorEnv`."""

    # An env begins its next episode in the step after its last; the action of that step is ignored.
    metadata = {"autoreset_mode": "NextStep"}

    def __init__(self, pool: Any, num_envs: int):
        self._pool, self.num_envs = pool, num_envs
        self.single_observation_space, self.single_action_space = pool.observation_space, pool.action_space
        self.close = pool.close

    def reset(self, seed: None = None) -> tuple[Nest, dict[str, Any]]:
        return self._pool.reset()

    def step(self, action: Nest) -> tuple[Nest, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        return self._pool.step(action)

    def render(self) -> None:
        raise NotImplementedError("EnvPool cannot render; use the environment of another suite.")
