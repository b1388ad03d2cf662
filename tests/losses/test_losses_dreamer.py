"""The math of DreamerV3 against loops in NumPy, and against numbers by hand."""

import numpy as np
import pytest
import torch

from framework import losses


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 0.0), (np.e - 1, 1.0), (1 - np.e, -1.0), (1e6, 13.815512)]
)
def test_symlog_and_its_inverse(value, expected):
    value = torch.tensor(value, dtype=torch.float64)
    assert losses.symlog(value).item() == pytest.approx(expected, rel=1e-6)
    assert losses.symexp(losses.symlog(value)).item() == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.parametrize("count", [4, 5, 255])
def test_bins_are_symmetric_and_increase(count):
    bins = losses.symexp_bins(count)
    assert len(bins) == count and (bins.diff() > 0).all()
    torch.testing.assert_close(bins, -bins.flip(0), rtol=0, atol=0)
    assert bins[-1].item() == pytest.approx(np.expm1(20.0), rel=1e-5)
    assert losses.two_hot_mean(torch.zeros(3, count), bins).tolist() == [0.0] * 3


def test_two_hot_loss_and_mean_against_a_loop():
    random = np.random.default_rng(0)
    bins = np.array([-4.0, -1.0, 0.0, 1.0, 4.0], np.float32)
    targets = np.array([[-9.0, -4.0, -2.0, 0.0], [0.25, 1.0, 3.7, 9.0]], np.float32)
    logits = random.normal(size=(2, 4, 5)).astype(np.float32)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.zeros((2, 4))
    for place in np.ndindex(2, 4):
        target = np.clip(targets[place], bins[0], bins[-1])
        for i, each in enumerate(
            bins
        ):  # A hat of each bin, as wide as the distance to the next on either side.
            inner = i + 1 if target > each else i - 1
            weight = 1.0 if target == each else 0.0
            if target != each and abs(target - each) < abs(bins[inner] - each):
                weight = 1.0 - abs(target - each) / abs(bins[inner] - each)
            expected[place] -= weight * log_probs[(*place, i)]
    logits, targets, bins = map(torch.tensor, (logits, targets, bins))
    np.testing.assert_allclose(losses.two_hot_loss(logits, targets, bins).numpy(), expected, rtol=1e-5)
    mean = (np.exp(log_probs) * bins.numpy()).sum(-1)
    np.testing.assert_allclose(losses.two_hot_mean(logits, bins).numpy(), mean, rtol=1e-4, atol=1e-6)
    even = losses.two_hot_mean(logits[..., :4], torch.tensor([-4.0, -1.0, 1.0, 4.0]))
    expected = (logits[..., :4].softmax(-1) * torch.tensor([-4.0, -1.0, 1.0, 4.0])).sum(-1)
    torch.testing.assert_close(even, expected)


def test_the_two_hot_code_has_the_target_as_its_mean():
    bins, logits = losses.symexp_bins(41, 6.0).double(), torch.zeros(3, 41).double().requires_grad_()
    targets = torch.tensor([-30.0, 0.1, 390.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(losses.two_hot_loss(logits, targets, bins).sum(), logits)
    code = 1 / 41 - gradient
    assert (code.abs() > 1e-9).sum(-1).tolist() == [2, 2, 2]
    torch.testing.assert_close((code * bins).sum(-1), targets)


def test_samples_have_the_probabilities_of_the_mixture_and_their_gradient():
    logits = torch.tensor([2.0, 0.0, -30.0], requires_grad=True)
    probabilities = losses.unimix(logits, 0.3)
    softmax = np.exp([2.0, 0.0, -30.0]) / np.exp([2.0, 0.0, -30.0]).sum()
    np.testing.assert_allclose(probabilities.detach().numpy(), 0.7 * softmax + 0.1, rtol=1e-6)
    noise = losses.race_noise(torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0)))
    samples = losses.straight_through_sample(probabilities.expand(20_000, 3), noise)
    assert set(samples.detach().unique().tolist()) == {0.0, 1.0} and (samples.sum(-1) == 1).all()
    np.testing.assert_allclose(samples.detach().mean(0), probabilities.detach(), atol=0.01)
    (gradient,) = torch.autograd.grad(samples[0] @ torch.tensor([1.0, 2.0, 3.0]), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(probabilities @ torch.tensor([1.0, 2.0, 3.0]), logits)
    torch.testing.assert_close(gradient, expected)
    most_likely = losses.straight_through_sample(probabilities.detach(), torch.ones(3))
    assert most_likely.tolist() == [1.0, 0.0, 0.0]


def test_the_noise_is_exponential_gumbel_and_never_nan():
    noise = losses.race_noise(torch.tensor([0.0, 0.5, 1 - 2**-24]))
    assert noise[0] == 0 and noise[1] == pytest.approx(1 / np.log(2)) and torch.isfinite(noise[2])


def test_balanced_kl_against_a_loop():
    random = np.random.default_rng(1)
    posterior, prior = (random.dirichlet(np.ones(3), size=(4, 2)) for _ in range(2))
    expected = (posterior * np.log(posterior / prior)).sum((-1, -2))
    free = float(np.sort(expected)[1]) + 1e-6  # Two of four are below.
    p, q = (torch.tensor(each, requires_grad=True) for each in (posterior, prior))
    dynamics, representation = losses.balanced_kl(p, q, free)
    for loss, moved, held in ((dynamics, q, p), (representation, p, q)):
        np.testing.assert_allclose(loss.detach().numpy(), np.maximum(expected, free), rtol=1e-6)
        gradients = torch.autograd.grad(loss.sum(), (moved, held), allow_unused=True, retain_graph=True)
        assert gradients[1] is None
        rows = gradients[0].abs().sum((-1, -2)) > 0
        assert rows.tolist() == (expected > free).tolist()


def test_the_range_of_returns_is_an_average_of_percentiles():
    returns, before = torch.arange(101.0).reshape(1, 101), torch.tensor([-1.0, 3.0])
    after = losses.percentile_range(before, returns, rate=0.1)
    torch.testing.assert_close(after, torch.tensor([0.9 * -1 + 0.1 * 5, 0.9 * 3 + 0.1 * 95]))
