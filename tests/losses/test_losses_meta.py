"""MAML's inner step and linear baseline against values worked by hand and other formulations."""

import functools

import numpy as np
import pytest
import torch
from torch.func import functional_call

from framework import losses
from framework.networks import MLP, Categorical

GENERATOR = torch.Generator().manual_seed(5)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_second_order_gradient_against_finite_differences(num_steps):
    network = MLP(3, (5,), 4, activation="tanh").double()
    tasks, rows = 2, 6
    observations, old = random(tasks, 2, rows, 3), random(tasks, 2, rows)
    actions = torch.randint(4, (tasks, 2, rows), generator=GENERATOR)
    advantages = random(tasks, 2, rows)

    def loss(parameters, task, part):
        policy = Categorical(functional_call(network, parameters, (observations[task, part],)))
        log_probs = policy.log_prob(actions[task, part])
        return losses.likelihood_ratio_loss(log_probs, old[task, part] - 1.5, advantages[task, part])

    def outer(*flat):
        parameters = dict(zip(dict(network.named_parameters()), flat, strict=True))
        total = 0.0
        for task in range(tasks):
            adapted = parameters
            for _ in range(num_steps):
                adapted = losses.inner_step(adapted, functools.partial(loss, task=task, part=0), 0.3)
            total = total + loss(adapted, task, 1)
        return total

    # gradcheck compares with central differences, in float64.
    assert torch.autograd.gradcheck(outer, tuple(network.parameters()))


def test_the_ratio_loss_has_the_policy_gradient_and_the_curvature_of_the_expected_return():
    """Two actions with returns 1 and 0, pi(0) = sigmoid(theta): J = sigmoid, J' = p q, J'' = p q (q - p)."""
    advantages = torch.tensor([1.0, 0.0], dtype=torch.float64)
    theta = torch.tensor(0.4, dtype=torch.float64)
    p = torch.sigmoid(theta)
    weights = torch.stack([p, 1 - p])  # the exact expectation: each action once, by its probability

    def log_probs(x):
        return torch.stack([torch.nn.functional.logsigmoid(x), torch.nn.functional.logsigmoid(-x)])

    def ratio(x):
        each = [
            losses.likelihood_ratio_loss(log_probs(x)[i], log_probs(theta)[i], advantages[i]) for i in (0, 1)
        ]
        return (weights * torch.stack(each)).sum()

    def plain(x):
        each = [losses.policy_gradient_loss(log_probs(x)[i], advantages[i]) for i in (0, 1)]
        return (weights * torch.stack(each)).sum()

    slope, curve = torch.func.grad(ratio), torch.func.grad(torch.func.grad(ratio))
    assert slope(theta).item() == pytest.approx(-(p * (1 - p)).item())
    assert slope(theta).item() == pytest.approx(torch.func.grad(plain)(theta).item())
    assert curve(theta).item() == pytest.approx(-(p * (1 - p) * (1 - 2 * p)).item())
    assert torch.func.grad(torch.func.grad(plain))(theta).item() != pytest.approx(curve(theta).item())


def test_episode_times():
    starts = torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 1, 1, 0]])
    assert losses.episode_times(starts).tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]]


def rows_of_episodes():
    """Two envs: one episode of 4 steps and a cut one; one of 2 steps, then one of 3 that is truncated."""
    starts = torch.tensor([[1.0, 0, 0, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0, 0]])
    mask = torch.tensor([[1.0, 1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1, 0]])
    discounts = 0.9 * mask.double()
    discounts[0, 3] = discounts[1, 1] = 0.0  # terminations
    return starts, mask, discounts


def test_the_linear_baseline_finds_values_that_are_linear_in_its_features():
    starts, mask, discounts = rows_of_episodes()
    observations, times = random(2, 7, 1), losses.episode_times(starts).double()
    values = 2.0 - 3.0 * observations[..., 0] + 0.5 * observations[..., 0] ** 2 + 7.0 * times / 100.0
    # Rewards for which these values are exact, with and without bootstrapping.
    rewards = (values - discounts * values.roll(-1, 1)) * mask
    fitted = losses.linear_baseline(observations, times, rewards, discounts, mask, ridge=1e-12)
    real = mask > 0
    real[:, -1] = True  # to bootstrap from
    np.testing.assert_allclose(fitted[real], values[real], atol=1e-3)
    advantages = losses.generalized_advantages(rewards, discounts, fitted, mask, 1.0)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-3)


def test_the_linear_baseline_of_terminated_episodes_is_the_regression_on_returns():
    """Duan et al.'s fit, by numpy's least squares on the sums of rewards."""
    observations, rewards = random(6, 5, 2), random(6, 5)
    starts = torch.zeros(6, 5)
    starts[:, 0] = 1.0
    mask = torch.ones(6, 5)
    mask[:, -1] = 0.0
    discounts = 0.9 * mask.double()
    discounts[:, 3] = 0.0
    times = losses.episode_times(starts)
    fitted = losses.linear_baseline(observations, times, rewards, discounts, mask, ridge=0.0)

    returns = np.zeros((6, 4))
    for t in (3, 2, 1, 0):
        returns[:, t] = rewards[:, t].numpy() + (0.9 * returns[:, t + 1] if t < 3 else 0.0)
    o, t = observations[:, :4].numpy(), np.broadcast_to(np.arange(4.0)[:, None] / 100, (6, 4, 1))
    features = np.concatenate([o, o**2, t, t**2, t**3, np.ones_like(t)], -1).reshape(24, -1)
    weights, *_ = np.linalg.lstsq(features, returns.ravel(), rcond=None)
    np.testing.assert_allclose(fitted[:, :4].ravel(), features @ weights, atol=1e-5)
