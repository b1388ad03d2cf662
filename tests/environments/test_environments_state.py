"""``state()`` and ``set_state()``: another environment of the same make() continues byte for byte."""

import functools

import gymnasium
import numpy as np
import pytest
import tree

from framework import environments
from framework.environments import FIRST, testing

CARTPOLE = "gymnasium:CartPole-v1"


def _play(environment, num_steps, rng):
    """The bytes of every array of every time step, and how many of them were FIRST."""
    seen, starts = [], 0
    for _ in range(num_steps):
        timestep = environment.step(testing.draw_action(environment.action_spec(), rng, environment.num_envs))
        starts += int((timestep.step_type == FIRST).sum())
        seen.append([np.asarray(leaf).tobytes() for leaf in tree.flatten(timestep)])
    return seen, starts


def _check(make, *, other=None, before=50, after=100, ends=True):
    """Compares 100 steps after a state was taken with those of a new environment that got the state."""
    rng = np.random.default_rng(0)
    first, second = make(), (other or make)()
    with first, second:
        first.reset()
        _play(first, before, rng)
        state = first.state()
        assert isinstance(state, bytes)
        expected, starts = _play(first, after, np.random.default_rng(1))
        assert starts or not ends  # else the case shows nothing of new episodes
        second.set_state(state)
        assert _play(second, after, np.random.default_rng(1))[0] == expected
        first.set_state(state)  # the saved environment itself goes back, too
        assert _play(first, after, np.random.default_rng(1))[0] == expected


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
    "atari": ("atari:Pong", {"max_frames": 240}),
    "atari, lives": ("atari:Breakout", {"life_loss_terminates": True}),
    "atari, every frame": ("atari:Seaquest", {"frame_skip": 1, "sticky_actions": 0.9, "max_frames": 60}),
    "memory": ("testing:Memory", {}),
    "fake": ("testing:Fake", {}),
    "echo": ("testing:Echo", {}),
}
_PACKAGES = {"mujoco": "mujoco", "minatar": "minatar", "atari": "ale_py"}


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
def test_processes_and_inline_envs_have_the_same_states(name):
    options = {}
    if name == "atari:Pong":
        pytest.importorskip("ale_py")
        options = {"max_frames": 240}
    make = functools.partial(environments.make, name, num_envs=3, seed=4, options=options)
    processes = functools.partial(make, stepping="processes", num_processes=2)
    _check(functools.partial(make, stepping="inline"), other=processes)
    _check(processes, other=functools.partial(make, stepping="inline"))


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


def test_a_state_before_the_first_reset_has_the_seed():
    make = functools.partial(environments.make, CARTPOLE, num_envs=2, stepping="inline")
    state = make(seed=1).state()
    other = make(seed=2)
    other.set_state(state)
    np.testing.assert_array_equal(other.reset().observation, make(seed=1).reset().observation)


def test_batches_of_one_env_within_a_batch_continue():
    def factory(seed):
        return environments.FrameStack(environments.make(CARTPOLE, seed=seed), 2)

    _check(functools.partial(environments.make, factory, num_envs=2, seed=3))


class Unpicklable(testing.EchoEnvironment):
    def __reduce__(self):
        raise TypeError("cannot pickle 'Simulator' object")


@pytest.mark.parametrize("stepping", ["inline", "processes"])
def test_an_environment_that_cannot_be_saved_is_named(stepping):
    few = {"num_processes": 1} if stepping == "processes" else {}
    wrappers = [functools.partial(environments.FrameStack, num_frames=2)]
    with environments.make(
        Unpicklable, num_envs=2, stepping=stepping, wrappers=wrappers, **few
    ) as environment:
        environment.reset()
        with pytest.raises(NotImplementedError, match=r"Unpicklable, env 0: .*cannot pickle 'Simulator'"):
            environment.state()
        assert environment.step(np.zeros(2, np.int64)).step_type.tolist() == [1, 1]


def test_a_batched_environment_of_the_users_own_has_no_state_unless_it_says_so():
    class Own(environments.BatchedEnvironment):
        name = "own"

        def reset(self):
            raise AssertionError

        def step(self, action):
            raise AssertionError

    with pytest.raises(NotImplementedError, match="own: Own cannot save its state"):
        Own().state()
    with pytest.raises(NotImplementedError, match="own: Own cannot restore a state"):
        Own().set_state(b"")


def test_a_vector_environment_in_processes_of_its_own_cannot_be_saved():
    def factory(num_envs):
        mode = gymnasium.vector.AutoresetMode.NEXT_STEP
        return gymnasium.make_vec(
            "CartPole-v1",
            num_envs=num_envs,
            vectorization_mode="async",
            vector_kwargs={"autoreset_mode": mode},
        )

    with environments.make(factory, num_envs=2, seed=0) as environment:
        environment.reset()
        with pytest.raises(NotImplementedError, match="factory: the environment cannot save its state"):
            environment.state()


@pytest.mark.parametrize("stepping", ["inline", "processes"])
def test_a_state_of_another_number_of_envs_is_refused(stepping):
    state = environments.make(CARTPOLE, num_envs=3, stepping="inline").state()
    few = {"num_processes": 1} if stepping == "processes" else {}
    with (
        environments.make(CARTPOLE, num_envs=2, stepping=stepping, **few) as environment,
        pytest.raises(ValueError, match="got the state of 3 envs, expected 2"),
    ):
        environment.set_state(state)
