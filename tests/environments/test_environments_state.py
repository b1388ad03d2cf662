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
_SUITES = {
    "cartpole": (CARTPOLE, {}),
    "acrobot": ("gymnasium:Acrobot-v1", _LIMIT),
    "mountain car": ("gymnasium:MountainCar-v0", _LIMIT),
    "continuous mountain car": ("gymnasium:MountainCarContinuous-v0", _LIMIT),
    "pendulum": ("gymnasium:Pendulum-v1", _LIMIT),
    "toy text": ("gymnasium:FrozenLake-v1", {}),
    "mujoco": ("gymnasium:HalfCheetah-v5", _LIMIT),
    "mujoco that falls": ("gymnasium:Hopper-v5", {}),
    "minatar": ("minatar:Breakout", {}),
    "minatar, truncated": ("minatar:Seaquest", {"max_steps": 25}),
    "minigrid": ("minigrid:DoorKey-5x5", {"max_steps": 25}),
    "atari": ("atari:Pong", {"max_frames": 240}),
    "atari, lives": ("atari:Breakout", {"life_loss_terminates": True}),
    "atari, every frame": ("atari:Seaquest", {"frame_skip": 1, "sticky_actions": 0.9, "max_frames": 60}),
    "navigation": ("tasks:Navigation2D", {"max_steps": 25}),
    "memory": ("testing:Memory", {}),
    "hidden": ("testing:CartPoleWithoutVelocities", {}),
    "fake": ("testing:Fake", {}),
    "echo": ("testing:Echo", {}),
}
_PACKAGES = {"mujoco": "mujoco", "minatar": "minatar", "minigrid": "minigrid", "atari": "ale_py"}


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("suite", _SUITES)
def test_each_suite_continues_byte_for_byte(suite, num_envs):
    for key, package in _PACKAGES.items():
        if suite.startswith(key):
            pytest.importorskip(package)
    name, options = _SUITES[suite]
    _check(
        functools.partial(
            environments.make, name, num_envs=num_envs, seed=4, options=options, stepping="inline"
        )
    )


@pytest.mark.filterwarnings("ignore:.*DISPLAY")
def test_dm_control_continues_byte_for_byte():
    pytest.importorskip("dm_control")
    limit = functools.partial(environments.StepLimit, limit=30)
    _check(
        functools.partial(
            environments.make, "dm_control:cartpole/balance", num_envs=2, seed=4, wrappers=[limit]
        )
    )


@pytest.mark.parametrize("name", [CARTPOLE, "gymnasium:Acrobot-v1", "gymnasium:HalfCheetah-v5"])
def test_vector_environments_continue_byte_for_byte(name):
    if "Cheetah" in name:
        pytest.importorskip("mujoco")
    options = {} if name == CARTPOLE else _LIMIT
    _check(functools.partial(environments.make, name, num_envs=3, seed=4, options=options, stepping="vector"))


@pytest.mark.parametrize("name", [CARTPOLE, "atari:Pong"])
def test_environments_in_processes_continue_byte_for_byte(name):
    options = {}
    if name == "atari:Pong":
        pytest.importorskip("ale_py")
        options = {"max_frames": 240}
    make = functools.partial(environments.make, name, num_envs=3, seed=4, options=options)
    _check(functools.partial(make, stepping="processes", num_processes=2))


_WRAPPERS = {
    "step limit": (CARTPOLE, [functools.partial(environments.StepLimit, limit=7)]),
    "frame stack": (CARTPOLE, [functools.partial(environments.FrameStack, num_frames=3)]),
    "both": (
        CARTPOLE,
        [
            functools.partial(environments.StepLimit, limit=7),
            functools.partial(environments.FrameStack, num_frames=3),
        ],
    ),
    "action repeat": (CARTPOLE, [functools.partial(environments.ActionRepeat, num_repeats=3)]),
    "inputs of the policy": (CARTPOLE, [environments.ObservationActionReward]),
    "actions": (
        "gymnasium:Pendulum-v1",
        [
            functools.partial(environments.StepLimit, limit=7),
            functools.partial(environments.RescaleAction, clip=True),
            environments.SinglePrecision,
            environments.Flatten,
            environments.ClipAction,
        ],
    ),
}


@pytest.mark.parametrize("stepping", ["auto", "processes"])
@pytest.mark.parametrize("case", _WRAPPERS)
def test_wrappers_continue_byte_for_byte(case, stepping):
    name, wrappers = _WRAPPERS[case]
    few = {"num_processes": 2} if stepping == "processes" else {}
    _check(
        functools.partial(
            environments.make, name, num_envs=3, seed=4, stepping=stepping, wrappers=wrappers, **few
        )
    )


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
