"""The math of DreamerV3 (Hafner et al., 2025, "Mastering diverse control tasks through world models")."""

from __future__ import annotations

import torch

from framework.losses.entropy import categorical_kl
from framework.losses.masking import check_alike


def symlog(values: torch.Tensor) -> torch.Tensor:
    """sign(x) log(1 + |x|), elementwise: the identity near 0, a logarithm far from it."""
    return values.sign() * values.abs().log1p()


def symexp(values: torch.Tensor) -> torch.Tensor:
    """sign(x) (exp(|x|) - 1), elementwise: the inverse of `symlog`."""
    return values.sign() * values.abs().expm1()


def symexp_bins(count: int, limit: float = 20.0) -> torch.Tensor:
    """The `count` values of a two-hot distribution: symexp of equal steps from -limit to limit.

    They are symmetric exactly, so that the mean of a uniform distribution is 0.
    """
    low = symexp(torch.linspace(-limit, limit, count))[: count // 2]
    return torch.cat([low, low.new_zeros(count % 2), -low.flip(0)])


def two_hot_loss(logits: torch.Tensor, targets: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """Cross entropy `[...]` of softmax(`logits [..., K]`) with the two-hot code of `targets [...]`.

    The code divides the probability 1 between the two bins next to a target, and the nearer one gets more
    (equation 9). Targets beyond the first or the last bin go to that bin. They get no gradient.

    Args:
      bins: `[K]` values, increasing; K is at least 2.
    """
    check_alike(targets=targets, logits=logits[..., 0])
    targets = targets.detach().to(bins.dtype).contiguous()
    above = torch.searchsorted(bins, targets, right=True).clamp(1, len(bins) - 1)
    low, high = bins[above - 1], bins[above]
    upper = ((targets - low) / (high - low)).clamp(0.0, 1.0)
    index = torch.stack([above - 1, above], -1)
    chosen = logits.gather(-1, index)
    return logits.logsumexp(-1) - torch.lerp(chosen[..., 0], chosen[..., 1], upper.to(logits.dtype))


def two_hot_mean(logits: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """The mean `[...]` of softmax(`logits [..., K]`) over bins that are symmetric around 0.

    Opposite bins are added first. The bins reach 10^8: otherwise rounding would hide the small ones.
    """
    weighted = logits.softmax(-1) * bins
    half = len(bins) // 2
    mean = (weighted[..., :half].flip(-1) + weighted[..., -half:]).sum(-1)
    return mean + weighted[..., half] if len(bins) % 2 else mean


def unimix(logits: torch.Tensor, uniform: float) -> torch.Tensor:
    """Probabilities `[..., C]` of a mixture: `uniform` of the uniform distribution, the rest softmax(logits).

    No class has a probability near 0, so divergences stay bounded.
    """
    return logits.softmax(-1) * (1.0 - uniform) + uniform / logits.shape[-1]


def straight_through_sample(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A one-hot sample `[..., C]` with the gradient of the probabilities (Bengio et al., 2013).

    Args:
      probabilities: `[..., C]`.
      noise: `[..., C]` from `race_noise`; ones give the most likely class.
    """
    index = (probabilities.detach() * noise).argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(noise).scatter_(-1, index, 1.0)
    if not probabilities.requires_grad:
        return one_hot
    return one_hot + (probabilities - probabilities.detach())


def race_noise(uniform: torch.Tensor) -> torch.Tensor:
    """-1 / log u of numbers in [0, 1). Its logarithm is standard Gumbel noise.

    The class with the largest product of probability and noise is a sample: the first to arrive, if each
    class takes exponential time at the rate of its probability.
    """
    return uniform.log().reciprocal().neg()


def balanced_kl(
    posterior: torch.Tensor, prior: torch.Tensor, free_nats: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two losses of the divergence of posterior and prior (equation 5), both `[...]`, in nats.

    The first moves the prior (dynamics), the second the posterior (representation). Each is at least
    `free_nats`, without a gradient there.

    Args:
      posterior: `[..., S, C]` probabilities of S independent choices, whose divergences are added.
      prior: the same of the prediction.
    """
    check_alike(posterior=posterior, prior=prior)
    posterior, prior = (each.clamp(min=torch.finfo(each.dtype).tiny).log() for each in (posterior, prior))
    dynamics = categorical_kl(posterior.detach(), prior).sum(-1)
    representation = categorical_kl(posterior, prior.detach()).sum(-1)
    return dynamics.clamp(min=free_nats), representation.clamp(min=free_nats)


def percentile_range(
    before: torch.Tensor, returns: torch.Tensor, rate: float = 0.01, low: float = 0.05, high: float = 0.95
) -> torch.Tensor:
    """A running range `[2]` of returns: their 5th and 95th percentiles, averaged (equation 7).

    Args:
      before: `[2]`, the range so far.
      returns: any shape.
      rate: weight of these returns.
      low: the lower percentile, as a fraction.
      high: the upper one.
    """
    with torch.no_grad():
        # Two numbers from a list would be copied to a GPU, which a CUDA graph cannot do.
        levels = torch.linspace(low, high, 2, dtype=returns.dtype, device=returns.device)
        return torch.lerp(before, torch.quantile(returns.flatten(), levels), rate)
