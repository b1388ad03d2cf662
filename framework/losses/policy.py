"""Losses of policies and state values. All are masked means over `[N, T]` (or any shape) to a scalar.

`mask` is 1 where the element counts (`returns.transition_mask` for sequences); None counts all. An element
that does not count affects neither a loss nor its gradient, even if it is NaN or infinite. Arguments with one
value per element must have equal shapes; otherwise `ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from framework.losses.masking import check_alike, where_counted

# The value of a statistic that was not requested.
_UNKNOWN = torch.tensor(float("nan"))

# Sums a tensor over several learners.
Total = Callable[[torch.Tensor], torch.Tensor]


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of the elements, weighted by the mask; 0 if no element counts."""
    if mask is None:
        return values.mean() if values.numel() else values.sum()
    if mask.shape != values.shape:
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}, expected {tuple(values.shape)}, as the values."
        )
    return where_counted(values * mask, mask).sum() / mask.sum().clamp(min=1e-8)


def normalize_advantages(
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    epsilon: float = 1e-8,
    total: Total | None = None,
) -> torch.Tensor:
    """Zero mean and unit variance over the elements that count; the others become 0.

    `total` sums a tensor over the learners that share the batch; None for one learner.
    """
    check_alike(mask, advantages=advantages)
    weights = torch.ones_like(advantages) if mask is None else mask.to(advantages.dtype)
    centered = where_counted(advantages - _overall_mean(advantages, weights, total), weights)
    return centered / (_overall_mean(centered**2, weights, total).sqrt() + epsilon)


def _overall_mean(values: torch.Tensor, weights: torch.Tensor, total: Total | None) -> torch.Tensor:
    """The mean over the parts of all learners."""
    if total is None:
        return masked_mean(values, weights)
    kept = where_counted(values.detach() * weights, weights)
    summed = total(torch.stack([kept.sum(), weights.sum()]))
    return summed[0] / summed[1].clamp(min=1e-8)


def policy_gradient_loss(
    log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """-log pi(a|o) A (Sutton et al., 2000), the advantage held constant."""
    check_alike(mask, log_probs=log_probs, advantages=advantages)
    return masked_mean(-log_probs * where_counted(advantages.detach(), mask), mask)


class Surrogate(NamedTuple):
    """A surrogate loss and values to log with it; scalars.

    Attributes:
      loss: the loss to minimize.
      kl: mean KL divergence between the old and the new policy: exact where the caller gave one, else
        Schulman's estimate E[ratio - 1 - log ratio].
      clip_fraction: share of the elements whose ratio lay outside the clip range; 0 where nothing is clipped.
    """

    loss: torch.Tensor
    kl: torch.Tensor
    clip_fraction: torch.Tensor


def clipped_surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    epsilon: Any = 0.2,
    statistics: bool = True,
) -> Surrogate:
    """PPO's clipped objective (Schulman et al., 2017, equation 7), negated.

    Args:
      log_probs: log pi(a|o) under the parameters that are trained.
      old_log_probs: log pi(a|o) under those that acted.
      advantages: held constant.
      mask: 1 where the element counts.
      epsilon: the ratio is clipped to 1 +- this; a number, or a tensor `[]` on any device.
      statistics: whether to compute `kl` and `clip_fraction`; they are NaN if not.
    """
    check_alike(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_ratios = where_counted(log_probs - old_log_probs.detach(), mask)
    ratios, advantages = log_ratios.exp(), where_counted(advantages.detach(), mask)
    if isinstance(epsilon, torch.Tensor):
        epsilon = epsilon + ratios.new_zeros(())  # On a GPU, `clamp` takes no bounds from the CPU.
    clipped = ratios.clamp(1.0 - epsilon, 1.0 + epsilon)
    loss = masked_mean(-torch.minimum(ratios * advantages, clipped * advantages), mask)
    if not statistics:
        return Surrogate(loss, _UNKNOWN, _UNKNOWN)
    with torch.no_grad():
        kl = masked_mean(ratios - 1.0 - log_ratios, mask)
        clip_fraction = masked_mean(((ratios - 1.0).abs() > epsilon).float(), mask)
    return Surrogate(loss, kl, clip_fraction)


def impact_surrogate(
    log_probs: torch.Tensor,
    target_log_probs: torch.Tensor,
    acting_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    epsilon: float = 0.3,
    largest: float = 2.0,
) -> Surrogate:
    """IMPACT's clipped objective with a target network (Luo et al., 2020), negated.

    The ratio is min(mu/pi_target, largest) pi/mu, where mu acted. That is pi/pi_target, except for actions
    that mu chose with more than `largest` times the probability of pi_target.

    Args:
      log_probs: log pi(a|o) under the parameters that are trained.
      target_log_probs: log pi(a|o) under the target network.
      acting_log_probs: log mu(a|o) under the parameters that acted.
      largest: bound of mu/pi_target.

    Other arguments as in `clipped_surrogate`.
    """
    check_alike(mask, target_log_probs=target_log_probs, acting_log_probs=acting_log_probs)
    # The ratio is pi/max(pi_target, mu/largest).
    denominators = torch.maximum(target_log_probs, acting_log_probs - math.log(largest))
    return clipped_surrogate(log_probs, denominators, advantages, mask, epsilon)


def kl_penalty_surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    kl: torch.Tensor,
    coefficient: torch.Tensor | float,
    target_kl: float,
    mask: torch.Tensor | None = None,
    cutoff_factor: float = 2.0,
    cutoff_coefficient: float = 1000.0,
    total: Total | None = None,
) -> Surrogate:
    """PPO's objective with a KL penalty (Schulman et al., 2017, equation 8), negated, with BatchPPO's cutoff.

    -E[ratio A] + coefficient KL + cutoff_coefficient max(0, KL - cutoff_factor target)^2, where KL is
    the mean over the elements that count (Hafner et al., 2017).

    Args:
      kl: divergence of the new policy from the old one, elementwise, with its gradient.
      coefficient: weight of the penalty; `adapt_kl_coefficient` adapts it.
      target_kl: divergence that an update should have.
      cutoff_factor: multiple of the target above which the quadratic penalty applies.
      cutoff_coefficient: weight of the quadratic penalty.
      total: as in `normalize_advantages`. The penalty depends on the mean of the whole batch.

    Other arguments as in `clipped_surrogate`.
    """
    check_alike(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, kl=kl)
    ratios = where_counted(log_probs - old_log_probs.detach(), mask).exp()
    mean_kl = masked_mean(kl, mask)
    if total is not None:
        # The value belongs to the whole batch, the gradient is this part's share of it.
        weights = torch.ones_like(kl) if mask is None else mask.to(kl.dtype)
        mean_kl = mean_kl + (_overall_mean(kl, weights, total) - mean_kl).detach()
    excess = (mean_kl - cutoff_factor * target_kl).clamp(min=0.0)
    loss = masked_mean(-ratios * where_counted(advantages.detach(), mask), mask)
    loss = loss + coefficient * mean_kl + cutoff_coefficient * excess**2
    return Surrogate(loss, mean_kl.detach(), torch.zeros_like(mean_kl))


