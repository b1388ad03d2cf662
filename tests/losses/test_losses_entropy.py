"""Entropies and divergences against torch.distributions, Monte Carlo and numerical integration."""

import math

import numpy as np
import pytest
import torch
from torch import distributions as td

from framework import losses
from framework.losses.entropy import log_one_minus_tanh_squared

generator = torch.Generator().manual_seed(11)
LOGITS = torch.randn(4, 3, 7, generator=generator, dtype=torch.float64) * 2
OTHER = torch.randn(4, 3, 7, generator=generator, dtype=torch.float64)
LEGAL = torch.rand(4, 3, 7, generator=generator) < 0.6
LEGAL[..., 0] = True


def test_categorical():
    expected = td.Categorical(logits=LOGITS).entropy()
    np.testing.assert_allclose(losses.categorical_entropy(LOGITS), expected)
    kl = td.kl_divergence(td.Categorical(logits=LOGITS), td.Categorical(logits=OTHER))
    np.testing.assert_allclose(losses.categorical_kl(LOGITS, OTHER), kl)


def test_masked_categorical_is_that_of_the_legal_actions_alone():
    entropy = losses.categorical_entropy(LOGITS, LEGAL)
    kl = losses.categorical_kl(LOGITS, OTHER, LEGAL)
    for index in np.ndindex(4, 3):
        kept = LEGAL[index]
        alone = td.Categorical(logits=LOGITS[index][kept])
        other = td.Categorical(logits=OTHER[index][kept])
        assert entropy[index].item() == pytest.approx(alone.entropy().item())
        assert kl[index].item() == pytest.approx(td.kl_divergence(alone, other).item(), abs=1e-9)


def test_an_illegal_action_gets_no_gradient_and_one_legal_action_no_entropy():
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(losses.categorical_entropy(logits, LEGAL).sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient[~LEGAL] == 0).all()
    only = torch.zeros(7)
    only[2] = 1
    assert losses.categorical_entropy(LOGITS[0, 0], only).item() == 0.0


def test_multi_discrete_is_the_sum_of_its_choices():
    expected = (
        td.Categorical(logits=LOGITS[..., :4]).entropy() + td.Categorical(logits=LOGITS[..., 4:]).entropy()
    )
    np.testing.assert_allclose(losses.multi_discrete_entropy(LOGITS, (4, 3)), expected)


def test_gaussian():
    mean, log_std, other_mean, other_log_std = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    this = td.Independent(td.Normal(mean, log_std.exp()), 1)
    other = td.Independent(td.Normal(other_mean, other_log_std.exp()), 1)
    np.testing.assert_allclose(losses.gaussian_entropy(log_std), this.entropy())
    expected = td.kl_divergence(this, other)
    np.testing.assert_allclose(losses.gaussian_kl(mean, log_std, other_mean, other_log_std), expected)


@pytest.mark.parametrize("mean, std", [(0.0, 0.1), (0.5, 0.5), (-1.0, 1.0), (2.0, 1.5)])
def test_squashed_gaussian_against_integration_and_monte_carlo(mean, std):
    entropy = losses.squashed_gaussian_entropy(
        torch.tensor([mean], dtype=torch.float64), torch.tensor([math.log(std)], dtype=torch.float64)
    ).item()
    # -integral of p log p over the Gaussian's x, the density of tanh(x) being that of x over 1 - tanh(x)^2.
    x = np.linspace(mean - 12 * std, mean + 12 * std, 200_001)
    log_density = -0.5 * ((x - mean) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi))
    log_squashed = log_density - np.log(1.0 / np.cosh(np.clip(x, -300, 300)) ** 2)
    integral = -np.sum(np.exp(log_density) * log_squashed) * (x[1] - x[0])
    assert entropy == pytest.approx(integral, abs=2e-3)
    samples = td.TransformedDistribution(td.Normal(mean, std), td.TanhTransform(cache_size=1))
    torch.manual_seed(0)
    drawn = samples.sample((40_000,)).double()
    inside = drawn[drawn.abs() < 1]
    estimate = -samples.log_prob(inside).mean().item()
    assert entropy == pytest.approx(estimate, abs=0.05)


def test_log_one_minus_tanh_squared_is_exact_where_tanh_is_1():
    x = torch.tensor([0.0, 1.0, -3.0, 20.0, -60.0], dtype=torch.float64)
    assert log_one_minus_tanh_squared(x[:3]).tolist() == pytest.approx(
        torch.log(1 - x[:3].tanh() ** 2).tolist()
    )
    assert log_one_minus_tanh_squared(x[3:]).tolist() == pytest.approx(
        [2 * math.log(2) - 40, 2 * math.log(2) - 120]
    )
