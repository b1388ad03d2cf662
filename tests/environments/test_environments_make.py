"""``make``: batching in line and by gymnasium's vector environments, seeds, faults, bad arguments."""

import sys

import dm_env
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from framework import environments, specs
from framework.environments import FIRST, LAST, MID, testing
from framework.environments.inline import InlineEnvironment
from framework.environments.vector import VectorEnvironment

CARTPOLE = "gymnasium:CartPole-v1"


def _copy(timestep):
    return [np.array(field) for field in timestep]


def _roll(environment, actions):
    """All fields of all time steps, stacked ``[T + 1, B, ...]``."""
    steps = [_copy(environment.reset())]
    steps += [_copy(environment.step(action)) for action in actions]
    return [np.stack(field) for field in zip(*steps, strict=True)]


@pytest.mark.parametrize("stepping", ["inline", "vector", "processes"])
def test_timesteps_follow_the_contract(stepping):
    actions = np.random.default_rng(0).integers(0, 2, (150, 4))
    with environments.make(CARTPOLE, num_lanes=4, seed=1, stepping=stepping, **_few(stepping)) as environment:
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


def _few(stepping):
    return {"num_processes": 2} if stepping == "processes" else {}


@pytest.mark.parametrize("stepping", ["inline", "vector", "processes"])
def test_time_limit_is_a_truncation(stepping):
    with environments.make(
        CARTPOLE, num_lanes=2, seed=1, stepping=stepping, options={"max_episode_steps": 5}, **_few(stepping)
    ) as environment:
        step_type, reward, discount, _ = _roll(environment, [np.array([0, 1]), np.array([1, 0])] * 4)
    assert step_type[:, 0].tolist() == [FIRST, MID, MID, MID, MID, LAST, FIRST, MID, MID]
    assert (discount == 1).all()
    assert reward[5].tolist() == [1, 1]


def test_cartpole_balanced_to_the_end_is_truncated_at_500():
    for stepping in ("inline", "vector"):
        environment = environments.make(CARTPOLE, num_lanes=2, seed=3, stepping=stepping)
        timestep = environment.reset()
        length = 0
        while length < 502:
            length += 1
            x, v, angle, spin = timestep.observation.T
            action = (0.1 * x + 0.3 * v + 3 * angle + spin > 0).astype(np.int64)
            timestep = environment.step(action)
            if (timestep.step_type == LAST).any():
                break
        assert length == 500, stepping
        assert timestep.step_type.tolist() == [LAST, LAST] and timestep.discount.tolist() == [1, 1]
        assert environment.step(action).step_type.tolist() == [FIRST, FIRST]


@pytest.mark.parametrize("stepping", ["inline", "vector"])
def test_the_same_seed_gives_the_same_steps_and_another_seed_others(stepping):
    actions = np.random.default_rng(0).integers(0, 2, (60, 3))
    runs = [
        _roll(environments.make(CARTPOLE, num_lanes=3, seed=seed, stepping=stepping), actions)
        for seed in (5, 5, 6)
    ]
    for mine, same in zip(runs[0], runs[1], strict=True):
        np.testing.assert_array_equal(mine, same)
    assert not np.array_equal(runs[0][3], runs[2][3])
    assert not np.array_equal(runs[0][3][:, 0], runs[0][3][:, 1])


def test_a_lane_does_not_depend_on_how_many_there_are():
    actions = np.random.default_rng(0).integers(0, 2, (60, 5))
    wide = _roll(environments.make(CARTPOLE, num_lanes=5, seed=5, stepping="inline"), actions)
    narrow = _roll(environments.make(CARTPOLE, num_lanes=2, seed=5, stepping="inline"), actions[:, :2])
    np.testing.assert_array_equal(wide[3][:, :2], narrow[3])


def test_reset_in_mid_episode_starts_all_lanes_anew_and_differently():
    environment = environments.make(CARTPOLE, num_lanes=2, seed=5, stepping="inline")
    first = environment.reset().observation.copy()
    environment.step(np.array([0, 1]))
    again = environment.reset()
    assert (again.step_type == FIRST).all()
    assert not np.array_equal(first, again.observation)


