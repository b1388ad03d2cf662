"""Environments and actions that break the contract: each is one error that names the place."""

import warnings

import dm_env
import numpy as np
import pytest

from framework import environments, specs
from framework.environments import testing

CARTPOLE = "gymnasium:CartPole-v1"


def _few(stepping):
    return {"num_processes": 2} if stepping == "processes" else {}


_FAULTS = {
    "raise": r"FaultyEnvironment, env 0: step\(1\) raised RuntimeError: the simulator exploded",
    "nan_observation": r"FaultyEnvironment, env 0: observation holds NaN",
    "nan_reward": r"FaultyEnvironment, env 0: reward holds NaN",
    "shape": r"FaultyEnvironment, env 0: observation has shape \(2,\), expected \(1,\)",
    "dtype": r"FaultyEnvironment, env 0: observation has dtype <U1",
}


@pytest.mark.parametrize(
    ("fault", "stepping"),
    [*((fault, "inline") for fault in _FAULTS), ("nan_reward", "processes")],
)
def test_a_fault_in_mid_episode_names_environment_env_and_field(fault, stepping):
    with environments.make(
        testing.FaultyEnvironment, num_envs=2, stepping=stepping, options={"fault": fault}, **_few(stepping)
    ) as environment:
        environment.reset()
        for _ in range(2):
            environment.step(np.array([1, 1]))
        with pytest.raises(environments.EnvironmentFault, match=_FAULTS[fault]):
            environment.step(np.array([1, 1]))


def test_the_faulty_env_is_named_not_the_first():
    built = []

    def make():
        built.append(None)
        return testing.FaultyEnvironment("nan_observation", at=9 if len(built) < 3 else 2)

    environment = environments.make(make, num_envs=3)
    environment.reset()
    environment.step(np.zeros(3, np.int64))
    with pytest.raises(environments.EnvironmentFault, match="env 2"):
        environment.step(np.zeros(3, np.int64))


class _MoreDigits(testing.EchoEnvironment):
    def __init__(self, dtype="float64"):
        super().__init__()
        self._dtype = dtype

    def reset(self):
        first = super().reset()
        return first._replace(observation=first.observation.astype(self._dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_observations_that_are_rounded_cause_one_warning(dtype):
    environment = environments.make(_MoreDigits, num_envs=2, options={"dtype": dtype})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert environment.reset().observation.dtype == np.float32
    expected = "_MoreDigits: observation has dtype float64, expected float32"
    assert [expected in str(warning.message) for warning in caught] == [True] * (dtype == "float64")


class _OddReward(testing.EchoEnvironment):
    def __init__(self, reward):
        super().__init__()
        self._reward = reward

    def step(self, action):
        return super().step(action)._replace(reward=self._reward)


@pytest.mark.parametrize("reward", [None, "much", np.zeros(2)], ids=["None", "text", "array"])
def test_a_reward_that_is_no_number_is_named(reward):
    environment = environments.make(_OddReward, num_envs=2, options={"reward": reward})
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=r"env 0: reward.*one number|reward holds"):
        environment.step(np.zeros(2, np.int64))


_BAD_ACTIONS = {
    "shape": (np.zeros((2, 1), np.int64), r"action has shape \(2, 1\), expected \(2,\)"),
    "envs": (np.zeros(3, np.int64), r"action has shape \(3,\), expected \(2,\)"),
    "range": (np.array([0, 2]), r"action of env 1 is .*2.* outside 0 \.\.\. 1"),
    "dtype": (np.array([0.0, 1.0]), "action has dtype float64, expected int64"),
}


@pytest.mark.parametrize("stepping", ["inline", "vector"])
@pytest.mark.parametrize(("action", "message"), _BAD_ACTIONS.values(), ids=_BAD_ACTIONS)
def test_an_action_that_does_not_fit_is_refused(action, message, stepping):
    environment = environments.make(CARTPOLE, num_envs=2, stepping=stepping)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.step(action)
    assert environment.step(np.array([0, 1])).reward.tolist() == [1, 1]  # nothing was stepped


def test_a_nan_action_is_refused():
    environment = environments.make("gymnasium:Pendulum-v1", num_envs=2)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=r"action of env 1 is .*nan.*not finite"):
        environment.step(np.array([[0.0], [np.nan]], np.float32))


def test_envs_that_differ_are_refused():
    sizes = iter([3, 3, 4])

    def make():
        size = next(sizes)
        return testing.FakeEnvironment(testing.make_spec(specs.Array((size,), np.float32)))

    with pytest.raises(environments.EnvironmentFault, match="env 2"):
        environments.make(make, num_envs=3)


def test_close_closes_every_env_even_if_one_fails():
    closed = []

    class Closing(testing.EchoEnvironment):
        def __init__(self, seed):
            super().__init__()
            self._seed = seed

        def close(self):
            closed.append(self._seed)
            if len(closed) == 1:
                raise OSError("cannot close")

    environment = environments.make(Closing, num_envs=3, seed=0)
    with pytest.raises(OSError, match="cannot close"):
        environment.close()
    assert len(set(closed)) == 3


def test_a_dm_env_environment_that_skips_last_is_reported():
    class Skipping(testing.EchoEnvironment):
        def step(self, action):
            return dm_env.restart(np.zeros(1, np.float32))

    environment = environments.make(Skipping)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match="FIRST although the previous step was not LAST"):
        environment.step(np.array([0]))
