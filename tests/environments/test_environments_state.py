"""Pickled environments continue byte for byte; a program's snapshot on the serial engine relies on it."""

import functools
import pickle

import numpy as np
import pytest
import tree

from framework import environments
from framework.environments import FIRST, EnvironmentFault, testing
from framework.environments.states import dumps

CARTPOLE = "gymnasium:CartPole-v1"


def _play(environment, num_steps, rng):
    """The bytes of every array of every time step, and how many of them were FIRST."""
    seen, starts = [], 0
    for _ in range(num_steps):
        timestep = environment.step(testing.draw_action(environment.action_spec(), rng, environment.num_envs))
        starts += int((timestep.step_type == FIRST).sum())
        seen.append([np.asarray(leaf).tobytes() for leaf in tree.flatten(timestep)])
    return seen, starts


def _copy(environment):
    return pickle.loads(dumps(environment))


def _check(make, *, before=50, after=100, ends=True):
    """Compares 100 steps of an environment and of its copy, which a pickle made in mid-episode."""
    rng = np.random.default_rng(0)
    with make() as first:
        first.reset()
        _play(first, before, rng)
        with _copy(first) as second:
            expected, starts = _play(first, after, np.random.default_rng(1))
            assert starts or not ends  # else the case shows nothing of new episodes
            assert _play(second, after, np.random.default_rng(1))[0] == expected


_LIMIT = {"max_episode_steps": 30}
_OF_OTHERS = {
    "mujoco": ("gymnasium:HalfCheetah-v5", _LIMIT),
    "minatar": ("minatar:Seaquest", {"max_steps": 25}),
    "minigrid": ("minigrid:DoorKey-5x5", {"max_steps": 25}),
    "ale_py": ("atari:Breakout", {"life_loss_terminates": True, "max_frames": 240}),
}
_SUITES = {
    "cartpole": (CARTPOLE, {}),
    "pendulum": ("gymnasium:Pendulum-v1", _LIMIT),
    "toy text": ("gymnasium:FrozenLake-v1", {}),
    "navigation": ("tasks:Navigation2D", {"max_steps": 25}),
    "maze": ("tasks:PointMaze", {"max_steps": 25}),
    "road": ("tasks:WindingRoad", {"max_steps": 25}),
    "tensor": ("tensor:CartPole-v1", {}),
    "memory": ("testing:Memory", {}),
    "hidden": ("testing:CartPoleWithoutVelocities", {}),
    "fake": ("testing:Fake", {}),
}


def _make(name, stepping="inline", **arguments):
    return functools.partial(environments.make, name, num_envs=3, seed=4, stepping=stepping, **arguments)


@pytest.mark.parametrize("suite", _SUITES)
def test_each_suite_continues_byte_for_byte(suite):
    name, options = _SUITES[suite]
    _check(_make(name, options=options))


@pytest.mark.release
@pytest.mark.parametrize("package", _OF_OTHERS)
def test_each_suite_of_others_continues_byte_for_byte(package):
    pytest.importorskip(package)
    name, options = _OF_OTHERS[package]
    _check(_make(name, options=options))


@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.*DISPLAY")
def test_dm_control_continues_byte_for_byte():
    pytest.importorskip("dm_control")
    limit = functools.partial(environments.StepLimit, limit=30)
    _check(_make("dm_control:cartpole/balance", wrappers=[limit]))


@pytest.mark.parametrize(("name", "options"), [(CARTPOLE, {}), ("gymnasium:Acrobot-v1", _LIMIT)])
def test_vector_environments_continue_byte_for_byte(name, options):
    _check(_make(name, "vector", options=options))


_LIMIT_OF_7 = functools.partial(environments.StepLimit, limit=7)
_STACK = functools.partial(environments.FrameStack, num_frames=3)
_REPEAT = functools.partial(environments.ActionRepeat, num_repeats=3)
_SCALE = functools.partial(environments.RescaleAction, clip=True)
_WRAPPERS = {
    "limit and stack": (CARTPOLE, "auto", [_LIMIT_OF_7, _STACK]),
    "action repeat": (CARTPOLE, "auto", [_REPEAT]),
    "action repeat in processes": (CARTPOLE, "processes", [_REPEAT]),
    "inputs of the policy": (CARTPOLE, "auto", [environments.ObservationActionReward]),
    "actions": (
        "gymnasium:Pendulum-v1",
        "auto",
        [_LIMIT_OF_7, _SCALE, environments.SinglePrecision, environments.Flatten, environments.ClipAction],
    ),
}


@pytest.mark.parametrize(("name", "stepping", "wrappers"), _WRAPPERS.values(), ids=_WRAPPERS)
def test_wrappers_continue_byte_for_byte(name, stepping, wrappers):
    _check(_make(name, stepping, wrappers=wrappers))


@pytest.mark.parametrize("stepping", ["inline", "vector", "processes"])
def test_a_copy_before_the_first_reset_has_the_seed(stepping):
    make = functools.partial(environments.make, CARTPOLE, num_envs=2, seed=1, stepping=stepping)
    with make() as first, _copy(first) as second:
        np.testing.assert_array_equal(second.reset().observation, first.reset().observation)


def test_batches_of_one_env_within_a_batch_continue():
    def factory(seed):
        return environments.FrameStack(environments.make(CARTPOLE, seed=seed), 2)

    _check(functools.partial(environments.make, factory, num_envs=2, seed=3))


class Unpicklable(testing.EchoEnvironment):
    def __reduce__(self):
        raise TypeError("cannot pickle 'Simulator' object")


def test_an_environment_in_a_process_that_cannot_be_pickled_is_named():
    with environments.make(Unpicklable, num_envs=2, stepping="processes", num_processes=1) as environment:
        environment.reset()
        with pytest.raises(EnvironmentFault, match=r"Unpicklable, envs 0 to 1: .*cannot pickle 'Simulator'"):
            dumps(environment)
        assert environment.step(np.zeros(2, np.int64)).step_type.tolist() == [1, 1]
