"""Losses of distributions of the return."""

from __future__ import annotations

import torch
from torch import nn

from framework.losses.masking import check_alike, discounted


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
    estimates, samples = torch.broadcast_tensors(quantiles.unsqueeze(2), targets.detach().unsqueeze(1))
    # [N, K, J]. torch's functions pass fewer times over them than `losses.huber` does.
    if kappa == 0:
        sizes = nn.functional.l1_loss(estimates, samples, reduction="none")
    else:
        sizes = nn.functional.huber_loss(estimates, samples, reduction="none", delta=kappa)
    fractions = fractions.unsqueeze(2)
    weights = torch.where(samples < estimates.detach(), 1.0 - fractions, fractions)
    return (weights * sizes).mean(2).sum(1) / (kappa or 1.0)


def truncated_quantiles(quantiles: torch.Tensor, dropped: int) -> torch.Tensor:
    """All critics' quantiles `[C, N, M]`, sorted, without the largest: `[N, C * (M - dropped)]`.

    The mixture of C critics is truncated by `C * dropped` quantiles (Kuznetsov et al., 2020, TQC).
    """
    critics, _, each = quantiles.shape
    pooled = quantiles.movedim(1, 0).flatten(1).sort(1).values
    return pooled[:, : critics * (each - dropped)]


def tqc_critic_loss(
    quantiles: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, next_quantiles: torch.Tensor
) -> torch.Tensor:
    """`quantile_huber` of the targets `r + d * z` (Kuznetsov et al., 2020, TQC): the sum over the critics.

    Each critic's loss is a mean over the items and over its quantiles.

    Args:
      quantiles: `[C, N, M]` of C critics at the fractions (m + 1/2) / M.
      rewards: `[N]`.
      discounts: `[N]` gamma times the environment's discount.
      next_quantiles: `[N, K]` `truncated_quantiles` of the next observation, less the policy's entropy term.
    """
    check_alike(rewards=rewards, discounts=discounts, quantiles=quantiles[0, :, 0])
    critics, items, count = quantiles.shape
    fractions = (torch.arange(count, device=quantiles.device) + 0.5) / count
    targets = rewards.unsqueeze(1) + discounted(discounts.unsqueeze(1), next_quantiles)
    rows = quantiles.flatten(0, 1)
    each = quantile_huber(rows, fractions.expand_as(rows), targets.repeat(critics, 1))
    return each.sum() / (items * count)


def categorical_projection(
    atoms: torch.Tensor, probabilities: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor
) -> torch.Tensor:
    """The distribution of `r + d * z` on the atoms (Bellemare et al., 2017, C51, algorithm 1): `[N, K]`.

    The probability of each atom `z` is divided between the two atoms next to `r + d * z`, and the nearer one
    gets more. Values beyond the first or the last atom go to that atom. The result has no gradient.

    Args:
      atoms: `[K]` returns at equal distances, increasing; K is at least 2.
      probabilities: `[N, K]` distribution of the return from the next state.
      rewards: `[N]` sums of discounted rewards up to the next state.
      discounts: `[N]` factors of the return from the next state: 0 after a termination, where the
        probabilities may be anything, even NaN.
    """
    check_alike(rewards=rewards, discounts=discounts, probabilities=probabilities[:, 0])
    check_alike(atoms=atoms, probabilities=probabilities[0])
    with torch.no_grad():
        last, rewards, discounts = len(atoms) - 1, rewards.unsqueeze(1), discounts.unsqueeze(1)
        # Positions in units of the distance between atoms, as a product with NaN would be NaN.
        values = rewards + discounts * atoms
        positions = ((values - atoms[0]) * (last / (atoms[-1] - atoms[0]))).clamp(0, last)
        probabilities = torch.where(discounts == 0, 1.0 / len(atoms), probabilities)
        below = positions.floor().clamp(max=last - 1)
        upper = probabilities * (positions - below)
        index = below.long()
        projected = torch.zeros_like(probabilities).scatter_add_(1, index, probabilities - upper)
        return projected.scatter_add_(1, index + 1, upper)


def categorical_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropies of target distributions and softmax(logits), and their divergences, both `[...]`.

    The divergence is the cross entropy minus the entropy of the target, which learning cannot remove. It has
    no gradient. It is the priority of an item in Rainbow (Hessel et al., 2018).

    Args:
      logits: `[..., K]`.
      targets: `[..., K]` probabilities, held constant.
    """
    check_alike(logits=logits, targets=targets)
    targets = targets.detach()
    cross_entropies = -(targets * logits.log_softmax(-1)).sum(-1)
    divergences = cross_entropies.detach() + targets.xlogy(targets).sum(-1)
    return cross_entropies, divergences.clamp(min=0.0)


def soft_categorical_critic_loss(
    logits: torch.Tensor,
    atoms: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    next_probabilities: torch.Tensor,
    next_entropy_terms: torch.Tensor,
) -> torch.Tensor:
    """Cross entropy to the distribution of `r + d * (z - temperature log pi)` (Lee et al., 2025, SimBaV2).

    The sum over the critics of the mean over the items.

    Args:
      logits: `[C, N, K]` of C critics for the action that was taken.
      atoms: `[K]` returns z, as in `categorical_projection`.
      rewards: `[N]`.
      discounts: `[N]` gamma times the environment's discount.
      next_probabilities: `[N, K]` of the critic with the least expected return of the next action.
      next_entropy_terms: `[N]` minus the temperature times log pi of that action.
    """
    rewards = rewards + discounted(discounts, next_entropy_terms)
    targets = categorical_projection(atoms, next_probabilities, rewards, discounts)
    each, _ = categorical_cross_entropy(logits, targets.expand_as(logits))
    return each.sum(0).mean()


def expected_returns(logits: torch.Tensor, atoms: torch.Tensor) -> torch.Tensor:
    """The means `[...]`, float32, of the distributions softmax(`logits [..., K]`) of `atoms [K]`."""
    # In float32, and not a product of matrices, which would be in bfloat16 with autocast.
    return (logits.float().softmax(-1) * atoms).sum(-1)


def of_actions(outputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """The outputs `[N, K]` of the actions `[N]`, of outputs `[N, A, K]`."""
    index = actions.long().reshape(-1, 1, 1).expand(-1, 1, outputs.shape[-1])
    return outputs.gather(1, index).squeeze(1)
