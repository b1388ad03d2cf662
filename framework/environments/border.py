"""The border to batched environments and wrappers of other packages."""

from __future__ import annotations

import dm_env
import numpy as np

import launch
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
from framework.environments.fields import STEP_TYPE, step_checkers
from framework.environments.tensor import arrays, checker, copied
from framework.environments.wrappers import EnvironmentWrapper
from framework.foreign import close, is_foreign
from framework.types import MultiAgentTimeStep, Nest


def checked(environment: BatchedEnvironment) -> BatchedEnvironment:
    """The environment, behind a border if its class is of another package."""
    return Border(environment) if is_foreign(environment) else environment


class Border(EnvironmentWrapper):
    """Gives the environment inside copies of actions; checks and copies what it returns, at every step."""

    def __init__(self, environment: BatchedEnvironment):
        super().__init__(environment)
        name, num_envs, spec = self.name, self.num_envs, self.spec
        self.device = environment.device
        check = checker(environment)
        self._check_action = check(name, "action", spec.actions, num_envs)
        self._checks = {
            "step_type": check(name, "step_type", STEP_TYPE, num_envs),
            **step_checkers(name, spec, num_envs, make=check),
        }
        self._check_mask = MaskChecker(name, spec)
        self._time_step = MultiAgentTimeStep if "agents" in self._checks else dm_env.TimeStep
        self._exact: list[np.ndarray] | None = None

    @property
    def exact_rewards(self) -> list[np.ndarray] | None:
        return self._exact

    def reset(self) -> dm_env.TimeStep:
        return self._call("reset")

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._call("step", self._copied(action))

    def repeat_actions(self, num_repeats: int) -> None:
        self._environment.repeat_actions(num_repeats)

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._environment.seed_episodes(seeds.copy(), envs.copy())

    def end_episodes(self, envs: np.ndarray) -> None:
        self._environment.end_episodes(envs.copy())

    def _copied(self, action: Nest) -> Nest:
        return self._check_action.build(copied(self._check_action(action)))

    def _call(self, method: str, *arguments: Nest) -> dm_env.TimeStep:
        try:
            timestep = getattr(self._environment, method)(*arguments)
            if not isinstance(timestep, dm_env.TimeStep | MultiAgentTimeStep):
                found = f"returned {type(timestep).__name__}, expected a dm_env.TimeStep"
                raise UnexpectedReturn(found, "Return one of B envs")
        except (EnvironmentFault, NotImplementedError, launch.ProgramStopped):
            raise
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: {describe(f'{method}()', error)}") from error
        return self._take(timestep)

    def _take(self, timestep: dm_env.TimeStep) -> dm_env.TimeStep:
        taken = {
            field: check.build(copied(check(getattr(timestep, field))))
            for field, check in self._checks.items()
        }
        self._exact = self._checks["reward"].exact
        if self._exact is None and self._environment.exact_rewards:
            given = timestep._replace(reward=arrays(taken["reward"]))
            self._exact = unrounded(self._environment, given)
        step_type = taken["step_type"]
        if self._check_mask.has_mask:
            self._check_mask(*arrays((step_type, taken["observation"])))
        for name, kinds in taken.get("agents", {}).items():
            # The agents begin with the environment, and none goes on beyond its end.
            wrong = ((step_type == FIRST) & (kinds != FIRST)) | ((step_type == LAST) & (kinds == MID))
            if np.count_nonzero(wrong):
                env = int(np.flatnonzero(wrong)[0])
                raise EnvironmentFault(
                    f"{self.name}, env {env}: agents: {name} has step type {kinds[env]} where that of the "
                    f"environment is {step_type[env]}, expected FIRST with FIRST, and FIRST or LAST with "
                    "LAST."
                )
        return self._time_step(**taken)

    def close(self) -> None:
        close(self._environment.close, self.name)
