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
        timestep = self._environment.step(action)
        begun, over = (timestep.step_type == kind for kind in (FIRST, LAST))
        if np.count_nonzero(begun):
            self._next[begun] += self.num_envs
        if np.count_nonzero(over):
            self._seed(over)
        return timestep

    def repeat_actions(self, num_repeats: int) -> None:
        self._environment.repeat_actions(num_repeats)

    def end_episodes(self, envs: np.ndarray) -> None:
        self._environment.end_episodes(envs)
        self._seed(envs)

    def _seed(self, envs: np.ndarray) -> None:
        if self.is_seeded:
            self._environment.seed_episodes(self._next, envs)
