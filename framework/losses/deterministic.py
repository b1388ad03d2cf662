"""Losses of deterministic policies and their critics (Silver et al., 2014; Fujimoto et al., 2018)."""

from __future__ import annotations

import torch

from framework.losses.masking import check_alike, discounted
from framework.losses.policy import masked_mean


def clipped_double_q_errors(
    action_values: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    next_action_values: torch.Tensor,
) -> torch.Tensor:
    """Clipped double Q-learning (Fujimoto et al., 2018, equation 10): `[C, N]`, no gradient in the target.

    `r + d * min_c q'_c - q_c` of each of C critics. One critic gives the errors of DDPG (Lillicrap et al.,
    2016).

    Args:
      action_values: `[C, N]` of the actions that were taken.
      rewards: `[N]` sums of discounted rewards up to the next state.
      discounts: `[N]` factors of the value of the next state: 0 after a termination, where that value may be
        anything, even NaN.
      next_action_values: `[C, N]` of the target policy's actions in the next state, by the target critics.

    Raises:
      ValueError: The shapes do not fit each other.
    """
    check_alike(action_values=action_values, next_action_values=next_action_values)
    check_alike(rewards=rewards, discounts=discounts, action_values=action_values[0])
    targets = rewards + discounted(discounts, next_action_values.amin(0))
    return targets.detach() - action_values


def smoothed_actions(actions: torch.Tensor, noise: torch.Tensor, std: float, clip: float) -> torch.Tensor:
    """Target policy smoothing (Fujimoto et al., 2018, equation 14): actions near the target policy's.

    Args:
      actions: `[..., D]` between -1 and 1.
      noise: `[..., D]` standard normals.
      std: standard deviation of the added noise.
      clip: the added noise is clipped to +- this. The result is clipped to +- 1.
    """
    check_alike(actions=actions, noise=noise)
    return (actions + (std * noise).clamp(-clip, clip)).clamp(-1.0, 1.0)


def deterministic_policy_loss(action_values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """-Q(o, mu(o)): its gradient is the deterministic policy gradient (Silver et al., 2014, equation 9).

    Args:
      action_values: values of the policy's own actions, with the gradient through the actions. The critics'
        own parameters must be frozen (`networks.frozen`), or their gradients discarded.
      mask: 1 where the element counts.
    """
    return masked_mean(-action_values, mask)
