"""``make``: batching in line, by gymnasium's vector environments and in processes; seeds, bad arguments."""

import functools
import sys
import warnings

import gymnasium
import numpy as np
import pytest

from framework import environments, specs
from framework.environments import FIRST, LAST, MID, testing
from framework.environments.stepping import VectorEnvironment

CARTPOLE = "gymnasium:CartPole-v1"


def _copy(timestep):
    return [np.array(field) for field in timestep]


def _roll(environment, actions):
    """All fields of all time steps, stacked ``[T + 1, B, ...]``."""
    steps = [_copy(environment.reset())]
    steps += [_copy(environment.step(action)) for action in actions]
    return [np.stack(field) for field in zip(*steps, strict=True)]


@pytest.mark.parametrize("stepping", ["inline", "vector"])
def test_timesteps_follow_the_contract(stepping):
    actions = np.random.default_rng(0).integers(0, 2, (150, 4))
    with environments.make(CARTPOLE, num_envs=4, seed=1, stepping=stepping) as environment:
        step_type, reward, discount, observation = _roll(environment, actions)
    assert step_type.dtype == np.int64 and reward.dtype == discount.dtype == np.float32
    assert observation.shape == (151, 4, 4) and observation.dtype == np.float32
    assert (step_type[0] == FIRST).all()
    assert (step_type == LAST).sum() > 8
    # After LAST comes FIRST, and FIRST comes only there.
    np.testing.assert_array_equal(step_type[1:] == FIRST, step_type[:-1] == LAST)
    assert (reward[step_type == FIRST] == 0).all() and (discount[step_type == FIRST] == 1).all()
    assert (reward[step_type != FIRST] == 1).all()
    assert (discount[step_type == MID] == 1).all() and (discount[step_type == LAST] == 0).all()
    # LAST shows the state that the episode ended in, FIRST a fresh one.
    assert (np.abs(observation[step_type == LAST][:, [0, 2]]) > [2.4, 0.2095]).any(axis=1).all()
    assert (np.abs(observation[step_type == FIRST]) <= 0.05).all()


@pytest.mark.parametrize("stepping", ["inline", "vector"])
def test_time_limit_is_a_truncation(stepping):
    limit = {"max_episode_steps": 5}
    with environments.make(CARTPOLE, num_envs=2, seed=1, stepping=stepping, options=limit) as environment:
        step_type, reward, discount, _ = _roll(environment, [np.array([0, 1]), np.array([1, 0])] * 4)
    assert step_type[:, 0].tolist() == [FIRST, MID, MID, MID, MID, LAST, FIRST, MID, MID]
    assert (discount == 1).all()
    assert reward[5].tolist() == [1, 1]


@pytest.mark.parametrize(("limit", "steps"), [(None, 500), (-1, np.iinfo(np.int32).max), (7, 7)])
def test_all_envs_together_take_the_limits_that_one_env_takes(limit, steps):
    options = {"max_episode_steps": limit}
    with environments.make(CARTPOLE, num_envs=2, stepping="vector", options=options) as environment:
        assert environment.wrapped._environment.unwrapped.max_episode_steps == steps
        environment.reset()
        assert environment.step(np.array([0, 1])).step_type.tolist() == [MID, MID]


@pytest.mark.parametrize("stepping", ["inline", "vector"])
def test_the_same_seed_gives_the_same_steps_and_another_seed_others(stepping):
    actions = np.random.default_rng(0).integers(0, 2, (60, 3))
    runs = [
        _roll(environments.make(CARTPOLE, num_envs=3, seed=seed, stepping=stepping), actions)
        for seed in (5, np.int64(5), 6)
    ]
    for mine, same in zip(runs[0], runs[1], strict=True):
        np.testing.assert_array_equal(mine, same)
    assert not np.array_equal(runs[0][3], runs[2][3])
    assert not np.array_equal(runs[0][3][:, 0], runs[0][3][:, 1])


@pytest.mark.parametrize("stepping", ["inline", "vector"])
def test_a_reset_in_mid_episode_starts_others_and_a_step_before_it_is_a_reset(stepping):
    environment = environments.make(CARTPOLE, num_envs=2, seed=5, stepping=stepping)
    first = environment.step(np.array([0, 1]))
    assert first.first().all()
    observation = first.observation.copy()
    environment.step(np.array([0, 1]))
    again = environment.reset()
    assert again.first().all() and not np.array_equal(observation, again.observation)


