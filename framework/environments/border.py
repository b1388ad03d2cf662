"""The border to batched environments and wrappers of other packages."""

from __future__ import annotations

import dm_env
import numpy as np

import launch
from framework import specs
from framework.environments.action_masks import MaskChecker
from framework.environments.base import (
    FIRST,
    LAST,
    MID,
    BatchedEnvironment,
    EnvironmentFault,
    UnexpectedReturn,
    describe,
    unrounded,
)
from framework.environments.fields import FieldChecker
from framework.environments.wrappers import EnvironmentWrapper
from framework.foreign import close, copies, is_foreign
from framework.types import MultiAgentTimeStep, Nest


def checked(environment: BatchedEnvironment) -> BatchedEnvironment:
    """The environment, behind a border if its class is of another package."""
    return Border(environment) if is_foreign(environment) else environment


class Border(EnvironmentWrapper):
    """Gives the environment inside copies of actions; checks and copies what it returns, at every step."""

    def __init__(self, environment: BatchedEnvironment):
        super().__init__(environment)
        name, num_envs, spec = self.name, self.num_envs, self.spec
        self.can_step_envs = environment.can_step_envs
        self._check_action = FieldChecker(name, "action", spec.actions, num_envs)
        self._check_observation = FieldChecker(name, "observation", spec.observations, num_envs)
        self._check_reward = FieldChecker(name, "reward", spec.rewards, num_envs)
        self._check_discount = FieldChecker(name, "discount", spec.discounts, num_envs)
        self._check_mask = MaskChecker(name, spec)
        kinds = specs.BoundedArray((), np.int64, FIRST, LAST)
        self._check_type = FieldChecker(name, "step_type", kinds, num_envs)
        agents = dict.fromkeys(specs.agents(spec), kinds)
        self._check_agents = FieldChecker(name, "agents", agents, num_envs) if agents else None
        self._exact: list[np.ndarray] | None = None

    @property
    def exact_rewards(self) -> list[np.ndarray] | None:
        return self._exact

    def reset(self) -> dm_env.TimeStep:
        return self._call("reset")

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._call("step", self._copied(action))

    def step_envs(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        return self._call("step_envs", self._copied(action), active.copy())

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._environment.seed_episodes(seeds.copy(), envs.copy())

    def end_episodes(self, envs: np.ndarray) -> None:
        self._environment.end_episodes(envs.copy())

    def _copied(self, action: Nest) -> Nest:
        return self._check_action.build([leaf.copy() for leaf in self._check_action(action)])

    def _call(self, method: str, *arguments: Nest) -> dm_env.TimeStep:
        try:
            timestep = getattr(self._environment, method)(*arguments)
            if not isinstance(timestep, dm_env.TimeStep | MultiAgentTimeStep):
                raise UnexpectedReturn(f"returned {type(timestep).__name__}, expected a dm_env.TimeStep")
        except (EnvironmentFault, NotImplementedError, launch.ProgramStopped):
            raise
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: {describe(f'{method}()', error)}") from error
        return self._take(timestep)

    def _take(self, timestep: dm_env.TimeStep) -> dm_env.TimeStep:
        taken = [
            check.build([leaf.copy() for leaf in check(value)])
            for check, value in (
                (self._check_type, timestep.step_type),
                (self._check_reward, timestep.reward),
                (self._check_discount, timestep.discount),
                (self._check_observation, timestep.observation),
            )
        ]
        self._exact = self._check_reward.exact
        if self._exact is None:
            rewards = timestep._replace(reward=taken[1])
            self._exact = unrounded(self._environment, rewards) if self._environment.exact_rewards else None
        self._check_mask(taken[0], taken[3])
        if self._check_agents is None:
            return dm_env.TimeStep(*taken)
        agents = self._check_agents.build(copies(self._check_agents(timestep.agents)))
        for name, kinds in agents.items():
            # The agents begin with the environment, and none goes on beyond its end.
            wrong = ((taken[0] == FIRST) & (kinds != FIRST)) | ((taken[0] == LAST) & (kinds == MID))
            if np.count_nonzero(wrong):
                env = int(np.flatnonzero(wrong)[0])
                raise EnvironmentFault(
                    f"{self.name}, env {env}: agents: {name} has step type {kinds[env]} where that of the "
                    f"environment is {taken[0][env]}, expected FIRST with FIRST, and FIRST or LAST with LAST."
                )
        return MultiAgentTimeStep(taken[0], taken[1], taken[2], taken[3], agents)

    def close(self) -> None:
        close(self._environment.close, self.name)
