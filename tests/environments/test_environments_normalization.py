"""Streaming statistics against numpy's of the whole stream, and the wrappers on top of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from framework import environments, specs
from framework.environment_loop import EnvironmentLoop
from framework.environments import FIRST, LAST, testing
from framework.environments.normalization import RunningStatistics

_BATCHES = st.lists(
    st.integers(0, 6).flatmap(
        lambda n: hnp.arrays(np.float64, (n, 2), elements=st.floats(-1e3, 1e3, allow_subnormal=False))
    ),
    min_size=1,
    max_size=6,
)


@given(_BATCHES, st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_statistics_are_those_of_the_whole_stream(batches, split):
    whole = np.concatenate(batches)
    streamed = RunningStatistics((2,))
    left, right = RunningStatistics((2,)), RunningStatistics((2,))
    for index, batch in enumerate(batches):
        streamed.update(batch)
        (left if index < split else right).update(batch)
    left.merge(right)
    for statistics in (streamed, left):
        assert statistics.count == len(whole)
        if len(whole) > 1:
            np.testing.assert_allclose(statistics.mean, whole.mean(axis=0), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(statistics.variance, whole.var(axis=0), rtol=1e-7, atol=1e-7)


def test_a_large_offset_does_not_drown_the_variance():
    values = 1e9 + np.arange(1000.0)[:, None] % 7
    statistics = RunningStatistics((1,))
    for start in range(0, 1000, 10):
        statistics.update(values[start : start + 10])
    np.testing.assert_allclose(statistics.variance, values.var(axis=0), rtol=1e-6)


def test_save_is_a_snapshot_and_restore_goes_on():
    statistics = RunningStatistics((2,))
    statistics.update(np.arange(8.0).reshape(4, 2))
    state = statistics.save()
    statistics.update(np.ones((3, 2)))
    other = RunningStatistics((2,))
    other.restore(state)
    assert other.count == 4
    other.update(np.ones((3, 2)))
    np.testing.assert_array_equal(other.mean, statistics.mean)
    np.testing.assert_array_equal(other.variance, statistics.variance)
    with pytest.raises(ValueError, match=r"shape \(2,\), expected \(3,\)"):
        RunningStatistics((3,)).restore(state)


def _make(*wrappers, num_envs=4, seed=0, spec=None, **options):
    return environments.make(
        testing.FakeEnvironment,
        num_envs=num_envs,
        seed=seed,
        options={**({"spec": spec} if spec else {}), **options},
        wrappers=wrappers,
    )


_SPEC = testing.make_spec(
    {
        "far": specs.BoundedArray((2,), np.float64, [100.0, -5.0], [140.0, 5.0]),
        "picture": specs.BoundedArray((2, 2), np.uint8, 0, 255),
    }
)


def test_observations_are_normalised_by_all_envs_seen_so_far():
    inner, outer = _make(spec=_SPEC), _make(environments.NormalizeObservation, spec=_SPEC)
    seen = []
    plain, normal = inner.reset(), outer.reset()
    for _ in range(30):
        seen.append(plain.observation["far"].copy())
        whole = np.concatenate(seen)
        expected = (seen[-1] - whole.mean(axis=0)) / np.sqrt(whole.var(axis=0) + 1e-8)
        np.testing.assert_allclose(normal.observation["far"], expected, rtol=1e-5, atol=1e-6)
        assert normal.observation["far"].dtype == np.float32
        np.testing.assert_array_equal(normal.observation["picture"], plain.observation["picture"])
        action = np.zeros(4, np.int64)
        plain, normal = inner.step(action), outer.step(action)
    spec = outer.observation_spec()
    assert spec["far"].dtype == np.float32 and spec["far"].maximum == 10
    assert spec["picture"] == _SPEC.observations["picture"]


def test_observations_are_clipped():
    environment = _make(lambda e: environments.NormalizeObservation(e, clip=0.5), spec=_SPEC)
    environment.reset()
    for _ in range(20):
        observation = environment.step(np.zeros(4, np.int64)).observation["far"]
    assert np.abs(observation).max() == 0.5


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return():
    inner = _make(episode_length=3)
    outer = _make(lambda e: environments.NormalizeReward(e, discount=0.9, clip=5.0), episode_length=3)
    inner.reset()
    outer.reset()
    returns, running = [], np.zeros(4)
    for _ in range(20):
        action = np.zeros(4, np.int64)
        plain, normal = inner.step(action), outer.step(action)
        running = 0.9 * running + plain.reward
        moved = plain.step_type != FIRST
        returns.extend(running[moved])
        running[(plain.step_type == LAST) | ~moved] = 0
        scale = np.sqrt(np.var(returns) + 1e-8)
        np.testing.assert_allclose(normal.reward, np.clip(plain.reward / scale, -5, 5), rtol=1e-5)
        assert normal.reward.dtype == np.float32
        assert (normal.reward[~moved] == 0).all()
    assert outer.reward_spec().maximum == 5


def test_nested_rewards_cannot_be_normalised():
    spec = testing.make_spec(rewards={"a": specs.Array((), np.float32)}, discounts=None)
    with pytest.raises(ValueError, match="NormalizeReward needs a scalar reward"):
        _make(environments.NormalizeReward, spec=spec)


def test_the_checkpoint_continues_exactly_and_evaluation_does_not_learn():
    wrappers = [
        environments.NormalizeObservation,
        environments.NormalizeReward,
        lambda e: environments.StepLimit(e, 4),
    ]
    environment = _make(*wrappers, spec=_SPEC)
    environment.reset()
    for _ in range(10):
        environment.step(np.zeros(4, np.int64))
    state = environment.save()
    assert sorted(state) == ["1:NormalizeObservation", "2:NormalizeReward"]

    other = _make(*wrappers, spec=_SPEC, seed=9)
    other.restore(state)
    np.testing.assert_equal(other.save(), state)
    other.reset()
    assert other.save()["1:NormalizeObservation"]["0"]["count"] == 48

    frozen = _make(*wrappers, spec=_SPEC)
    frozen.restore(state)
    frozen.freeze()
    frozen.reset()
    frozen.step(np.zeros(4, np.int64))
    np.testing.assert_equal(frozen.save(), state)


def test_returns_of_the_loop_are_in_the_environments_own_scale():
    class Actor:
        def select_action(self, observation):
            return np.zeros(4, np.int64)

        def observe_first(self, timestep):
            pass

        def observe(self, action, timestep):
            self.scaled = timestep.reward

        def update(self, wait=False):
            pass

    actor = Actor()
    plain = EnvironmentLoop(_make(episode_length=3), actor).run_episodes(8)
    wrappers = (environments.NormalizeReward, lambda e: environments.FrameStack(e, 2))
    scaled = EnvironmentLoop(_make(*wrappers, episode_length=3), actor).run_episodes(8)
    np.testing.assert_array_equal(plain["episode_return"], scaled["episode_return"])
    assert actor.scaled.any()


def test_a_checkpoint_of_other_wrappers_is_refused():
    state = _make(environments.NormalizeObservation, spec=_SPEC).save()
    with pytest.raises(ValueError, match="same wrappers"):
        _make(spec=_SPEC).restore(state)
    with pytest.raises(ValueError, match="1:NormalizeReward, only of"):
        _make(environments.NormalizeReward, spec=_SPEC).restore(state)
