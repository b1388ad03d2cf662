"""Small programs: DQN, in an environment whose episodes have seven steps, without evaluations."""

from __future__ import annotations

import functools

import launch
from agents.dqn import DQN, DQNConfig
from framework.environments.testing import FakeEnvironment
from framework.programs import RunConfig, make_program

SMALL = DQNConfig(
    min_replay_size=50, batch_size=16, samples_per_insert=4.0, hidden_sizes=(16,), insert_burst=64
)
FAKE = functools.partial(FakeEnvironment, episode_length=7)
SETTINGS = {"envs_per_actor": 3, "evaluate_period": None, "num_evaluation_episodes": 2}
SETTINGS |= {"learner_log_period": 20, "publish_period": 5}


def small_program(agent=None, environment=FAKE, logger_factory=None, **settings) -> launch.Program:
    """With these `settings` of the run in place of those above, or beside them."""
    config = RunConfig(**{**SETTINGS, **settings})
    return make_program(agent or DQN(SMALL), environment, config, logger_factory=logger_factory)
