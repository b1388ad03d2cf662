"""Atari and dm_control, where they are installed."""

import functools
import logging

import numpy as np
import pytest

from framework import environments
from framework.environments import FIRST, LAST, MID


@pytest.fixture
def atari():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")

    def make(game="Pong", num_envs=1, seed=0, **options):
        return environments.make(f"atari:{game}", num_envs=num_envs, seed=seed, options=options)

    return make


def _play(environment, num_steps, seed=0):
    rng = np.random.default_rng(seed)
    timesteps = [environment.reset()]
    observations = [timesteps[0].observation.copy()]
    rest = []
    for _ in range(num_steps):
        action = rng.integers(0, environment.action_spec().num_values, environment.num_envs)
        timestep = environment.step(action)
        observations.append(timestep.observation.copy())
        rest.append([np.array(field) for field in timestep[:3]])
    return np.stack(observations), [np.stack(field) for field in zip(*rest, strict=True)]


def test_atari_defaults(atari):
    environment = atari(num_envs=2)
    spec = environment.observation_spec()
    assert spec.shape == (4, 84, 84) and spec.dtype == np.uint8
    assert environment.action_spec().num_values == 6
    observation = environment.reset().observation
    assert not observation[:, :3].any() and observation[:, 3].any()
    first = observation[:, 3].copy()
    observation = environment.step(np.zeros(2, np.int64)).observation
    np.testing.assert_array_equal(observation[:, 2], first)
    assert environment.render().shape == (210, 160, 3)


_SHAPES = [
    ({"grayscale": False, "full_action_space": True}, (12, 84, 84)),
    ({"size": None, "stack": 1, "grayscale": False}, (3, 210, 160)),
    ({"size": 42, "stack": 2}, (2, 42, 42)),
]


@pytest.mark.parametrize(("options", "shape"), _SHAPES)
def test_atari_pictures(atari, options, shape):
    environment = atari(**options)
    assert environment.observation_spec().shape == shape
    assert environment.action_spec().num_values == (18 if "full_action_space" in options else 6)
    assert environment.reset().observation.shape == (1, *shape)
    assert environment.step(np.array([0])).observation.any()


CHANCE = {"no-ops": {"sticky_actions": 0.0}, "sticky actions": {"noop_max": 0}}