def test_step_before_reset_is_a_reset():
    for stepping in ("inline", "vector"):
        environment = environments.make(CARTPOLE, num_lanes=2, seed=5, stepping=stepping)
        assert (environment.step(np.array([0, 1])).step_type == FIRST).all()


def test_the_previous_time_step_stays_intact_for_one_more_step():
    environment = environments.make(CARTPOLE, num_lanes=2, seed=5, stepping="inline")
    before = environment.reset()
    kept = before.observation.copy()
    environment.step(np.array([0, 1]))
    np.testing.assert_array_equal(before.observation, kept)


@pytest.mark.parametrize(
    ("num_lanes", "wrappers", "expected"),
    [
        (1, [], InlineEnvironment),
        (2, [], VectorEnvironment),
        (2, [lambda e: environments.StepLimit(e, 3)], VectorEnvironment),
    ],
)
def test_auto_chooses_how_to_step(num_lanes, wrappers, expected):
    if wrappers:
        import functools

        limited = environments.make(
            CARTPOLE, num_lanes=2, wrappers=[functools.partial(environments.StepLimit, limit=3)]
        )
        assert isinstance(limited.wrapped, InlineEnvironment)
        with pytest.raises(NotImplementedError, match="stepping='inline'"):
            environments.make(CARTPOLE, num_lanes=2, wrappers=wrappers)
    else:
        assert isinstance(environments.make(CARTPOLE, num_lanes=num_lanes), expected)


class _OwnVector(gymnasium.vector.VectorEnv):
    """A vector environment that differs from its single one in the shape or in how it resets."""

    def __init__(self, num_envs, size, mode, max_episode_steps=None):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-1, 1, (size,))
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = self.action_space = None


class _Single(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (3,))
    action_space = spaces.Discrete(2)

    def __init__(self, size=3, mode=None, known_to_one=0):
        pass


_NEXT_STEP, _SAME_STEP = (gymnasium.vector.AutoresetMode[name] for name in ("NEXT_STEP", "SAME_STEP"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 3, "mode": _NEXT_STEP}, VectorEnvironment),
        ({"size": 4, "mode": _NEXT_STEP}, InlineEnvironment),
        ({"size": 3, "mode": _SAME_STEP}, InlineEnvironment),
        ({"size": 3, "mode": _NEXT_STEP, "known_to_one": 1}, InlineEnvironment),
    ],
    ids=["alike", "other shape", "other autoreset", "unknown option"],
)
def test_auto_takes_a_vector_version_only_if_it_is_the_same_environment(options, expected):
    gymnasium.register("Own-v0", entry_point=_Single, vector_entry_point=_OwnVector)
    try:
        assert isinstance(environments.make("gymnasium:Own-v0", num_lanes=2, options=options), expected)
    finally:
        gymnasium.registry.pop("Own-v0")


def test_vector_stepping_of_an_environment_without_its_own_vector_version():
    actions = np.random.default_rng(0).uniform(-2, 2, (10, 3, 1)).astype(np.float32)
    environment = environments.make(
        "gymnasium:Pendulum-v1", num_lanes=3, seed=1, stepping="vector", options={"max_episode_steps": 4}
    )
    step_type, _, discount, observation = _roll(environment, actions)
    assert step_type[:, 0].tolist() == [0, 1, 1, 1, 2, 0, 1, 1, 1, 2, 0]
    assert observation.shape == (11, 3, 3) and (discount == 1).all()


def test_a_factory_may_return_a_whole_vector_environment():
    def whole():
        return gymnasium.make_vec("CartPole-v1", num_envs=3)

    environment = environments.make(whole, num_lanes=3)
    assert isinstance(environment, VectorEnvironment)
    assert environment.reset().observation.shape == (3, 4)
    with pytest.raises(ValueError, match=r"3 lanes.*num_lanes=2"):
        environments.make(whole, num_lanes=2)


