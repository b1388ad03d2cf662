"""Losses of soft actor-critic (Haarnoja et al., 2018; discrete: Christodoulou, 2019).

Each is a masked mean over any shape, `[N]` transitions as well as `[N, T]` rows; see `policy.masked_mean`. A
truncated step has a discount greater than 0 and bootstraps from the next observation. A terminated step does
not, whatever the value of that observation.
"""

from __future__ import annotations

import torch

from framework.losses.entropy import expectation
from framework.losses.masking import check_alike, discounted, where_counted
from framework.losses.policy import masked_mean


def soft_value(
    action_values: torch.Tensor, log_probs: torch.Tensor, temperature: torch.Tensor | float
) -> torch.Tensor:
    """Value of an observation from one sampled action: Q - temperature log pi, elementwise.

    Args:
      action_values: value of an action drawn from the policy: the smaller one of the target critics.
      log_probs: log pi of that action.
      temperature: weight of the entropy.
    """
    check_alike(action_values=action_values, log_probs=log_probs)
    return action_values - temperature * log_probs


def discrete_soft_value(
    action_values: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor | float
) -> torch.Tensor:
    """Value of an observation, exact over all actions: `[..., A]` to `[...]`."""
    check_alike(action_values=action_values, logits=logits)
    log_probs = logits.log_softmax(-1)
    return expectation(log_probs, action_values - temperature * log_probs)


def sac_critic_loss(
    action_values: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    next_soft_values: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Half the mean squared error to r + d V(o'), summed over the critics.

    Args:
      action_values: `[C, ...]` of C critics for the action that was taken.
      rewards: `[...]`.
      discounts: `[...]` gamma times the environment's discount.
      next_soft_values: `[...]` `soft_value` of the next observation, held constant.
      mask: `[...]` 1 where the element counts.
    """
    if action_values.shape[1:] != rewards.shape:
        raise ValueError(
            f"action_values: got shape {tuple(action_values.shape)}, expected [critics, *rewards], where "
            f"rewards has shape {tuple(rewards.shape)}."
        )
    check_alike(mask, rewards=rewards, discounts=discounts, next_soft_values=next_soft_values)
    targets = (rewards + discounted(discounts, next_soft_values)).detach()
    errors = where_counted(action_values - targets, mask)
    return 0.5 * masked_mean((errors**2).sum(0), mask)


def sac_actor_loss(
    log_probs: torch.Tensor,
    action_values: torch.Tensor,
    temperature: torch.Tensor | float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """temperature log pi(a|o) - Q(o, a) of actions drawn with the reparametrization trick.

    Args:
      log_probs: log pi of the drawn actions, with gradient.
      action_values: the smaller of the critics' values of those actions, with the gradient through the
        actions; the critics' own parameters must be frozen, or their gradients discarded.
      temperature: held constant.
      mask: 1 where the element counts.
    """
    check_alike(mask, log_probs=log_probs, action_values=action_values)
    return masked_mean(_constant(temperature) * log_probs - action_values, mask)


def sac_discrete_actor_loss(
    logits: torch.Tensor,
    action_values: torch.Tensor,
    temperature: torch.Tensor | float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `sac_actor_loss`, exact over all actions: the mean over pi of temperature log pi - Q.

    Args:
      logits: `[..., A]`.
      action_values: `[..., A]`, held constant.
    """
    check_alike(logits=logits, action_values=action_values)
    rows = None if mask is None else mask.unsqueeze(-1)
    logits, action_values = where_counted(logits, rows), where_counted(action_values.detach(), rows)
    return masked_mean(-discrete_soft_value(action_values, logits, _constant(temperature)), mask)


def sac_temperature_loss(
    log_temperature: torch.Tensor,
    log_probs: torch.Tensor,
    target_entropy: torch.Tensor | float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """temperature (entropy - target_entropy): raises the temperature while the entropy is too small.

    Args:
      log_temperature: 0-d parameter; its exponent is the temperature.
      log_probs: log pi of drawn actions (or minus the exact entropy), held constant.
      target_entropy: in nats, one number, or one for each element. The continuous agent's usual choice is
        minus the number of action dimensions.
      mask: 1 where the element counts.
    """
    check_alike(mask, log_probs=log_probs)
    excess = where_counted(-log_probs.detach() - target_entropy, mask)
    return masked_mean(log_temperature.exp() * excess, mask)


def _constant(temperature: torch.Tensor | float) -> torch.Tensor | float:
    return temperature.detach() if isinstance(temperature, torch.Tensor) else temperature
