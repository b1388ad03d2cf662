"""The losses of MPO against loops in NumPy, a one-dimensional search, and torch's distributions."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from framework import losses

N, S, D = 5, 7, 3


def draw(*shape, seed=0, scale=1.0):
    values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values


def test_the_weights_against_a_loop():
    values = draw(N, S, scale=3.0)
    weights = losses.mpo_weights(values, torch.tensor(2.0, requires_grad=True))
    assert not weights.requires_grad
    for row, given in zip(values.tolist(), weights.tolist(), strict=True):
        total = sum(math.exp(value / 2.0) for value in row)
        assert given == pytest.approx([math.exp(value / 2.0) / total for value in row])


def dual_in_numpy(values, temperature, epsilon):
    each = [math.log(np.mean([math.exp(value / temperature) for value in row])) for row in values.tolist()]
    return temperature * (epsilon + sum(each) / len(each))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_the_dual_of_the_temperature_and_its_gradient_against_numpy(temperature):
    values = draw(N, S)
    parameter = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    loss = losses.mpo_temperature_loss(values, parameter, 0.1)
    loss.backward()
    assert loss.item() == pytest.approx(dual_in_numpy(values, temperature, 0.1))
    step = 1e-6
    higher, lower = (dual_in_numpy(values, temperature + each, 0.1) for each in (step, -step))
    assert parameter.grad.item() == pytest.approx((higher - lower) / (2 * step), abs=1e-5)


def test_the_likelihood_against_a_loop():
    weights, log_probs = draw(N, S).softmax(-1).requires_grad_(), draw(N, S, seed=1).requires_grad_()
    loss = losses.mpo_likelihood_loss(weights, log_probs)
    pairs = zip(weights.flatten().tolist(), log_probs.flatten().tolist(), strict=True)
    expected = -sum(weight * log_prob for weight, log_prob in pairs) / N
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert weights.grad is None
    torch.testing.assert_close(log_probs.grad, -weights.detach() / N)


def test_the_two_divergences_are_torchs_and_have_one_gradient_each():
    old_mean, old_log_std, mean, log_std = (draw(N, D, seed=seed, scale=0.5) for seed in range(4))
    leaves = [each.requires_grad_() for each in (old_mean, old_log_std, mean, log_std)]
    of_mean, of_std = losses.decoupled_gaussian_kl(*leaves)
    old = Normal(old_mean, old_log_std.exp())
    torch.testing.assert_close(of_mean, kl_divergence(old, Normal(mean, old_log_std.exp())))
    torch.testing.assert_close(of_std, kl_divergence(old, Normal(old_mean, log_std.exp())))
    gradients = torch.autograd.grad(of_mean.sum(), leaves, allow_unused=True)
    assert [each is not None and bool(each.abs().min() > 0) for each in gradients] == [0, 0, 1, 0]
    gradients = torch.autograd.grad(of_std.sum(), leaves, allow_unused=True)
    assert [each is not None and bool(each.abs().min() > 0) for each in gradients] == [0, 0, 0, 1]


def test_a_constraint_against_a_loop_and_its_gradients():
    kl = draw(N, D).abs().requires_grad_()
    multiplier = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    penalty, of_multiplier = losses.kl_constraint(kl, multiplier, 0.4)
    means = kl.detach().numpy().mean(0).tolist()
    assert penalty.item() == pytest.approx(sum(m * k for m, k in zip([0.5, 2.0, 3.0], means, strict=True)))
    expected = sum(m * (0.4 - k) for m, k in zip([0.5, 2.0, 3.0], means, strict=True))
    assert of_multiplier.item() == pytest.approx(expected)
    (penalty + of_multiplier).backward()
    # Gradient descent makes a multiplier grow exactly where the mean divergence is above its bound.
    np.testing.assert_allclose(multiplier.grad.numpy(), [0.4 - k for k in means])
    torch.testing.assert_close(kl.grad, multiplier.detach().expand(N, D) / N)


def test_one_multiplier_for_all_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"multiplier: got shape \(\), expected \(3,\)"):
        losses.kl_constraint(draw(N, D), torch.tensor(1.0), 0.1)
