"""Losses of models of an environment, and when to stop fitting them."""

from __future__ import annotations

import torch


def ensemble_errors(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean squared error of each model, `[K]`, of `[K, N, O]` (Clavera et al., 2018, equation 2)."""
    return ((predictions - targets.detach()) ** 2).mean((1, 2))


def rolling_validation(
    averages: torch.Tensor, errors: torch.Tensor, persistence: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Early stopping (Clavera et al., 2018, section 4.1): the new averages `[K]`, and which have fallen.

    Args:
      averages: rolling averages of the validation errors of K models. The authors' code begins with 1.5 times
        the first errors.
      errors: the errors after another epoch.
      persistence: weight of the old averages.
    """
    moved = persistence * averages + (1.0 - persistence) * errors
    return moved, moved < averages