def adapt_kl_coefficient(
    coefficient: torch.Tensor | float, kl: torch.Tensor | float, target_kl: float
) -> torch.Tensor:
    """Next penalty coefficient: times 1.5 if KL > 1.3 target, divided by 1.5 if KL < 0.7 target.

    Takes tensors or numbers. Returns a tensor, so that the call does not synchronize a device.
    """
    coefficient, kl = torch.as_tensor(coefficient), torch.as_tensor(kl)
    raised = torch.where(kl > 1.3 * target_kl, coefficient * 1.5, coefficient)
    return torch.where(kl < 0.7 * target_kl, coefficient / 1.5, raised)


def value_loss(values: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Half the mean squared error to targets that are held constant."""
    check_alike(mask, values=values, targets=targets)
    if mask is None and values.numel():
        return 0.5 * torch.nn.functional.mse_loss(values, targets.detach())
    return 0.5 * masked_mean(where_counted(values - targets.detach(), mask) ** 2, mask)


def explained_variance(
    values: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """1 - Var(targets - values) / Var(targets): 1 for perfect values; 0 if no two targets differ."""
    check_alike(mask, values=values, targets=targets)
    if mask is not None:
        values, targets = values[mask > 0], targets[mask > 0]
    if not targets.numel():
        return values.sum()  # A differentiable zero.
    spread = targets.var(correction=0)  # 0 for a single target; the unbiased estimate is NaN.
    explained = 1.0 - (targets - values).var(correction=0) / spread.clamp(min=1e-8)
    return torch.where(spread > 0, explained, 0.0)


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None = None,
    epsilon: float = 0.2,
) -> torch.Tensor:
    """Value loss of OpenAI's PPO: the larger error of the value and of the clipped value.

    Args:
      values: values under the parameters that are trained.
      old_values: values under those that acted. New values are clipped to these +- epsilon.
      targets: held constant.
      mask: 1 where the element counts.
      epsilon: in units of the return, so it depends on the scale of rewards.
    """
    check_alike(mask, values=values, old_values=old_values, targets=targets)
    targets, old_values = targets.detach(), old_values.detach()
    clipped = old_values + (values - old_values).clamp(-epsilon, epsilon)
    errors = where_counted(values - targets, mask)
    clipped_errors = where_counted(clipped - targets, mask)
    return 0.5 * masked_mean(torch.maximum(errors**2, clipped_errors**2), mask)
