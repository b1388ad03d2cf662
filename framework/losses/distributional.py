"""Losses of distributions of the return."""

from __future__ import annotations

import torch

from framework.losses.masking import check_alike
from framework.losses.q_learning import huber


def quantile_huber(
    quantiles: torch.Tensor, fractions: torch.Tensor, targets: torch.Tensor, kappa: float = 1.0
) -> torch.Tensor:
    """Quantile regression with Huber's loss (Dabney et al., 2018, QR-DQN, equation 10): losses `[N]`.

    The sum over the quantiles of the mean over the targets of `|tau - 1{u < 0}| huber(u) / kappa`, with the
    error `u` of target minus quantile. The targets get no gradient.

    Args:
      quantiles: `[N, K]` estimates of the quantiles.
      fractions: `[N, K]`, the probability tau below each quantile, between 0 and 1.
      targets: `[N, J]` samples of the return.
      kappa: errors beyond this count linearly. 0 is plain quantile regression.
    """
    check_alike(quantiles=quantiles, fractions=fractions)
    check_alike(quantiles=quantiles[:, 0], targets=targets[:, 0])
    errors = targets.detach().unsqueeze(1) - quantiles.unsqueeze(2)  # [N, K, J]
    sizes = errors.abs() if kappa == 0 else huber(errors, kappa) / kappa
    weights = (fractions.unsqueeze(2) - (errors.detach() < 0).float()).abs()
    return (weights * sizes).mean(2).sum(1)


def of_actions(outputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """The outputs `[N, K]` of the actions `[N]`, of outputs `[N, A, K]`."""
    index = actions.long().reshape(-1, 1, 1).expand(-1, 1, outputs.shape[-1])
    return outputs.gather(1, index).squeeze(1)
