"""Losses of distributions of the return, against loops, values worked by hand and what they estimate."""

import numpy as np
import pytest
import torch

from framework import losses


@pytest.fixture
def random():
    return np.random.default_rng(5)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_quantile_huber_against_a_loop(random, kappa):
    quantiles, targets = torch.tensor(random.normal(size=(2, 3))), torch.tensor(random.normal(size=(2, 4)))
    fractions = torch.tensor(random.random((2, 3)))
    made = losses.quantile_huber(quantiles, fractions, targets, kappa)
    for n in range(2):
        expected = 0.0
        for k in range(3):
            for j in range(4):
                error = (targets[n, j] - quantiles[n, k]).item()
                size = abs(error)
                if kappa > 0:
                    size = (0.5 * error**2 if size <= kappa else kappa * (size - 0.5 * kappa)) / kappa
                expected += abs(fractions[n, k].item() - (error < 0)) * size / 4
        assert made[n].item() == pytest.approx(expected)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_least_loss_is_at_the_quantile(random, fraction):
    samples = torch.tensor(random.exponential(size=401))
    estimates, targets = samples.unsqueeze(1), samples.expand(401, 401)
    each = losses.quantile_huber(estimates, torch.full_like(estimates, fraction), targets, kappa=0.0)
    assert samples[each.argmin()].item() == pytest.approx(torch.quantile(samples, fraction).item(), abs=0.02)


def test_quantile_huber_gives_no_gradient_to_the_targets_and_refuses_what_would_broadcast():
    quantiles, targets = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    losses.quantile_huber(quantiles, torch.full((2, 3), 0.5), targets).sum().backward()
    assert targets.grad is None and (quantiles.grad < 0).all()
    for bad in ((quantiles, torch.full((3,), 0.5), targets), (quantiles, quantiles, targets[:1])):
        with pytest.raises(ValueError, match="shapes: got"):
            losses.quantile_huber(*bad)