def test_a_vector_environment_in_another_autoreset_mode_is_refused():
    def same_step():
        return gymnasium.make_vec(
            "CartPole-v1",
            num_envs=2,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
        )

    with pytest.raises(ValueError, match=r"SameStep.*NEXT_STEP"):
        environments.make(same_step, num_lanes=2)


class _Nested(gymnasium.Env):
    """Observes the action taken, through spaces of every kind."""

    observation_space = spaces.Dict(
        {
            "seen": spaces.Discrete(3, start=10),
            "both": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.MultiDiscrete([2, 3]))),
        }
    )
    action_space = spaces.Dict({"pick": spaces.Discrete(3, start=-1), "push": spaces.Box(-1, 1, (2,))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(-1, np.zeros(2)), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self._observe(action["pick"], action["push"]), float(action["pick"]), False, False, {}

    def _observe(self, pick, push):
        observation = {
            "seen": np.int64(pick + 11),
            "both": (np.asarray(push, np.float64), np.array([1, 2], np.int64)),
        }
        assert self.observation_space.contains(observation)
        return observation


@pytest.mark.parametrize("stepping", ["inline", "processes"])
def test_nested_spaces_and_discrete_starts(stepping):
    with environments.make(_Nested, num_lanes=3, stepping=stepping, **_few(stepping)) as environment:
        assert environment.action_spec()["pick"].num_values == 3
        environment.reset()
        push = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
        timestep = environment.step({"pick": np.array([0, 1, 2]), "push": push})
        assert timestep.observation["seen"].tolist() == [0, 1, 2]
        assert timestep.reward.tolist() == [-1, 0, 1]
        np.testing.assert_array_equal(timestep.observation["both"][0], push)
        assert timestep.observation["both"][0].dtype == np.float64
        assert timestep.observation["both"][1].tolist() == [[1, 2]] * 3


def test_vector_stepping_knows_discrete_starts():
    class Shifted(gymnasium.Env):
        observation_space = spaces.Discrete(3, start=7)
        action_space = spaces.Discrete(3, start=7)

        def reset(self, *, seed=None, options=None):
            return 7, {}

        def step(self, action):
            return action, 0.0, False, False, {}

    environment = environments.make(
        lambda: gymnasium.vector.SyncVectorEnv([Shifted, Shifted]), num_lanes=2, stepping="auto"
    )
    assert environment.reset().observation.tolist() == [0, 0]
    assert environment.step(np.array([2, 1])).observation.tolist() == [2, 1]


def test_dm_env_with_nested_rewards_and_discounts():
    spec = testing.make_spec(
        rewards={"a": specs.Array((2,), np.float64), "b": specs.Array((), np.float32)},
        discounts={"a": specs.Array((2,), np.float32), "b": specs.Array((), np.float32)},
    )
    environment = environments.make(testing.FakeEnvironment, num_lanes=2, seed=0, options={"spec": spec})
    timestep = environment.reset()
    assert timestep.reward["a"].shape == (2, 2) and timestep.reward["a"].dtype == np.float32
    assert (timestep.discount["a"] == 1).all()
    for _ in range(5):
        timestep = environment.step(np.zeros(2, np.int64))
    assert (timestep.step_type == LAST).all()
    assert (timestep.reward["a"] != 0).all() and (timestep.discount["b"] == 0).all()


def test_echo_environment_pairs_reward_with_observation_and_action():
    environment = environments.make(testing.EchoEnvironment, num_lanes=3, options={"truncate": True})
    before = environment.reset().observation[:, 0].copy()
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = rng.integers(0, 4, 3)
        timestep = environment.step(action)
        moved = timestep.step_type != FIRST
        np.testing.assert_array_equal(timestep.reward[moved], (100 * before + action)[moved])
        assert (timestep.discount == 1).all()
        before = timestep.observation[:, 0].copy()


def test_memory_environment_pays_for_the_cue_only():
    environment = environments.make(testing.MemoryEnvironment, num_lanes=16, seed=0)
    timestep = environment.reset()
    cue = timestep.observation[:, :2].argmax(axis=1)
    assert set(cue) == {0, 1}
    for time in range(1, 11):
        timestep = environment.step(cue if time == 10 else 1 - cue)
        assert (timestep.observation[:, :2] == 0).all()
    assert (timestep.reward == 1).all() and (timestep.step_type == LAST).all()


_FAULTS = {
    "raise": r"FaultyEnvironment, lane 0: step\(1\) raised RuntimeError: the simulator exploded",
    "nan_observation": r"FaultyEnvironment, lane 0: observation holds NaN",
    "nan_reward": r"FaultyEnvironment, lane 0: reward holds NaN",
    "shape": r"FaultyEnvironment, lane 0: observation has shape \(2,\), expected \(1,\)",
    "dtype": r"FaultyEnvironment, lane 0: observation has dtype <U1",
}


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("stepping", ["inline", "processes"])
def test_a_fault_in_mid_episode_names_environment_lane_and_field(fault, stepping):
    with environments.make(
        testing.FaultyEnvironment, num_lanes=2, stepping=stepping, options={"fault": fault}, **_few(stepping)
    ) as environment:
        environment.reset()
        for _ in range(2):
            environment.step(np.array([1, 1]))
        with pytest.raises(environments.EnvironmentFault, match=_FAULTS[fault]):
            environment.step(np.array([1, 1]))


def test_the_faulty_lane_is_named_not_the_first():
    built = []

    def make():
        built.append(None)
        return testing.FaultyEnvironment("nan_observation", at=9 if len(built) < 3 else 2)

    environment = environments.make(make, num_lanes=3)
    environment.reset()
    environment.step(np.zeros(3, np.int64))
    with pytest.raises(environments.EnvironmentFault, match="lane 2"):
        environment.step(np.zeros(3, np.int64))


class _OddReward(testing.EchoEnvironment):
    def __init__(self, reward):
        super().__init__()
        self._reward = reward

    def step(self, action):
        return super().step(action)._replace(reward=self._reward)


@pytest.mark.parametrize("reward", [None, "much", np.zeros(2)], ids=["None", "text", "array"])
def test_a_reward_that_is_no_number_is_named(reward):
    environment = environments.make(_OddReward, num_lanes=2, options={"reward": reward})
    environment.reset()
    with pytest.raises(
        environments.EnvironmentFault, match=r"lane 0: reward.*expected one number|reward holds"
    ):
        environment.step(np.zeros(2, np.int64))


def test_a_missing_part_of_the_observation_is_named():
    class Forgetful(_Nested):
        def step(self, action):
            observation, *rest = super().step(action)
            del observation["seen"]
            return observation, *rest

    environment = environments.make(Forgetful)
    environment.reset()
    # The offset of "seen" is taken off before the batch sees it, so both places may notice.
    with pytest.raises(environments.EnvironmentFault, match=r"lane 0.*seen"):
        environment.step({"pick": np.array([0]), "push": np.zeros((1, 2), np.float32)})


_BAD_ACTIONS = {
    "shape": (np.zeros((2, 1), np.int64), r"action has shape \(2, 1\), expected \(2,\)"),
    "lanes": (np.zeros(3, np.int64), r"action has shape \(3,\), expected \(2,\)"),
    "range": (np.array([0, 2]), r"action of lane 1 is .*2.* outside 0 \.\.\. 1"),
    "dtype": (np.array([0.0, 1.0]), "action has dtype float64, expected int64"),
}


@pytest.mark.parametrize("name", _BAD_ACTIONS)
@pytest.mark.parametrize("stepping", ["inline", "vector"])
def test_an_action_that_does_not_fit_is_refused(name, stepping):
    action, message = _BAD_ACTIONS[name]
    environment = environments.make(CARTPOLE, num_lanes=2, stepping=stepping)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.step(action)
    assert environment.step(np.array([0, 1])).reward.tolist() == [1, 1]  # nothing was stepped


def test_a_nan_action_is_refused():
    environment = environments.make("gymnasium:Pendulum-v1", num_lanes=2)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=r"action of lane 1 is .*nan.*not finite"):
        environment.step(np.array([[0.0], [np.nan]], np.float32))


def test_a_nested_action_with_a_part_missing_is_refused():
    environment = environments.make(_Nested)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match="lacks a part of the action spec"):
        environment.step({"pick": np.array([0])})


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