@pytest.mark.parametrize("options", CHANCE.values(), ids=CHANCE)
def test_atari_is_reproducible_and_seeds_differ(atari, options):
    runs = [_play(atari(seed=seed, **options), 60)[0] for seed in (3, 3, 4)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    runs = [_play(atari(seed=seed, sticky_actions=0.0, noop_max=0), 60)[0] for seed in (3, 4)]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("probability", [0.0, 0.25, 0.8])
def test_sticky_actions_repeat_the_frame_before_at_their_rate(atari, probability):
    game = atari(frame_skip=1, noop_max=0, sticky_actions=probability, max_frames=4000)._envs[0]._environment
    game.reset()
    played = [game._noop]

    class Recorder:
        def __getattr__(self, name):
            return getattr(real, name)

        def act(self, action):
            played.append(action)
            return real.act(action)

    real, game._ale = game._ale, Recorder()
    repeated = 0
    for step in range(2000):
        # Never the action that was played before.
        asked = next(a for a in (step % 6, (step + 1) % 6) if game._actions[a] != played[-1])
        game.step(asked)
        assert played[-1] in (game._actions[asked], played[-2])
        repeated += played[-1] == played[-2]
    assert abs(repeated / 2000 - probability) < 0.04  # four standard deviations


def test_frame_skip_sums_rewards(atari):
    scores = {}
    for skip in (1, 4):
        environment = atari(frame_skip=skip, sticky_actions=0.0, noop_max=0)
        environment.reset()
        total = 0.0
        for _ in range(1200 // skip):
            total += environment.step(np.zeros(1, np.int64)).reward[0]
        scores[skip] = total
    assert scores[1] == scores[4] < 0


def test_max_pooling_is_the_maximum_of_the_last_two_frames(atari):
    options = {"sticky_actions": 0.0, "noop_max": 0, "size": None, "stack": 1}
    every = atari(frame_skip=1, **options)
    pooled, plain = atari(frame_skip=4, **options), atari(frame_skip=4, max_pooling=False, **options)
    for environment in (every, pooled, plain):
        environment.reset()
    differ = 0
    for _ in range(40):
        frames = [every.step(np.zeros(1, np.int64)).observation.copy() for _ in range(4)]
        expected = np.maximum(frames[2], frames[3])
        np.testing.assert_array_equal(pooled.step(np.zeros(1, np.int64)).observation, expected)
        np.testing.assert_array_equal(plain.step(np.zeros(1, np.int64)).observation, frames[3])
        differ += not np.array_equal(expected, frames[3])
    assert differ  # else the case shows nothing


@pytest.mark.parametrize("terminates", [False, True])
def test_a_lost_life_ends_the_episode_only_if_asked(atari, terminates):
    environment = atari("Breakout", life_loss_terminates=terminates, noop_max=0)
    environment.reset()
    rng, lives = np.random.default_rng(0), []  # The lives that are left when an episode begins.
    for _ in range(600):
        timestep = environment.step(rng.integers(0, 4, 1))
        if timestep.step_type[0] == FIRST:
            lives.append(environment._envs[0]._environment._ale.lives())
        assert timestep.discount[0] == (timestep.step_type[0] != LAST)
    # The game goes on after a lost life, and a new one begins when all are lost.
    assert lives[:5] == [4, 3, 2, 1, 5] if terminates else set(lives) == {5}


def test_atari_time_limit_is_a_truncation(atari):
    environment = atari(max_frames=40, noop_max=0)
    _, (step_type, _, discount) = _play(environment, 12)
    assert LAST in step_type and (discount == 1).all()


def test_atari_bad_names_and_options(atari):
    for call, message in (
        (lambda: atari("Pongg"), r"Atari game: got 'Pongg', .* Did you mean 'pong'"),
        (
            lambda: atari(reward_clip=1),
            "AtariOptions has no field 'reward_clip'; it has sticky_actions",
        ),
        (lambda: atari(frame_skip=0), "frame_skip: got 0"),
        (lambda: atari(frame_skip=2.5), "frame_skip: got 2.5, expected a whole number"),
        (lambda: atari(size="84"), "size: got '84', expected a whole number or None"),
        (lambda: atari(sticky_actions=1.5), "sticky_actions: got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.*DISPLAY")
def test_dm_control():
    pytest.importorskip("dm_control")
    with environments.make(
        "dm_control:cartpole/balance", num_envs=2, seed=1, wrappers=[environments.Flatten]
    ) as environment:
        assert environment.observation_spec().shape == (5,)
        first = environment.reset().observation.copy()
        assert not np.array_equal(first[0], first[1])
        timestep = environment.step(np.zeros((2, 1)))
        assert timestep.step_type.tolist() == [MID, MID]
        assert timestep.reward.dtype == np.float32 and (timestep.reward > 0).all()
        for _ in range(999):
            timestep = environment.step(np.zeros((2, 1)))
        assert timestep.step_type.tolist() == [LAST, LAST]
        assert timestep.discount.tolist() == [1, 1]  # a time limit
    with environments.make(
        "dm_control:cartpole/balance", num_envs=2, seed=1, wrappers=[environments.Flatten]
    ) as again:
        np.testing.assert_array_equal(again.reset().observation, first)
    with pytest.raises(ValueError, match="expected one of dm_control:cartpole/balance"):
        environments.make("dm_control:cartpole/fly")
    with pytest.raises(ValueError, match="unknown environment 'dm_control:nothing"):
        environments.make("dm_control:nothing")


def test_environments_for_tests_have_names():
    environment = environments.make("testing:Memory", num_envs=2, seed=0, options={"length": 3})
    assert environment.reset().observation.shape == (2, 3)
    with pytest.raises(ValueError, match="testing:Fake, testing:Masked, testing:Memory"):
        environments.make("testing:Memoir")


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    "hidden, whole, shown",
    [
        ("CartPoleWithoutVelocities", "CartPole-v1", [0, 2]),
        ("PendulumWithoutVelocity", "Pendulum-v1", [0, 1]),
    ],
)
def test_an_environment_without_velocities_shows_the_rest(num_envs, hidden, whole, shown):
    hidden, whole = (
        environments.make(name, num_envs=num_envs, seed=1, options={"max_episode_steps": 30})
        for name in (f"testing:{hidden}", f"gymnasium:{whole}")
    )
    full = whole.observation_spec()
    hidden.observation_spec().validate(full.maximum[shown] * np.float32(0.9))
    assert hidden.observation_spec().shape == (2,)
    ones, others = hidden.reset(), whole.reset()
    ends = 0
    for time in range(100):
        np.testing.assert_array_equal(ones.observation, others.observation[:, shown])
        for part in ("step_type", "reward", "discount"):
            np.testing.assert_array_equal(getattr(ones, part), getattr(others, part))
        ends += (ones.step_type == 2).sum()
        spec = hidden.action_spec()
        action = np.full((num_envs, *spec.shape), time % 2, spec.dtype)
        ones, others = hidden.step(action), whole.step(action)
    assert ends >= 2


def test_the_badly_scaled_pendulum_is_the_usual_one():
    names = ("testing:BadlyScaledPendulum", "gymnasium:Pendulum-v1")
    ones, others = (environments.make(name, num_envs=2, seed=1).reset().observation for name in names)
    np.testing.assert_allclose((ones - 1e4) / [1e3, 1.0, 1e-3], others, atol=1e-7)


def test_minatar():
    pytest.importorskip("minatar")
    environment = environments.make("minatar:Breakout", num_envs=2, seed=0)
    assert environment.observation_spec().shape == (4, 10, 10)
    assert environment.action_spec().num_values == 3
    runs = [_play(environments.make("minatar:Breakout", num_envs=2, seed=s), 200) for s in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    assert not np.array_equal(runs[0][0], runs[2][0])
    step_type, reward, discount = runs[0][1]
    assert set(np.unique(runs[0][0])) == {0, 1} and set(np.unique(reward)) == {0, 1}
    assert (discount[step_type == LAST] == 0).all() and (step_type == LAST).any()
    environment.reset()
    assert environment.render().shape == (160, 160, 3)
    all_actions = environments.make("minatar:Seaquest", options={"minimal_actions": False})
    assert all_actions.action_spec().num_values == 6
    with pytest.raises(ValueError, match="expected one of minatar:Asterix, minatar:Breakout"):
        environments.make("minatar:Pong")
    environment = environments.make("minatar:Breakout", options={"max_steps": 3}, seed=0)
    step_type, _, discount = _play(environment, 12)[1]
    # FIRST, two steps, LAST, and so on; the ball needs more than three steps to fall.
    assert (step_type.ravel()[2::4] == LAST).all() and (step_type == LAST).sum() == 3
    assert (discount[step_type == LAST] == 1).all()


def test_minatar_leaves_logging_as_it_is_and_refuses_a_limit_of_zero():
    pytest.importorskip("minatar")
    logging.disable(logging.CRITICAL)
    try:
        environments.make("minatar:Breakout")
        assert logging.root.manager.disable == logging.CRITICAL
    finally:
        logging.disable(logging.NOTSET)
    with pytest.raises(ValueError, match="max_steps: got 0, expected a whole number of at least 1"):
        environments.make("minatar:Breakout", options={"max_steps": 0})


def test_minigrid():
    pytest.importorskip("minigrid")
    make = functools.partial(environments.make, "minigrid:DoorKey-5x5", num_envs=2)
    with make(seed=0) as environment, make(seed=0) as same, make(seed=1) as other:
        spec = environment.observation_spec()
        assert set(spec) == {"direction", "image"} and spec["direction"].num_values == 4
        assert spec["image"].shape == (7, 7, 3) and spec["image"].dtype == np.uint8
        assert spec["image"].maximum.max((0, 1)).tolist() == [10, 5, 2]
        assert environment.action_spec().num_values == 7
        rng, differs = np.random.default_rng(0), False
        ours, theirs, another = environment.reset(), same.reset(), other.reset()
        for _ in range(100):
            for name, leaf in spec.items():
                leaf.validate(ours.observation[name][0])
                np.testing.assert_array_equal(ours.observation[name], theirs.observation[name])
            differs |= not np.array_equal(ours.observation["image"], another.observation["image"])
            action = rng.integers(0, 7, 2)
            ours, theirs, another = environment.step(action), same.step(action), other.step(action)
        assert differs


def _last_of_empty(actions, max_steps):
    """The first LAST in a room of 3 x 3, from the top left corner, looking right, to the goal opposite."""
    with environments.make("minigrid:Empty-5x5", options={"max_steps": max_steps}) as environment:
        environment.reset()
        for action in actions:
            timestep = environment.step(np.array([action]))
            if timestep.last().all():
                return timestep
    raise AssertionError("the episode does not end")


def test_an_episode_of_minigrid_terminates_at_the_goal_and_is_truncated_at_its_limit():
    pytest.importorskip("minigrid")
    right, forward = 1, 2
    goal = _last_of_empty([forward, forward, right, forward, forward], max_steps=10)
    assert goal.discount == 0 and goal.reward == pytest.approx(1 - 0.9 * 5 / 10)
    limit = _last_of_empty([right] * 10, max_steps=10)
    assert limit.discount == 1 and limit.reward == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [("DoorKey", r"Did you mean 'DoorKey-\dx\d-v0'"), ("Pong", "expected one of minigrid:")],
)
def test_an_unknown_task_of_minigrid(name, says):
    pytest.importorskip("minigrid")
    with pytest.raises(ValueError, match=says):
        environments.make(f"minigrid:{name}")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ale_py", "atari:Pong"),
        ("dm_control", "dm_control:a/b"),
        ("minatar", "minatar:Breakout"),
        ("minigrid", "minigrid:DoorKey-5x5"),
    ],
)
def test_a_missing_package_names_the_extra(monkeypatch, module, name):
    import importlib.util
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == module else real(n, *a))
    with pytest.raises(ImportError, match=r'pip install "repertory\['):
        environments.make(name)


def test_the_step_of_a_sleeping_environment_takes_its_time(monkeypatch):
    slept = []
    monkeypatch.setattr("framework.environments.testing.time.sleep", slept.append)
    environment = environments.make("testing:Sleep", num_envs=2, options={"step_time": 0.25})
    environment.reset()
    environment.step(np.zeros(2, np.int64))
    assert slept == [0.25, 0.25]
    with pytest.raises(ValueError, match="step_time: got -1, expected at least 0 seconds"):
        environments.make("testing:Sleep", options={"step_time": -1})
