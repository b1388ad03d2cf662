"""Fitted Q evaluation, against values worked by hand."""

import numpy as np
import pytest

from framework import specs
from framework.datasets.episodes import EpisodeDataset, step_of
from framework.programs.fitted_q import fitted_q_evaluation

DISCOUNT = 0.9


def make_dataset(action_spec, make_actions, generator, length=4):
    """A chain: action 1 pays the place 0, 1, 2, … and goes on, action 0 pays nothing and goes on, too."""
    spec = specs.EnvironmentSpec(
        observations=specs.Array((length + 1,), np.float32),
        actions=action_spec,
        rewards=specs.Array((), np.float32),
        discounts=specs.BoundedArray((), np.float32, 0.0, 1.0),
    )
    episodes = []
    for _ in range(200):
        right, actions = make_actions(generator, length)
        rewards = np.where(right, np.arange(length), 0.0).astype(np.float32)
        discounts = np.ones(length, np.float32)
        discounts[-1] = 0.0
        episodes.append(step_of(np.eye(length + 1, dtype=np.float32), actions, rewards, discounts))
    return spec, EpisodeDataset("made here", lambda index: episodes[index], [length] * len(episodes), spec)


def discrete(generator, length):
    right = generator.random(length) < 0.5
    return right, right.astype(np.int64)


def real(generator, length):
    right = generator.random(length) < 0.5
    return right, np.where(right, 3.0, 1.0).astype(np.float32)[:, None]


@pytest.mark.parametrize("kind", ["discrete", "real"])
def test_the_value_of_a_policy_that_did_not_record_the_data(kind):
    if kind == "discrete":
        spec, make, always = specs.DiscreteArray(2, np.int64), discrete, np.int64(1)
    else:
        spec, make = specs.BoundedArray((1,), np.float32, 1.0, 3.0), real
        always = np.array([3.0], np.float32)
    environment_spec, episodes = make_dataset(spec, make, np.random.default_rng(0))

    result = fitted_q_evaluation(
        lambda observations: np.stack([always] * len(observations)),
        *(environment_spec, episodes),
        discount=DISCOUNT,
        learner_steps=1_500,
        batch_size=64,
        learning_rate=3e-3,
        hidden_sizes=(32,),
    )

    expected = sum(place * DISCOUNT**place for place in range(4))
    assert result["value"] == pytest.approx(expected, rel=0.03)
    returns = [sum(reward * DISCOUNT**t for t, reward in enumerate(each.reward[:-1])) for each in episodes]
    assert result["data_return"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert result["data_return"] < 0.7 * expected
    assert (result["episodes"], result["transitions"]) == (200, 800)


def test_a_cut_episode_goes_on_and_an_ended_one_does_not():
    """Two states that lead to themselves: reward 1 for ever is 1 / (1 - discount), an ended one is 1."""
    spec = specs.EnvironmentSpec(
        specs.Array((2,), np.float32),
        specs.DiscreteArray(2, np.int64),
        specs.Array((), np.float32),
        specs.BoundedArray((), np.float32, 0.0, 1.0),
    )
    one = np.ones(1, np.float32)
    kinds = {
        name: step_of(np.stack([row, row]), np.zeros(1, np.int64), one, one * discount)
        for name, row, discount in [
            ("cut", np.array([1, 0], np.float32), 1.0),
            ("ended", np.array([0, 1], np.float32), 0.0),
        ]
    }
    for name, expected in {"cut": 1 / (1 - 0.5), "ended": 1.0}.items():
        episodes = EpisodeDataset(name, lambda index, name=name: kinds[name], [1], spec)
        result = fitted_q_evaluation(
            lambda observations: np.zeros(len(observations), np.int64),
            *(spec, episodes),
            discount=0.5,
            learner_steps=2_500,
            batch_size=8,
            learning_rate=3e-3,
            hidden_sizes=(16,),
        )
        assert result["value"] == pytest.approx(expected, rel=0.03), name


def test_what_it_cannot_evaluate_is_told():
    environment_spec, episodes = make_dataset(
        specs.DiscreteArray(2, np.int64), discrete, np.random.default_rng(0)
    )

    class WithMemory:
        has_memory = True

        def __call__(self, observations):
            return np.zeros(len(observations), np.int64)

    with pytest.raises(ValueError, match="policy: got one with a memory"):
        fitted_q_evaluation(WithMemory(), environment_spec, episodes)
    several = environment_spec._replace(actions=specs.BoundedArray((2,), np.int64, 0, 3))
    with pytest.raises(ValueError, match="action"):
        fitted_q_evaluation(lambda observations: observations, several, episodes)