def _with_buffers(num_envs):
    """A vector environment that writes each observation into the same array."""
    how = {"copy": False, "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
    return gymnasium.make_vec("CartPole-v1", num_envs, "sync", vector_kwargs=how)


@pytest.mark.parametrize(
    ("environment", "stepping"), [(CARTPOLE, "inline"), (CARTPOLE, "processes"), (_with_buffers, "inline")]
)
def test_the_previous_time_step_stays_intact_for_one_more_step(environment, stepping):
    with environments.make(environment, num_envs=2, seed=5, stepping=stepping) as environment:
        before = environment.reset()
        for _ in range(2):
            kept = before.observation.copy()
            after = environment.step(np.array([0, 1]))
            np.testing.assert_array_equal(before.observation, kept)
            before = after


def test_a_vector_environment_may_tell_an_end_again_with_the_step_that_begins_the_next_episode():
    def telling_twice(num_envs):
        environment = _with_buffers(num_envs)
        step, over = environment.step, np.zeros(num_envs, bool)

        def step_telling_twice(action):
            nonlocal over
            observation, reward, terminated, *others = step(action)
            told, over = terminated | over, terminated
            return observation, reward, told, *others

        environment.step = step_telling_twice
        return environment

    once, twice = (environments.make(make, num_envs=2, seed=5) for make in (_with_buffers, telling_twice))
    steps = [[each.step(np.ones(2, np.int64)) for _ in range(40)] for each in (once, twice)]
    for expected, got in zip(*steps, strict=True):
        np.testing.assert_array_equal(got.step_type, expected.step_type)
        np.testing.assert_array_equal(got.discount, expected.discount)


@pytest.mark.parametrize("wrapper", [environments.StepLimit, environments.ActionRepeat])
def test_a_wrapper_that_vector_stepping_cannot_serve_says_what_to_do(wrapper):
    with pytest.raises(NotImplementedError, match="stepping='inline'"):
        environments.make(CARTPOLE, num_envs=2, stepping="vector", wrappers=[lambda e: wrapper(e, 3)])


def test_seeds_of_vector_stepping_are_those_of_the_other_ways_to_step():
    made = {"vector": 1, "inline": 1, "processes": 2}
    first, same, other = (
        environments.make("gymnasium:Pendulum-v1", num_envs=3, seed=seed, stepping=stepping)
        .reset()
        .observation.copy()
        for stepping, seed in made.items()
    )
    np.testing.assert_array_equal(first, same)
    assert not (first[:, None] == other).all(-1).any()


@pytest.mark.parametrize("stepping", ["auto", "vector"])
def test_a_factory_may_return_a_whole_vector_environment(stepping):
    def whole():
        return gymnasium.make_vec("CartPole-v1", num_envs=3)

    environment = environments.make(whole, num_envs=3, stepping=stepping)
    assert isinstance(environment.wrapped, VectorEnvironment)
    assert environment.reset().observation.shape == (3, 4)
    with pytest.raises(ValueError, match="a batch of 3 envs, expected 2"):
        environments.make(whole, num_envs=2)


def test_a_vector_environment_in_another_autoreset_mode_is_refused():
    def same_step():
        return gymnasium.make_vec(
            "CartPole-v1",
            num_envs=2,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
        )

    with pytest.raises(ValueError, match=r"SameStep.*NEXT_STEP"):
        environments.make(same_step, num_envs=2)


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """A module that registers an environment when it is imported."""
    (tmp_path / "maker_of_walks.py").write_text(
        "import gymnasium\n"
        "class Walk(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Discrete(5)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 0, {}\n"
        "    def step(self, action):\n"
        "        return 4, 1.0, True, False, {}\n"
        "gymnasium.register('Walk-v0', entry_point=Walk)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "gymnasium:maker_of_walks:Walk-v0"
    gymnasium.registry.pop("Walk-v0", None)
    sys.modules.pop("maker_of_walks", None)


@pytest.mark.parametrize("stepping", ["vector", "processes"])
def test_a_module_may_register_its_environment(registered, stepping):
    with environments.make(registered, num_envs=2, stepping=stepping) as environment:
        assert environment.reset().observation.tolist() == [0, 0]
        assert environment.step(np.array([0, 1])).observation.tolist() == [4, 4]
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        environments.make("gymnasium:no_such_module:Walk-v0")


# dm_env.Environment has the other methods.
_METHODS = ("reset", "step", "observation_spec", "action_spec")
_DUCK = type("Duck", (), dict.fromkeys(_METHODS, lambda self: testing.make_spec().actions))
_BAD = [
    ("CartPole-v1", {}, ValueError, "Did you mean 'gymnasium:CartPole-v1'"),
    ("gymnasium:NoSuch-v1", {}, ValueError, "unknown environment 'gymnasium:NoSuch-v1'"),
    ("gym:CartPole-v1", {}, ValueError, "names look like gymnasium:CartPole-v1"),
    ("atari:", {}, ValueError, "unknown environment 'atari:'"),
    (CARTPOLE, {"num_envs": 0}, ValueError, "num_envs: got 0"),
    (CARTPOLE, {"seed": -1}, ValueError, "seed: got -1"),
    (CARTPOLE, {"stepping": "fast"}, ValueError, r"stepping: got 'fast'.*inline"),
    (CARTPOLE, {"num_processes": 2}, ValueError, r"num_processes: got 2 .* Use stepping='processes'"),
    (testing.EchoEnvironment, {"stepping": "vector"}, ValueError, "stepping='vector' needs"),
    (testing.EchoEnvironment(), {}, TypeError, "not the instance"),
    (lambda: 7, {}, TypeError, r"returned int.*dm_env.Environment"),
    (_DUCK, {}, TypeError, r"returned Duck.*dm_env.Environment"),
]


@pytest.mark.parametrize(("environment", "arguments", "error", "message"), _BAD)
def test_bad_arguments(environment, arguments, error, message):
    with pytest.raises(error, match=message):
        environments.make(environment, **arguments)


@pytest.mark.filterwarnings("ignore:.*render method")
def test_render():
    for stepping in ("inline", "vector"):
        environment = environments.make(CARTPOLE, num_envs=2, stepping=stepping, render_mode="rgb_array")
        environment.reset()
        picture = environment.render(1)
        assert picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.uint8
    with pytest.raises(NotImplementedError, match="render_mode='rgb_array'"):
        environment = environments.make(CARTPOLE, stepping="inline")
        environment.reset()
        environment.render()


def _one_env(episode_length: int = 3):
    return environments.make(functools.partial(testing.EchoEnvironment, episode_length=episode_length))


def _wrapped():
    return environments.FrameStack(_one_env(), 2)


def _four():
    return environments.make(testing.EchoEnvironment, num_envs=4)


def _as_asked(num_envs: int, seed: int | None = None):
    return environments.make(CARTPOLE, num_envs=num_envs, seed=seed, stepping="inline")


def _vector_as_asked(num_envs: int):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)


@pytest.mark.parametrize("factory", [_one_env, _wrapped], ids=["make", "a wrapper"])
def test_a_factory_may_return_a_batched_environment_of_one_env(factory):
    environment = environments.make(factory, num_envs=3)
    assert environment.num_envs == 3
    assert environment.observation_spec().shape == factory().observation_spec().shape
    environment.reset()
    kinds = [environment.step(np.zeros(3, np.int64)).step_type.tolist() for _ in range(4)]
    assert kinds == [[MID] * 3, [MID] * 3, [LAST] * 3, [FIRST] * 3]
    timestep = environment.step(np.array([1, 2, 3]))
    counts = timestep.observation.reshape(3, -1)[:, -1]  # each env counts its time steps
    assert timestep.reward.tolist() == [100.0 * (counts[0] - 1) + k for k in (1, 2, 3)]


def test_one_batched_environment_of_one_env_is_used_as_it_is():
    """With all that it tells beyond its steps, such as `cut`."""
    made = _one_env()
    assert environments.make(lambda: made) is made


@pytest.mark.parametrize("factory", [_as_asked, _vector_as_asked], ids=["make", "gymnasium's vector"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_factory_with_num_envs_makes_all_envs(factory, num_envs):
    environment = environments.make(factory, num_envs=num_envs, seed=5)
    assert environment.num_envs == num_envs
    assert environment.reset().observation.shape == (num_envs, 4)


def test_a_factory_with_a_seed_and_num_envs_gets_the_seed_of_the_batch():
    first, second = (environments.make(_as_asked, num_envs=2, seed=5).reset().observation for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_factory_that_loses_the_seed_causes_a_warning(num_envs):
    def forgets():
        return environments.FrameStack(environments.make("gymnasium:Pendulum-v1"), 2)

    def forgets_all(num_envs):
        return environments.make("gymnasium:Pendulum-v1", num_envs=num_envs)

    for factory in (forgets, forgets_all):
        with pytest.warns(UserWarning, match=r"forgets.*the factory has no parameter seed"):
            environments.make(factory, num_envs=num_envs, seed=1)


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        (_one_env, {}),
        (_as_asked, {"seed": 1}),
        (lambda **options: environments.make(CARTPOLE, **options), {"seed": 1, "options": {"seed": 2}}),
        (lambda: gymnasium.make("CartPole-v1"), {"seed": 1}),
        (lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs=num_envs), {"seed": 1}),
        (testing.EchoEnvironment, {"seed": 1}),
        ("tasks:Navigation2D", {"seed": 1}),
    ],
    ids=["no seed", "takes it", "an option", "gymnasium", "gymnasium's vector", "dm_env", "a suite"],
)
def test_a_seed_that_is_not_lost_causes_no_warning(factory, arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environments.make(factory, **arguments)


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        (_four, {"num_envs": 1}, "a batch of 4 envs, expected 1. Give it a parameter num_envs"),
        (_four, {"num_envs": 3}, "a batch of 4 envs, expected 3"),
        (lambda num_envs: testing.EchoEnvironment(), {"num_envs": 3}, "got one env from a factory"),
        (_as_asked, {"num_envs": 2, "stepping": "processes"}, "makes envs one by one"),
    ],
    ids=["four for one", "four for three", "one for three", "processes"],
)
def test_a_batch_of_the_wrong_size_is_refused_when_it_is_made(factory, arguments, message):
    with pytest.raises(ValueError, match=message):
        environments.make(factory, **arguments)


BOUNDED = {
    "above": specs.BoundedArray((3,), np.float32, 5, np.inf),
    "below": specs.BoundedArray((3,), np.float32, -np.inf, -5),
    "none": specs.BoundedArray((3,), np.float32, -np.inf, np.inf),
    "all int64": specs.BoundedArray((3,), np.int64, np.iinfo(np.int64).min, np.iinfo(np.int64).max),
    "bools": specs.BoundedArray((3,), bool, False, True),
}
