"""Munchausen reinforcement learning (Vieillard et al., 2020): the scaled log-policy as a part of the reward.

The policy is `softmax(q / temperature)` of the target network, as in equation 1 of the paper.
"""

from __future__ import annotations

import torch

from framework.losses.masking import check_alike, discounted


def munchausen_rewards(
    values: torch.Tensor, actions: torch.Tensor, scale: float, temperature: float, clip: float
) -> torch.Tensor:
    """The term added to the rewards: `scale * max(-clip, temperature * log pi(action))`, `[N]`, at most 0.

    Args:
      values: `[N, A]` values of the target network in the first state.
      actions: `[N]` integers, the actions that were taken.
      scale: alpha of the paper.
      temperature: tau of the paper, in units of the return. The lower, the greedier the policy.
      clip: -l_0 of the paper: log-policies times `temperature` are at least minus this.
    """
    check_alike(actions=actions, values=values[:, 0])
    log_probs = (values / temperature).log_softmax(-1)
    chosen = log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
    return scale * (temperature * chosen).clamp(-clip, 0.0)


def munchausen_next_values(
    next_values: torch.Tensor, temperature: float, next_returns: torch.Tensor | None = None
) -> torch.Tensor:
    """Value of the next state with the policy's entropy: `sum_a pi(a) (q(a) - temperature * log pi(a))`.

    Args:
      next_values: `[N, A]` values of the target network in the next state.
      temperature: as in `munchausen_rewards`.
      next_returns: `[N, A, K]` samples or quantiles of the return of each action, which take the place of
        `q(a)` outside of the policy (M-IQN).

    Returns:
      `[N]`, or `[N, K]` with `next_returns`.
    """
    log_probs = (next_values / temperature).log_softmax(-1)
    if next_returns is None:
        return (log_probs.exp() * (next_values - temperature * log_probs)).sum(-1)
    check_alike(next_values=next_values, next_returns=next_returns[..., 0])
    log_probs = log_probs.unsqueeze(-1)
    return (log_probs.exp() * (next_returns - temperature * log_probs)).sum(1)


def munchausen_errors(
    values: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    next_values: torch.Tensor,
    target_values: torch.Tensor,
    scale: float,
    temperature: float,
    clip: float,
) -> torch.Tensor:
    """Munchausen DQN (Vieillard et al., 2020, equation 1): the errors `[N]`, no gradient in the target.

    With n-step rewards, only the first action's log-policy is added.

    Args:
      values: `[N, A]` values of the online network in the first state.
      actions: `[N]` integers, the actions that were taken.
      rewards: `[N]` sums of discounted rewards up to the next state.
      discounts: `[N]` factors of the value of the next state: 0 after a termination, where that value may be
        anything, even NaN.
      next_values: `[N, A]` values of the target network in the next state.
      target_values: `[N, A]` values of the target network in the first state.

    Other arguments as in `munchausen_rewards`.
    """
    check_alike(values=values, target_values=target_values, next_values=next_values)
    check_alike(actions=actions, rewards=rewards, discounts=discounts)
    rewards = rewards + munchausen_rewards(target_values, actions, scale, temperature, clip)
    target = rewards + discounted(discounts, munchausen_next_values(next_values, temperature))
    return target.detach() - values.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
