"""Entropies and divergences of the policies' distributions, elementwise, with gradients. In nats."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

# Logit of an action that must not be taken. Finite, so that gradients are; its probability is 0 in float32.
ILLEGAL_LOGIT = -1e9


def mask_logits(logits: torch.Tensor, legal: torch.Tensor | None) -> torch.Tensor:
    """Logits ``[..., A]`` with those of illegal actions (``legal`` 0 or False) at ``ILLEGAL_LOGIT``."""
    if legal is None:
        return logits
    return torch.where(legal > 0, logits, torch.full_like(logits, ILLEGAL_LOGIT))


def categorical_entropy(logits: torch.Tensor, legal: torch.Tensor | None = None) -> torch.Tensor:
    """Entropy of softmax(logits): ``[..., A]`` to ``[...]``, over the legal actions only."""
    log_probs = mask_logits(logits, legal).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def categorical_kl(
    logits: torch.Tensor, other_logits: torch.Tensor, legal: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(softmax(logits) || softmax(other_logits)): ``[..., A]`` to ``[...]``."""
    log_probs = mask_logits(logits, legal).log_softmax(-1)
    other = mask_logits(other_logits, legal).log_softmax(-1)
    return (log_probs.exp() * (log_probs - other)).sum(-1)


def multi_discrete_entropy(
    logits: torch.Tensor, sizes: Sequence[int], legal: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum of the entropies of independent choices: ``[..., sum(sizes)]`` to ``[...]``."""
    parts = mask_logits(logits, legal).split(list(sizes), -1)
    return torch.stack([categorical_entropy(part) for part in parts]).sum(0)


def gaussian_entropy(log_std: torch.Tensor) -> torch.Tensor:
    """Entropy of a diagonal Gaussian: log standard deviations ``[..., D]`` to ``[...]``."""
    return (log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1)


def gaussian_kl(
    mean: torch.Tensor, log_std: torch.Tensor, other_mean: torch.Tensor, other_log_std: torch.Tensor
) -> torch.Tensor:
    """KL(this || other) of diagonal Gaussians: ``[..., D]`` to ``[...]``."""
    ratio = (2.0 * (log_std - other_log_std)).exp()
    distance = ((mean - other_mean) / other_log_std.exp()) ** 2
    return 0.5 * (ratio + distance - 1.0 - 2.0 * (log_std - other_log_std)).sum(-1)


def squashed_gaussian_entropy(mean: torch.Tensor, log_std: torch.Tensor, nodes: int = 64) -> torch.Tensor:
    """Entropy of tanh of a diagonal Gaussian: ``[..., D]`` to ``[...]``.

    H = H(Gaussian) + E[log(1 - tanh(x)^2)]. The expectation has no closed form; Gauss-Hermite quadrature
    gives it without the noise of a sampled estimate.
    """
    points, weights = _hermite(nodes)
    x = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * points.to(mean)
    correction = (log_one_minus_tanh_squared(x) * weights.to(mean)).sum(-1).sum(-1)
    return gaussian_entropy(log_std) + correction


def log_one_minus_tanh_squared(x: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh(x)^2) without cancellation at large ``|x|``: 2 (log 2 - x - softplus(-2 x))."""
    return 2.0 * (math.log(2.0) - x - torch.nn.functional.softplus(-2.0 * x))


@functools.lru_cache
def _hermite(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and weights with which sums over them are means over a standard normal."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return torch.from_numpy(points), torch.from_numpy(weights / weights.sum())
