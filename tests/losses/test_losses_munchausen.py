"""Munchausen's rewards and targets against values worked by hand, a loop, and the log-sum-exp form."""

import math

import numpy as np
import pytest
import torch

from framework import losses

ALPHA, TAU, CLIP = 0.9, 0.5, 1.0


@pytest.fixture
def random():
    return np.random.default_rng(3)


def normal(random, *shape):
    return torch.tensor(random.normal(size=shape))


def test_rewards_by_hand():
    # Values 0 and tau * ln 3 give the policy (1/4, 3/4). A gap of 100 tau gives a log-policy below the clip.
    values = torch.tensor([[0.0, TAU * math.log(3)], [0.0, TAU * math.log(3)], [0.0, 100 * TAU]])
    rewards = losses.munchausen_rewards(values, torch.tensor([0, 1, 0]), ALPHA, TAU, CLIP)
    expected = [ALPHA * TAU * math.log(1 / 4), ALPHA * TAU * math.log(3 / 4), -ALPHA * CLIP]
    assert rewards.tolist() == pytest.approx(expected, rel=1e-5)


def test_next_returns_against_a_loop(random):
    values, returns = normal(random, 2, 3), normal(random, 2, 3, 5)
    made = losses.munchausen_next_values(values, TAU, returns)
    for n in range(2):
        weights = np.exp(values[n].numpy() / TAU)
        policy = weights / weights.sum()
        for k in range(5):
            expected = sum(
                policy[a] * (returns[n, a, k].item() - TAU * math.log(policy[a])) for a in range(3)
            )
            assert made[n, k].item() == pytest.approx(expected)
    # Their mean is the value of the mean returns.
    soft = losses.munchausen_next_values(returns.mean(-1), TAU)
    torch.testing.assert_close(losses.munchausen_next_values(returns.mean(-1), TAU, returns).mean(-1), soft)


def test_errors_against_a_loop(random):
    values, target_values, next_values = normal(random, 3, 4, 3)
    actions, rewards = torch.tensor([0, 2, 1, 2]), normal(random, 4)
    discounts = torch.tensor([0.9, 0.0, 0.5, 0.9], dtype=torch.float64)
    next_values[1] = math.nan  # Behind a termination.
    errors = losses.munchausen_errors(
        values, actions, rewards, discounts, next_values, target_values, ALPHA, TAU, CLIP
    )
    for n, action in enumerate(actions.tolist()):
        weights = np.exp(target_values[n].numpy() / TAU)
        bonus = ALPHA * max(-CLIP, TAU * math.log(weights[action] / weights.sum()))
        target = rewards[n].item() + bonus
        if discounts[n] > 0:
            target += discounts[n].item() * TAU * math.log(np.exp(next_values[n].numpy() / TAU).sum())
        assert errors[n].item() == pytest.approx(target - values[n, action].item())


def test_at_a_low_temperature_without_scale_errors_are_those_of_q_learning(random):
    values, target_values, next_values = normal(random, 3, 8, 3)
    actions, rewards, discounts = torch.arange(8) % 3, normal(random, 8), torch.full((8,), 0.9)
    errors = losses.munchausen_errors(
        values, actions, rewards, discounts, next_values, target_values, 0.0, 1e-6, CLIP
    )
    expected = losses.q_learning_errors(values, actions, rewards, discounts, next_values)
    torch.testing.assert_close(errors, expected, atol=1e-4, rtol=0)


def test_the_target_has_no_gradient(random):
    values = normal(random, 4, 3).requires_grad_()
    actions, rewards, discounts = torch.tensor([0, 1, 2, 0]), torch.zeros(4), torch.full((4,), 0.9)
    losses.munchausen_errors(
        values, actions, rewards, discounts, values, values, ALPHA, TAU, CLIP
    ).sum().backward()
    expected = torch.zeros(4, 3, dtype=torch.float64)
    expected[range(4), actions] = -1.0
    assert torch.equal(values.grad, expected)


def test_shapes_that_would_broadcast_are_errors():
    values, column = torch.zeros(4, 3), torch.zeros(4, 1)
    with pytest.raises(ValueError, match="shapes: got"):
        losses.munchausen_rewards(values, column, ALPHA, TAU, CLIP)
    with pytest.raises(ValueError, match="shapes: got"):
        losses.munchausen_next_values(values, TAU, torch.zeros(4, 5, 3))
    with pytest.raises(ValueError, match="shapes: got"):
        losses.munchausen_errors(
            values, torch.zeros(4), column, torch.zeros(4), values, values, ALPHA, TAU, CLIP
        )
