"""Entropies and divergences against torch.distributions, Monte Carlo and numerical integration."""

import math
import re

import numpy as np
import pytest
import torch
from torch import distributions as td

from framework import losses, networks
from framework.losses.entropy import log_one_minus_tanh_squared

generator = torch.Generator().manual_seed(11)
LOGITS = torch.randn(4, 3, 7, generator=generator, dtype=torch.float64) * 2
OTHER = torch.randn(4, 3, 7, generator=generator, dtype=torch.float64)
LEGAL = torch.rand(4, 3, 7, generator=generator) < 0.6
LEGAL[..., 0] = True


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


def test_actions_at_minus_infinity_are_as_if_they_were_not_there():
    masked = LOGITS.masked_fill(~LEGAL, -math.inf).requires_grad_()
    other = OTHER.masked_fill(~LEGAL, -math.inf).requires_grad_()
    policy = networks.Categorical(masked)
    for result, expected in (
        (losses.categorical_entropy(masked), losses.categorical_entropy(LOGITS, LEGAL)),
        (policy.entropy(), losses.categorical_entropy(LOGITS, LEGAL)),
        (losses.categorical_kl(masked, other), losses.categorical_kl(LOGITS, OTHER, LEGAL)),
        (policy.kl(networks.Categorical(other)), losses.categorical_kl(LOGITS, OTHER, LEGAL)),
        (losses.categorical_kl(masked, OTHER), losses.categorical_kl(masked.clamp(min=-1e6), OTHER)),
        (
            losses.discrete_soft_value(OTHER, masked, 2.0),
            losses.discrete_soft_value(OTHER, masked.clamp(min=-1e6), 2.0),
        ),
    ):
        torch.testing.assert_close(result, expected)
        gradients = torch.autograd.grad(result.sum(), (masked, other), allow_unused=True, retain_graph=True)
        for gradient in gradients:
            assert gradient is None or (gradient.isfinite().all() and (gradient[~LEGAL] == 0).all())


def test_the_divergence_is_infinite_only_where_the_other_rules_out_what_this_takes():
    inf = math.inf
    this = torch.tensor([[0.0, 0.0, -inf], [0.0, -inf, -inf], [0.0, -1e9, 0.0]])
    other = torch.tensor([[0.0, -inf, 0.0], [0.0, 0.0, -inf], [0.0, -inf, 0.0]])
    assert losses.categorical_kl(this, other).tolist() == pytest.approx([inf, math.log(2), 0.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masks_fit_every_dtype(dtype):
    logits = torch.tensor([3.0, -2.0, 20.0, 20.0], dtype=dtype, requires_grad=True)
    legal = torch.tensor([1, 1, 0, 0])
    masked = losses.mask_logits(logits, legal)
    assert masked.dtype == dtype and masked.isfinite().all()
    assert masked.softmax(-1)[2:].tolist() == [0.0, 0.0]
    entropy = losses.categorical_entropy(logits, legal)
    assert entropy.item() == pytest.approx(
        td.Categorical(logits=torch.tensor([3.0, -2.0])).entropy().item(), abs=3e-3
    )
    (gradient,) = torch.autograd.grad(entropy, logits)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("shape", [(4, 1), (4,), (1, 5), (), (2, 4, 5)])
def test_a_mask_of_another_shape_is_named(shape):
    with pytest.raises(ValueError, match=rf"legal: got shape {re.escape(str(shape))}, expected \(4, 5\)"):
        losses.mask_logits(torch.zeros(4, 5), torch.ones(shape))


def test_multi_discrete_is_the_sum_of_its_choices():
    parts = [td.Categorical(logits=part) for part in LOGITS.split([4, 3], -1)]
    np.testing.assert_allclose(losses.multi_discrete_entropy(LOGITS, (4, 3)), sum(p.entropy() for p in parts))


def test_gaussian():
    mean, log_std, other_mean, other_log_std = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    this = td.Independent(td.Normal(mean, log_std.exp()), 1)
    other = td.Independent(td.Normal(other_mean, other_log_std.exp()), 1)
    np.testing.assert_allclose(losses.gaussian_entropy(log_std), this.entropy())
    expected = td.kl_divergence(this, other)
    np.testing.assert_allclose(losses.gaussian_kl(mean, log_std, other_mean, other_log_std), expected)


@pytest.mark.parametrize(
    "log_std, error", [(-5.0, 1e-6), (0.0, 1e-6), (1.0, 1e-6), (2.0, 1e-6), (3.0, 1e-3), (4.0, 0.03)]
)
@pytest.mark.parametrize("mean", [0.0, 0.3, -1.0, 5.0])
def test_squashed_gaussian_is_as_exact_as_it_says(mean, log_std, error):
    std = math.exp(log_std)

    def integrand(x):
        log_density = -0.5 * ((x - mean) / std) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        # 1 - tanh(x)^2 = 4 e^{-2|x|} / (1 + e^{-2|x|})^2
        log_slope = math.log(4) - 2 * np.abs(x) - 2 * np.log1p(np.exp(-2 * np.abs(x)))
        return -np.exp(log_density) * (log_density - log_slope)

    # Gauss-Legendre on short pieces, which are shorter around 0, where the slope of tanh bends.
    pieces = np.unique(
        np.concatenate([np.linspace(mean - 10 * std, mean + 10 * std, 201), np.linspace(-8, 8, 81)])
    )
    points, weights = np.polynomial.legendre.leggauss(12)
    middles, halves = (pieces[1:] + pieces[:-1]) / 2, np.diff(pieces) / 2
    integral = (integrand(middles[:, None] + halves[:, None] * points) * weights * halves[:, None]).sum()
    given = torch.tensor([[mean], [log_std]], dtype=torch.float64)
    assert losses.squashed_gaussian_entropy(*given).item() == pytest.approx(integral, abs=error, rel=0)
    if (mean, log_std) == (0.0, 2.0):
        assert integral == pytest.approx(-7.0743, abs=1e-4)
    if log_std <= 2.0:
        single = losses.squashed_gaussian_entropy(*given.float()).item()
        assert single == pytest.approx(integral, abs=1e-5, rel=0)


def test_log_one_minus_tanh_squared_is_exact_where_tanh_is_1():
    x = torch.tensor([0.0, 1.0, -3.0, 20.0, -60.0], dtype=torch.float64)
    assert log_one_minus_tanh_squared(x[:3]).tolist() == pytest.approx(
        torch.log(1 - x[:3].tanh() ** 2).tolist()
    )
    assert log_one_minus_tanh_squared(x[3:]).tolist() == pytest.approx(
        [2 * math.log(2) - 40, 2 * math.log(2) - 120]
    )
