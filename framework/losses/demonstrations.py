"""Losses that compare action values with the actions of a demonstrator."""

from __future__ import annotations

import torch

from framework.losses.masking import check_alike


def large_margin_loss(values: torch.Tensor, actions: torch.Tensor, margin: float = 0.8) -> torch.Tensor:
    """DQfD's supervised loss (Hester et al., 2018, equation 2; Piot et al., 2014), `[N]`.

    `max_a [q(a) + margin * (a != action)] - q(action)`: 0 if the value of the demonstrated action exceeds
    the values of all other actions by `margin`.

    Args:
      values: `[N, A]` values of all actions.
      actions: `[N]` integers, the demonstrator's actions.
      margin: at least 0.

    Raises:
      ValueError: The shapes do not fit each other.
    """
    chosen = actions.long().unsqueeze(-1)
    check_alike(actions=actions, values_of_one_action=values[..., 0])
    others = (values + margin).scatter(-1, chosen, values.gather(-1, chosen))
    return others.amax(-1) - values.gather(-1, chosen).squeeze(-1)
