"""The border to batched environments and wrappers of other packages."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import dm_env
import numpy as np
import tree

import launch
from framework.environments.base import (
    FIRST,
    LAST,
    BatchedEnvironment,
    EnvironmentFault,
    UnexpectedReturn,
    describe,
    unrounded,
)
from framework.environments.fields import arrays, copied
from framework.environments.rows import TimeStepRows
from framework.environments.stepping import VectorEnvironment
from framework.environments.tensor import checker
from framework.environments.wrappers import EnvironmentWrapper
from framework.foreign import close, is_foreign
from framework.types import MultiAgentTimeStep, Nest


def checked(environment: BatchedEnvironment) -> BatchedEnvironment:
    """The environment, behind a border if what it returns comes from code of another package."""
    if isinstance(environment, VectorEnvironment):
        return Border(environment, environment.observation_starts, environment.action_starts)
    return Border(environment) if is_foreign(environment) else environment


def is_own(environment: Any) -> bool:
    """Whether code of this package alone changes the actions and time steps of an environment."""
    while not is_foreign(environment):
        if isinstance(environment, Border) or not isinstance(environment, EnvironmentWrapper):
            return True
        environment = environment.wrapped
    return False


class Border(EnvironmentWrapper):
    """Gives the environment inside copies of actions; checks and copies what it returns."""

    exact_rewards: list[np.ndarray] | None = None

    def __init__(
        self,
        environment: BatchedEnvironment,
        observation_starts: Sequence[int] = (),
        action_starts: Sequence[int] = (),
    ):
        """Makes the border; `observation_starts` and `action_starts` are as in `TimeStepChecker`."""
        super().__init__(environment)
        self.device = environment.device
        self._over: Any = True  # bool[B]: envs whose next time step must be FIRST.
        self._check = checker(environment)(
            *(self.name, self.spec, self.num_envs),
            observation_starts=observation_starts,
            action_starts=action_starts,
        )
        self._is_foreign = is_foreign(environment)

    def write_to(self, rows: TimeStepRows | None) -> None:
        self._check.write_to(rows)

    def reset(self) -> dm_env.TimeStep:
        self._over = True
        return self._call("reset")

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._call("step", self._check.action.build(copied(self._check.check_action(action))))

    def repeat_actions(self, num_repeats: int) -> None:
        self._environment.repeat_actions(num_repeats)

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._environment.seed_episodes(seeds.copy(), envs.copy())

    def end_episodes(self, envs: np.ndarray) -> None:
        self._environment.end_episodes(envs.copy())

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
        timestep = self._check(timestep)
        self.exact_rewards = exact = self._check.exact
        if self._environment.exact_rewards is not None:
            seen = timestep._replace(reward=arrays(timestep.reward))  # They may be tensors.
            inner, held = unrounded(self._environment, seen), tree.flatten(seen.reward)
            if exact is None:
                exact = inner
            # What the environment inside gave is exact where no wrapper changed it.
            self.exact_rewards = [np.where(i == h, e, i) for i, h, e in zip(inner, held, exact, strict=True)]
        if self._is_foreign:
            self._check_beginnings(timestep)
        return timestep

    def _check_beginnings(self, timestep: dm_env.TimeStep | MultiAgentTimeStep) -> None:
        """Raises EnvironmentFault if an episode does not begin with FIRST, or if FIRST has a reward."""
        first, over = timestep.step_type == FIRST, self._over
        paid = [(leaf != 0).reshape(self.num_envs, -1).any(1) for leaf in tree.flatten(timestep.reward)]
        self._over = timestep.step_type == LAST
        late = (
            "got no FIRST after LAST or at a reset, expected one. A wrapper ends episodes by end_episodes()"
        )
        early = "got a reward with FIRST, expected 0. Pay it with a later step, or leave it out"
        for wrong, what in ((over & ~first, late), (first & functools.reduce(operator.or_, paid), early)):
            if wrong.any():
                raise EnvironmentFault(f"{self.name}, env {int(arrays(wrong).argmax())}: {what}.")

    def close(self) -> None:
        close(self._environment.close, self.name)
