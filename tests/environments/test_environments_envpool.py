"""EnvPool's environments, where EnvPool is installed: `pip install 'repertory[envpool]'`."""

import importlib.util
import itertools

import numpy as np
import pytest

from framework import environments, specs
from framework.environments import FIRST, LAST

has_envpool = importlib.util.find_spec("envpool") is not None
needs_envpool = pytest.mark.skipif(not has_envpool, reason="EnvPool is not installed (repertory[envpool])")


def _play(environment, num_steps):
    """Returns the time steps of a reset and of `num_steps` random steps, and their copies."""
    rng = np.random.default_rng(0)
    timesteps = [environment.reset()]
    for _ in range(num_steps):
        timesteps.append(environment.step(rng.integers(0, 2, environment.num_envs)))
    return timesteps


@pytest.mark.release
@needs_envpool
@pytest.mark.parametrize("stepping", ["auto", "vector"])
def test_cartpole_keeps_the_contract(stepping):
    environment = environments.make("envpool:CartPole-v1", num_envs=5, seed=3, stepping=stepping)
    assert environment.num_envs == 5 and environment.action_spec().num_values == 2
    timesteps = _play(environment, 100)
    ends = 0
    for before, after in itertools.pairwise(timesteps):
        first, last = after.step_type == FIRST, after.step_type == LAST
        np.testing.assert_array_equal(first, before.step_type == LAST)
        np.testing.assert_array_equal(after.reward, np.where(first, 0.0, 1.0))
        np.testing.assert_array_equal(after.discount, np.where(last, 0.0, 1.0))
        assert (np.abs(after.observation[first]) <= 0.05).all()
        ends += last.sum()
    assert ends >= 5
    again = _play(environments.make("envpool:CartPole-v1", num_envs=5, seed=3), 100)
    np.testing.assert_array_equal(again[-1].observation, timesteps[-1].observation)
    other = environments.make("envpool:CartPole-v1", num_envs=5, seed=4).reset()
    assert (other.observation != timesteps[0].observation).any()


@pytest.mark.release
@needs_envpool
def test_time_limits_truncate():
    options = {"max_episode_steps": 4}
    environment = environments.make("envpool:CartPole-v1", num_envs=2, options=options)
    ends = _play(environment, 4)[-1]
    assert ends.step_type.tolist() == [LAST, LAST] and ends.discount.tolist() == [1.0, 1.0]


@pytest.mark.release
@needs_envpool
def test_frames_of_atari_are_stored_once():
    environment = environments.make("envpool:Pong-v5", num_envs=2, seed=1)
    assert specs.frame_stack(environment.observation_spec()) == 4
    timesteps = _play(environment, 5)
    for before, after in itertools.pairwise(timesteps):
        np.testing.assert_array_equal(after.observation[:, :-1], before.observation[:, 1:])
    color = environments.make("envpool:Pong-v5", options={"gray_scale": False})
    assert specs.frame_stack(color.observation_spec()) is None


_ERRORS = {
    "task": ("envpool:NoSuchTask-v1", {}, "list_all_envs"),
    "option": ("envpool:CartPole-v1", {"sticky": 1}, "got the options .'sticky'.*max_episode_steps"),
}


@pytest.mark.release
@needs_envpool
@pytest.mark.parametrize("name", _ERRORS)
def test_errors(name):
    environment, options, message = _ERRORS[name]
    with pytest.raises(ValueError, match=message):
        environments.make(environment, options=options)


def test_without_envpool_the_error_names_the_extra(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "envpool" else found(name))
    with pytest.raises(ImportError, match=r"repertory\[envpool\]"):
        environments.make("envpool:CartPole-v1")
