"""Temporal-difference errors of action values on transitions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from framework.losses.masking import check_alike, discounted


def q_learning_errors(
    values: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    next_values: torch.Tensor,
) -> torch.Tensor:
    """Q-learning (Watkins, 1989): `r + d * max_a q'(a) - q(action)`, `[N]`, no gradient in the target.

    Args:
      values: `[N, A]` values of the actions in the first state.
      actions: `[N]` integers, the actions that were taken.
      rewards: `[N]` sums of discounted rewards up to the next state.
      discounts: `[N]` factors of the value of the next state: 0 after a termination, where that value may be
        anything, even NaN.
      next_values: `[N, A]` values of the actions in the next state, usually of a target network.
    """
    return double_q_errors(values, actions, rewards, discounts, next_values, next_values)


def double_q_errors(
    values: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    discounts: torch.Tensor,
    next_values: torch.Tensor,
    next_selector: torch.Tensor,
) -> torch.Tensor:
    """Double Q-learning (van Hasselt et al., 2016): one network chooses the next action, another rates it.

    `r + d * q'(argmax_a selector(a)) - q(action)`, `[N]`, no gradient in the target.

    Args:
      next_selector: `[N, A]` values of the online network in the next state, which choose the action.

    Other arguments as in `q_learning_errors`.

    Raises:
      ValueError: The shapes do not fit each other.
    """
    # gather() and broadcasting accept most other shapes silently.
    per_item = actions.shape == rewards.shape == discounts.shape == values.shape[:-1]
    if not per_item or not values.shape == next_values.shape == next_selector.shape:
        shapes = {"actions": actions, "rewards": rewards, "discounts": discounts}
        shapes |= {"values": values, "next_values": next_values, "next_selector": next_selector}
        got = {name: tuple(tensor.shape) for name, tensor in shapes.items()}
        raise ValueError(f"shapes: got {got}, expected [N] for the first three and [N, A] for the others.")
    best = next_selector.argmax(-1, keepdim=True)
    next_value = next_values.gather(-1, best).squeeze(-1)
    target = rewards + discounted(discounts, next_value)
    return target.detach() - values.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def huber(errors: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """Huber's loss (1964), elementwise: quadratic (`e**2 / 2`) up to `delta`, linear beyond."""
    size = errors.abs()
    quadratic = size.clamp(max=delta)
    return 0.5 * quadratic**2 + delta * (size - quadratic)


def item_priorities(errors: torch.Tensor) -> torch.Tensor:
    """The priorities of items with these `errors [N]`, which are at least 0: float64`[N]`, more than 0.

    With the small constant, items without error still have a chance to be sampled.
    """
    return errors.double() + 1e-6


def importance_weights(
    probabilities: torch.Tensor,
    table_size: torch.Tensor | int,
    exponent: torch.Tensor | float,
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Weights `(1 / (size * p)) ** exponent`, `[N]`, divided by the largest (Schaul et al., 2016, 3.4).

    Args:
      probabilities: `[N]` probability with which each item was drawn.
      table_size: `[N]` or scalar, items in the table at that time. It cancels unless it differs
        between the items of the batch.
      exponent: 0 gives no correction, 1 a full correction.
      largest: the maximum of a tensor over the learners that share the batch; None for one learner.
    """
    if isinstance(table_size, torch.Tensor) and table_size.dim():
        check_alike(probabilities=probabilities, table_size=table_size)
    weights = (probabilities.double() * table_size).clamp(min=1e-30).pow(-exponent)
    maximum = weights.max()
    return (weights / (maximum if largest is None else largest(maximum))).float()
