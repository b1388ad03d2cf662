"""Episodes as they are recorded."""

import functools

import numpy as np
import pytest

from framework import environments
from framework.datasets import record
from framework.datasets.episodes import checked_episode
from framework.environments.testing import EchoEnvironment


def echo(count=2, **options):
    """Episodes of three steps of an environment whose reward names the observation and the action."""
    environment = environments.make(EchoEnvironment, num_envs=1, options={"episode_length": 3, **options})
    actions = iter(range(1000))
    act = lambda observation: np.array([next(actions) % 4])  # noqa: E731
    return list(record(environment, act, count))


def test_the_rows_of_an_episode():
    first, second = echo()
    np.testing.assert_array_equal(first.observation[:, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(first.action, [0, 1, 2, 0])
    np.testing.assert_array_equal(first.reward, [0, 101, 202, 0])
    np.testing.assert_array_equal(first.discount, [1, 1, 0, 0])
    np.testing.assert_array_equal(second.start_of_episode, [True, False, False, False])
    np.testing.assert_array_equal(second.action, [3, 0, 1, 0])


def test_a_truncated_episode_ends_with_its_discount():
    (episode,) = echo(1, truncate=True)
    np.testing.assert_array_equal(episode.discount, [1, 1, 1, 0])


class Lost(environments.BatchedEnvironment):
    """An `EchoEnvironment` that is lost after two time steps, and replaced by one that counts from 100."""

    def __init__(self):
        make = functools.partial(environments.make, EchoEnvironment)
        self._envs = [make(options={"episode_length": 3, "first": first}) for first in (0, 100)]
        self.spec, self._steps = self._envs[0].spec, 0

    def reset(self):
        return self._envs[0].reset()

    def step(self, action):
        self._steps += 1
        return self._envs[self._steps >= 2].step(action)


def test_an_episode_that_is_cut_short_is_left_out():
    (episode,) = record(Lost(), lambda observation: np.array([0]), 1)
    np.testing.assert_array_equal(episode.observation[:, 0], [100, 101, 102, 103])
    np.testing.assert_array_equal(episode.start_of_episode, [True, False, False, False])


class Continued(environments.EnvironmentWrapper):
    """An environment whose first `reset` comes in mid-episode, and does not end the episode."""

    num_resets = 0

    def reset(self):
        self.num_resets += 1
        timestep = super().reset()
        if self.num_resets == 1:
            timestep = self.step(np.array([0]))._replace(step_type=timestep.step_type)
        return timestep

    @property
    def cut(self):
        return np.array([self.num_resets == 1])


def test_an_episode_that_began_before_the_reset_is_left_out():
    environment = Continued(environments.make(EchoEnvironment, options={"episode_length": 3}))
    (episode,) = record(environment, lambda observation: np.array([0]), 1)
    np.testing.assert_array_equal(episode.observation[:, 0], [4, 5, 6, 7])
    np.testing.assert_array_equal(episode.start_of_episode, [True, False, False, False])


def test_only_one_env_is_recorded():
    environment = environments.make(EchoEnvironment, num_envs=2)
    with pytest.raises(ValueError, match="got 2 envs, expected 1"):
        next(record(environment, lambda observation: observation, 1))


def test_recorded_actions_have_the_dtype_of_the_spec(caplog):
    environment = environments.make("gymnasium:Pendulum-v1", seed=0, options={"max_episode_steps": 2})
    episodes = list(record(environment, lambda observation: [[0.5]], 1))
    assert episodes[0].action.dtype == np.float32
    assert not caplog.records  # Of dm-tree, whose functions warn of some arguments.
    checked_episode(0, episodes[0], environment.spec)


def test_the_memory_of_a_policy_restarts_with_each_episode():
    class Policy:
        resets = 0

        def reset(self):
            self.resets += 1

        def __call__(self, observation):
            return np.array([0])

    environment, policy = environments.make(EchoEnvironment, options={"episode_length": 3}), Policy()
    assert len(list(record(environment, policy, 3))) == policy.resets == 3
