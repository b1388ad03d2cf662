"""Losses of deterministic policies: worked by hand, against loops, and against the chain rule."""

import math

import numpy as np
import pytest
import torch

from framework import losses


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_clipped_double_q_by_hand(garbage):
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    # Running, truncated (the discount stays) and terminated (what follows does not count).
    discounts = torch.tensor([0.5, 0.9, 0.0])
    next_values = torch.tensor([[10.0, 30.0, garbage], [20.0, 20.0, garbage]], requires_grad=True)
    errors = losses.clipped_double_q_errors(values, torch.tensor([1.0, 2.0, 7.0]), discounts, next_values)
    # Targets: 1 + 0.5 * 10, 2 + 0.9 * 20, 7.
    assert errors.tolist() == [[5.0, 18.0, 4.0], [2.0, 15.0, 1.0]]
    errors.sum().backward()
    assert values.grad.tolist() == [[-1.0] * 3] * 2 and next_values.grad is None


def test_clipped_double_q_refuses_what_would_broadcast():
    two, one = torch.zeros(2, 3), torch.zeros(3)
    for bad in ((two, one, one, one), (two, one, one, two[:1]), (two, one[:1], one[:1], two), (one,) * 4):
        with pytest.raises(ValueError, match="shapes: got"):
            losses.clipped_double_q_errors(*bad)


def test_smoothed_actions_by_hand():
    actions = torch.tensor([[0.0, 0.9, -0.9, 0.2]])
    noise = torch.tensor([[1.0, 1.0, -10.0, 10.0]])
    smoothed = losses.smoothed_actions(actions, noise, std=0.2, clip=0.5)
    torch.testing.assert_close(smoothed, torch.tensor([[0.2, 1.0, -1.0, 0.7]]))
    assert torch.equal(losses.smoothed_actions(actions, noise, std=0.0, clip=0.5), actions)
    with pytest.raises(ValueError, match="shapes: got"):
        losses.smoothed_actions(actions, noise[0], 0.2, 0.5)


def test_the_policys_gradient_is_the_values_slope_times_that_of_the_policy(random):
    """Silver et al. (2014), equation 9, with a value whose slope is known: q(o, a) = -(a - o)^2."""
    observations, weight = torch.tensor(random.normal(size=8)), torch.tensor(0.3, requires_grad=True)
    actions = weight * observations
    loss = losses.deterministic_policy_loss(-((actions - observations) ** 2))
    loss.backward()
    slopes = -2.0 * (0.3 * observations - observations)
    assert weight.grad.item() == pytest.approx(-(slopes * observations).mean().item())
