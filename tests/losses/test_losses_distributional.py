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


def test_quantile_huber_gives_no_gradient_to_the_targets_and_refuses_what_would_broadcast():
    quantiles, targets = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    losses.quantile_huber(quantiles, torch.full((2, 3), 0.5), targets).sum().backward()
    assert targets.grad is None and (quantiles.grad < 0).all()
    for bad in ((quantiles, torch.full((3,), 0.5), targets), (quantiles, quantiles, targets[:1])):
        with pytest.raises(ValueError, match="shapes: got"):
            losses.quantile_huber(*bad)


def test_truncation_drops_the_largest_of_all_critics_together():
    quantiles = torch.tensor([[[5.0, 1.0, 9.0]], [[2.0, 7.0, 3.0]]])
    assert losses.truncated_quantiles(quantiles, 1).tolist() == [[1.0, 2.0, 3.0, 5.0]]
    assert losses.truncated_quantiles(quantiles, 0).tolist() == [[1.0, 2.0, 3.0, 5.0, 7.0, 9.0]]


@pytest.mark.parametrize("low, high, count", [(-10.0, 10.0, 51), (0.0, 100.0, 21), (-1.0, 0.5, 2)])
def test_the_projection_against_its_equation(random, low, high, count):
    """Equation 7 of the paper: a triangle around each atom."""
    atoms = torch.linspace(low, high, count, dtype=torch.float64)
    probabilities = torch.tensor(random.dirichlet(np.ones(count), size=8))
    rewards = torch.tensor(random.normal(size=8) * 0.1 * (high - low))
    discounts = torch.tensor(random.choice([0.0, 0.5, 0.99], size=8))
    values = (rewards[:, None] + discounts[:, None] * atoms).clamp(low, high)
    distances = (values[:, None, :] - atoms[:, None]).abs() / ((high - low) / (count - 1))  # [N, K, K]
    expected = ((1.0 - distances).clamp(0.0, 1.0) * probabilities[:, None, :]).sum(-1)
    made = losses.categorical_projection(atoms, probabilities, rewards, discounts)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(made.sum(-1), torch.ones(8, dtype=torch.float64))
    # The mean is that of the values, up to their limits.
    torch.testing.assert_close(made @ atoms, (probabilities * values).sum(-1))


def test_the_projection_ignores_what_follows_a_termination_and_refuses_what_would_broadcast():
    atoms, nothing = torch.linspace(-1, 1, 3), torch.full((1, 3), torch.nan)
    made = losses.categorical_projection(atoms, nothing, torch.ones(1), torch.zeros(1))
    torch.testing.assert_close(made, torch.tensor([[0.0, 0.0, 1.0]]))
    for bad in (
        (atoms[:2], nothing, torch.ones(1), torch.zeros(1)),
        (atoms, nothing, torch.ones(2), torch.zeros(2)),
        (atoms, nothing, torch.ones(1, 1), torch.zeros(1, 1)),
    ):
        with pytest.raises(ValueError, match="shapes: got"):
            losses.categorical_projection(*bad)


def test_the_cross_entropy_against_torchs_and_its_divergence(random):
    logits = torch.tensor(random.normal(size=(6, 5)), requires_grad=True)
    targets = torch.tensor(random.dirichlet(np.ones(5), size=6))
    targets[0] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    each, divergences = losses.categorical_cross_entropy(logits, targets.requires_grad_())
    torch.testing.assert_close(each, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    expected = torch.nn.functional.kl_div(logits.log_softmax(-1), targets, reduction="none").sum(-1)
    torch.testing.assert_close(divergences, expected.detach())
    each.sum().backward()
    torch.testing.assert_close(logits.grad, (logits.softmax(-1) - targets).detach())
    assert targets.grad is None and not divergences.requires_grad
    same = losses.categorical_cross_entropy(logits, logits.softmax(-1))
    assert same[1].max() < 1e-12
    with pytest.raises(ValueError, match="shapes: got"):
        losses.categorical_cross_entropy(logits, targets[:1])


def test_expected_returns_by_hand_also_of_bfloat16():
    atoms = torch.tensor([-1.0, 0.0, 4.0])
    logits = torch.tensor([[[0.5, 0.25, 0.25]], [[0.0, 0.0, 1.0]]]).log()
    assert losses.expected_returns(logits, atoms).tolist() == [[0.5], [4.0]]
    rounded = losses.expected_returns(logits.bfloat16(), atoms)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, torch.tensor([[0.5], [4.0]]), atol=0.02, rtol=0)
