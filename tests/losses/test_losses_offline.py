"""Losses of agents that learn from data alone, beside other ways to compute them."""

import numpy as np
import pytest
import torch
from scipy import optimize

from framework import losses

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.7, 0.95])
def test_the_minimum_of_the_expectile_loss_balances_what_is_above_and_below(expectile):
    """Newey and Powell: t E[(x - m)+] = (1 - t) E[(m - x)+]."""
    data = RNG.normal(size=200) ** 3
    loss = lambda m: float(losses.expectile_loss(torch.tensor(data - m), expectile).mean())  # noqa: E731
    found = optimize.minimize_scalar(loss, bounds=(data.min(), data.max()), options={"xatol": 1e-9}).x
    above, below = np.maximum(data - found, 0).mean(), np.maximum(found - data, 0).mean()
    assert expectile * above == pytest.approx((1 - expectile) * below, rel=1e-4)
    if expectile == 0.5:
        assert found == pytest.approx(data.mean(), abs=1e-5)


def test_the_conservative_penalty_is_the_negative_likelihood_of_a_softmax():
    values, actions = torch.tensor(RNG.normal(size=(4, 3))), torch.tensor([0, 2, 1, 1])
    taken = values.gather(1, actions.unsqueeze(1)).squeeze(1)
    found = losses.conservative_penalty(values, taken)
    expected = torch.nn.functional.cross_entropy(values, actions, reduction="none")
    torch.testing.assert_close(found, expected)
    values[:, 1] = torch.finfo(values.dtype).min  # An illegal action.
    two = torch.nn.functional.cross_entropy(values[:2, [0, 2]], torch.tensor([0, 1]), reduction="none")
    torch.testing.assert_close(losses.conservative_penalty(values, taken)[:2], two)


def test_calibrated_values_are_not_below_the_return_and_no_gradient_presses_those_that_are():
    values, returns = torch.tensor([[[1.0, -2.0], [3.0, 0.5]]], requires_grad=True), torch.tensor([0.0, 2.0])
    found = losses.calibrated_values(values, returns)
    assert found.tolist() == [[[1.0, 0.0], [3.0, 2.0]]]
    (gradient,) = torch.autograd.grad(found.sum(), values)
    assert gradient.tolist() == [[[1.0, 0.0], [1.0, 0.0]]]


def test_the_sampled_penalty_is_the_integral_over_actions():
    """Values are 2 b, half of the actions are not uniform, and the integral of exp(2 b) is sinh(2)."""
    random = np.random.default_rng(0)
    uniform, other = random.uniform(-1, 1, 40_000), 2 * random.beta(3, 2, 40_000) - 1
    of_other = ((1 + other) / 2) ** 2 * ((1 - other) / 2) * 12 / 2  # The density of this beta distribution.
    actions = torch.tensor(np.concatenate([uniform, other]))
    log_densities = torch.tensor(np.log(np.concatenate([np.full(40_000, 0.5), of_other])))
    taken = torch.tensor([0.5, -0.5]).double()
    found = losses.sampled_conservative_penalty(2 * actions.expand(2, -1), log_densities, taken)
    np.testing.assert_allclose(found, np.log(np.sinh(2.0)) - taken, atol=0.03)


def test_gradients_are_compared_in_pairs():
    gradients = torch.tensor(np.random.default_rng(1).normal(size=(4, 5, 3)))
    unit = gradients / gradients.norm(dim=-1, keepdim=True)
    cosines = torch.einsum("ind,jnd->nij", unit, unit) * (1 - torch.eye(4))  # The authors' code.
    torch.testing.assert_close(losses.gradient_similarity(gradients), cosines.sum((1, 2)) / 3)
    one = gradients[:1].expand(4, -1, -1)
    torch.testing.assert_close(losses.gradient_similarity(one), torch.full((5,), 4.0).double())
    assert losses.gradient_similarity(torch.zeros(2, 1, 3)).item() == 0