@pytest.mark.parametrize("stepping", ["inline", "vector", "processes"])
def test_a_module_may_register_its_environment(registered, stepping):
    with environments.make(registered, num_lanes=2, stepping=stepping) as environment:
        assert environment.reset().observation.tolist() == [0, 0]
        assert environment.step(np.array([0, 1])).observation.tolist() == [4, 4]
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        environments.make("gymnasium:no_such_module:Walk-v0")


def test_an_environment_registered_here_works_in_processes():
    gymnasium.register("Nested-v0", entry_point=_Nested)
    try:
        with environments.make("gymnasium:Nested-v0", stepping="processes") as environment:
            assert environment.reset().observation["seen"].tolist() == [0]
    finally:
        gymnasium.registry.pop("Nested-v0")


def test_bad_arguments():
    for arguments, message in (
        (("CartPole-v1",), "Did you mean 'gymnasium:CartPole-v1'"),
        (("gymnasium:NoSuch-v1",), "unknown environment 'gymnasium:NoSuch-v1'"),
        (("gym:CartPole-v1",), "names look like gymnasium:CartPole-v1"),
        (("atari:",), "unknown environment 'atari:'"),
    ):
        with pytest.raises(ValueError, match=message):
            environments.make(*arguments)
    with pytest.raises(ValueError, match="num_lanes is 0"):
        environments.make(CARTPOLE, num_lanes=0)
    with pytest.raises(ValueError, match=r"stepping is 'fast'.*inline"):
        environments.make(CARTPOLE, stepping="fast")
    with pytest.raises(ValueError, match="num_processes=2 needs stepping='processes'"):
        environments.make(CARTPOLE, num_processes=2)
    with pytest.raises(ValueError, match="stepping='vector' needs"):
        environments.make(testing.EchoEnvironment, stepping="vector")
    with pytest.raises(TypeError, match="not the instance"):
        environments.make(testing.EchoEnvironment())
    with pytest.raises(TypeError, match=r"returned int.*dm_env.Environment"):
        environments.make(lambda: 7)


