"""Losses of maximum a posteriori policy optimization (MPO; Abdolmaleki et al., 2018a and 2018b).

The E-step weights S actions, drawn from the target policy, by their values. The M-step fits the policy to the
weighted actions, and bounds by how much its mean and its standard deviation move. Acme's MPO is the model.

`mask [N]` is 1 where the observation counts; None counts all. An observation that does not count changes
neither a loss nor a gradient, even if it is NaN or infinite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from framework.losses.masking import check_alike, where_counted
from framework.losses.policy import masked_mean


def mpo_weights(action_values: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """Weights of the S actions of each observation, softmax(Q / temperature): `[N, S]`, no gradient.

    The E-step's policy of Abdolmaleki et al. (2018a), relative to the one that drew the actions.

    Args:
      action_values: `[N, S]`, of actions that the target policy drew.
      temperature: more than 0; a large one weights all actions alike.
    """
    return (action_values / temperature).detach().softmax(-1)


def mpo_temperature_loss(
    action_values: torch.Tensor,
    temperature: torch.Tensor,
    epsilon: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dual of the E-step (2018a): T (epsilon + mean log mean exp(Q / T)), convex in T.

    At its minimum, the divergence of the weighted actions from the drawn ones is `epsilon` on average.

    Args:
      action_values: `[N, S]`, held constant.
      temperature: 0-d, the T above, with gradient.
      epsilon: bound of the divergence, in nats. It cannot exceed log S.
    """
    rows = None if mask is None else mask.unsqueeze(-1)
    tempered = where_counted(action_values.detach(), rows) / temperature
    log_means = tempered.logsumexp(-1) - math.log(action_values.shape[-1])
    return temperature * masked_mean(epsilon + log_means, mask)


def mpo_likelihood_loss(
    weights: torch.Tensor, log_probs: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The M-step (2018a) without its bounds: minus the weighted log-likelihood of the actions.

    Args:
      weights: `[N, S]` of `mpo_weights`, held constant.
      log_probs: `[N, S]` of the same actions under the policy that is trained.
    """
    check_alike(weights=weights, log_probs=log_probs)
    rows = None if mask is None else mask.unsqueeze(-1)
    weights, log_probs = where_counted(weights, rows), where_counted(log_probs, rows)
    return masked_mean(-(weights.detach() * log_probs).sum(-1), mask)


class KLConstraint(NamedTuple):
    """A bound on a divergence as two losses; scalars.

    Attributes:
      penalty: loss of the policy: the divergence times the multiplier, which is held constant.
      multiplier_loss: loss of the multiplier, which grows while the divergence is above its bound.
    """

    penalty: torch.Tensor
    multiplier_loss: torch.Tensor


def kl_constraint(
    kl: torch.Tensor, multiplier: torch.Tensor, epsilon: float, mask: torch.Tensor | None = None
) -> KLConstraint:
    """Lagrangian of "the mean over the observations of each of D divergences is at most `epsilon`".

    The bounds of the M-step (2018a, 2018b), with a multiplier for each dimension as in Acme. Both losses are
    sums over the dimensions.

    Args:
      kl: `[N, D]`, with the policy's gradient.
      multiplier: `[D]`, at least 0, with gradient.
      epsilon: bound of each divergence, in nats.
    """
    if multiplier.shape != kl.shape[-1:]:
        raise ValueError(f"multiplier: got shape {tuple(multiplier.shape)}, expected {tuple(kl.shape[-1:])}.")
    rows = None if mask is None else mask.unsqueeze(-1).expand_as(kl)
    kl, size = where_counted(kl, rows), kl.shape[-1]
    return KLConstraint(
        size * masked_mean(multiplier.detach() * kl, rows),
        size * masked_mean(multiplier * (epsilon - kl.detach()), rows),
    )


def decoupled_gaussian_kl(
    mean: torch.Tensor, log_std: torch.Tensor, other_mean: torch.Tensor, other_log_std: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(this || other) of diagonal Gaussians in two parts (2018b): `[..., D]` each.

    The first is the divergence if only the mean changes, and the second if only the standard deviation does;
    each has a gradient in its own parameter of the other distribution only.

    Args:
      mean: `[..., D]`, of the target policy, held constant.
      log_std: `[..., D]`, of the target policy, held constant.
      other_mean: `[..., D]`, of the policy that is trained.
      other_log_std: `[..., D]`, of the policy that is trained.
    """
    check_alike(mean=mean, log_std=log_std, other_mean=other_mean, other_log_std=other_log_std)
    mean, log_std = mean.detach(), log_std.detach()
    of_mean = 0.5 * ((mean - other_mean) / log_std.exp()) ** 2
    log_ratio = 2.0 * (log_std - other_log_std)
    return of_mean, 0.5 * (log_ratio.expm1() - log_ratio)
