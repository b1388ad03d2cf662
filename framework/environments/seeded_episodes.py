"""Episodes that begin with known seeds, as evaluations' do."""

from __future__ import annotations

import logging

import dm_env
import numpy as np

from framework.environments.base import FIRST, LAST, BatchedEnvironment
from framework.environments.wrappers import EnvironmentWrapper
from framework.types import Nest

_LOG = logging.getLogger(__name__)

#: Episode i of an evaluation begins with this seed plus i, whatever the agent and the number of envs are.
EVALUATION_SEED = 10_000


class SeededEpisodes(EnvironmentWrapper):
    """Begins episode i as the first one of an environment that was made with the seed `first + i`.

    Env b of B plays the episodes b, b + B, b + 2 B and so on, so that the first n ones are the same for every
    B. `reset` goes on with the next episode of each env; after `start_over` with the first. An environment
    that takes no seeds plays episodes of its own, and a warning says so.

    Attributes:
      first: seed of episode 0.
      is_seeded: whether the environment takes the seeds.
    """

    def __init__(self, environment: BatchedEnvironment, first: int = EVALUATION_SEED):
        super().__init__(environment)
        self.can_step_envs = environment.can_step_envs
        self.first, self.is_seeded = first, True
        self.start_over()
        try:
            environment.seed_episodes(self._next, np.zeros(self.num_envs, np.bool_))
        except NotImplementedError as error:
            self.is_seeded = False
            _LOG.warning("%s It plays episodes of its own instead of seeds from %d.", error, first)

    def start_over(self) -> None:
        self._next = self.first + np.arange(self.num_envs)  # By env, the seed of its next episode.

    def reset(self) -> dm_env.TimeStep:
        self._seed(np.ones(self.num_envs, np.bool_))
        timestep = self._environment.reset()
        self._next += self.num_envs
        return timestep

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._follow(self._environment.step(action), True)

    def step_envs(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        return self._follow(self._environment.step_envs(action, active), active)

    def end_episodes(self, envs: np.ndarray) -> None:
        self._environment.end_episodes(envs)
        self._seed(envs)

    def _follow(self, timestep: dm_env.TimeStep, stepped: np.ndarray | bool) -> dm_env.TimeStep:
        """Counts the episodes that began, and seeds those that begin at the next step."""
        begun, over = (stepped & (timestep.step_type == kind) for kind in (FIRST, LAST))
        if np.count_nonzero(begun):
            self._next[begun] += self.num_envs
        if np.count_nonzero(over):
            self._seed(over)
        return timestep

    def _seed(self, envs: np.ndarray) -> None:
        if self.is_seeded:
            self._environment.seed_episodes(self._next, envs)


def find_seeded_episodes(environment: BatchedEnvironment) -> SeededEpisodes | None:
    """The `SeededEpisodes` among the wrappers of an environment, or None."""
    while isinstance(environment, EnvironmentWrapper) and not isinstance(environment, SeededEpisodes):
        environment = environment.wrapped
    return environment if isinstance(environment, SeededEpisodes) else None
