"""Losses of agents that learn from data alone."""

from __future__ import annotations

import math

import torch
from torch import nn


def expectile_loss(errors: torch.Tensor, expectile: float) -> torch.Tensor:
    """`|t - 1{e < 0}| e^2` of each error: its minimum over v of e = x - v is the expectile t of x.

    Newey and Powell (1987); equation 5 of Kostrikov et al. (2022). Shapes are `[...]`.
    """
    return torch.where(errors < 0, 1.0 - expectile, expectile) * errors.square()


def conservative_penalty(values: torch.Tensor, taken_values: torch.Tensor) -> torch.Tensor:
    """How much larger the soft maximum of the values is than the values of the data's actions.

    `logsumexp_b q(s, b) - q(s, a)`, equation 4 of Kumar et al. (2020), CQL(H), for discrete actions.

    Args:
      values: `[..., A]`; illegal actions have the lowest number of their dtype.
      taken_values: `[...]` of the data's actions.

    Returns:
      `[...]`, at least 0 for the data's own values.
    """
    return values.logsumexp(-1) - taken_values


def calibrated_values(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """`max(q(s, b), G(s))`: the penalty presses no value below what the data earned from `s` on.

    Equation 5.1 of Nakamoto et al. (2023), Cal-QL, with the Monte Carlo return of the data as the value of
    its policy.

    Args:
      values: `[..., N, S]` of S actions.
      returns: `[N]`.

    Returns:
      `[..., N, S]`.
    """
    return torch.maximum(values, returns.unsqueeze(-1))


def sampled_conservative_penalty(
    values: torch.Tensor, log_densities: torch.Tensor, taken_values: torch.Tensor
) -> torch.Tensor:
    """`conservative_penalty` for real actions: the integral over them is estimated from S drawn ones.

    `log (1/S) sum_s exp q(s, b_s) / density(b_s) - q(s, a)`, appendix F of Kumar et al. (2020).

    Args:
      values: `[..., S]` of the drawn actions.
      log_densities: `[..., S]` of these, where they were drawn, held constant; it broadcasts to `values`.
      taken_values: `[...]` of the data's actions.

    Returns:
      `[...]`, of any sign.
    """
    soft = (values - log_densities.detach()).logsumexp(-1) - math.log(values.shape[-1])
    return soft - taken_values


def gradient_similarity(gradients: torch.Tensor) -> torch.Tensor:
    """How much the critics' gradients by the action agree: `1/(C-1) sum_{i != j} cos(g_i, g_j)`.

    Equation 5 of An et al. (2021), EDAC: from -C/(C-1) to C.

    Args:
      gradients: `[C, ..., D]` of C > 1 critics.

    Returns:
      `[...]`.
    """
    unit = nn.functional.normalize(gradients, dim=-1)
    # The square of the sum has all pairs, and each critic's with itself.
    pairs = unit.sum(0).square().sum(-1) - unit.square().sum((0, -1))
    return pairs / (len(gradients) - 1)
