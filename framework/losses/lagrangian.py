"""Multipliers of constraints."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PIDLagrangian(NamedTuple):
    """The result of `pid_lagrangian`; scalars.

    Attributes:
      multiplier: weight of the cost, at least 0.
      integral: the controller's integral part, for the next call.
    """

    multiplier: torch.Tensor
    integral: torch.Tensor


def pid_lagrangian(
    cost: torch.Tensor,
    last_cost: torch.Tensor,
    integral: torch.Tensor,
    limit: float,
    gains: tuple[float, float, float],
) -> PIDLagrangian:
    """The multiplier by a PID controller of the cost (Stooke et al., 2020, algorithm 2).

    I' = max(0, I + K_I (cost - limit)), lambda = max(0, K_P (cost - limit) + I' + K_D max(0, cost - last)).
    The paper has K_I before I; here it is inside, as in its public code, so that I is in units of lambda.

    Args:
      cost: scalar, mean cost under the newest policy.
      last_cost: the one of the call before.
      integral: the one that the call before returned. The first is the initial multiplier.
      limit: what the cost should be at most.
      gains: K_P, K_I and K_D.
    """
    error = cost - limit
    integral = (integral + gains[1] * error).clamp(min=0.0)
    rise = (cost - last_cost).clamp(min=0.0)
    return PIDLagrangian((gains[0] * error + integral + gains[2] * rise).clamp(min=0.0), integral)