def test_lanes_that_differ_are_refused():
    sizes = iter([3, 3, 4])

    def make():
        size = next(sizes)
        return testing.FakeEnvironment(testing.make_spec(specs.Array((size,), np.float32)))

    with pytest.raises(environments.EnvironmentFault, match="lane 2"):
        environments.make(make, num_lanes=3)


def test_close_closes_every_lane_even_if_one_fails():
    closed = []

    class Closing(testing.EchoEnvironment):
        def __init__(self, seed):
            super().__init__()
            self._seed = seed

        def close(self):
            closed.append(self._seed)
            if len(closed) == 1:
                raise OSError("cannot close")

    environment = environments.make(Closing, num_lanes=3, seed=0)
    with pytest.raises(OSError, match="cannot close"):
        environment.close()
    assert len(set(closed)) == 3


@pytest.mark.filterwarnings("ignore:.*render method")
def test_render():
    for stepping in ("inline", "vector"):
        environment = environments.make(CARTPOLE, num_lanes=2, stepping=stepping, render_mode="rgb_array")
        environment.reset()
        picture = environment.render(1)
        assert picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.uint8
    with pytest.raises(NotImplementedError, match="render_mode='rgb_array'"):
        environment = environments.make(CARTPOLE, stepping="inline")
        environment.reset()
        environment.render()


def test_a_dm_env_environment_that_skips_last_is_reported():
    class Skipping(testing.EchoEnvironment):
        def step(self, action):
            return dm_env.restart(np.zeros(1, np.float32))

    environment = environments.make(Skipping)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match="FIRST although the step before was not LAST"):
        environment.step(np.array([0]))
