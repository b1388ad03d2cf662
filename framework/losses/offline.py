"""Losses of agents that learn from data alone."""

from __future__ import annotations

import torch


def expectile_loss(errors: torch.Tensor, expectile: float) -> torch.Tensor:
    """`|t - 1{e < 0}| e^2` of each error: its minimum over v of e = x - v is the expectile t of x.

    Newey and Powell (1987); equation 5 of Kostrikov et al. (2022). Shapes are `[...]`.
    """
    return torch.where(errors < 0, 1.0 - expectile, expectile) * errors.square()


def conservative_penalty(values: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """How much larger the soft maximum of the values is than the values of the data's actions.

    `logsumexp_b q(s, b) - q(s, a)`, equation 4 of Kumar et al. (2020), CQL(H), for discrete actions.

    Args:
      values: `[..., A]`; illegal actions have the lowest number of their dtype.
      actions: int64 `[...]`.

    Returns:
      `[...]`, at least 0.
    """
    return values.logsumexp(-1) - values.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
