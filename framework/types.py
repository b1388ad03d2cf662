"""The data that actors, replay and learners exchange, as named tuples of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

if TYPE_CHECKING:
    import torch

# A tree of dicts, lists, tuples and named tuples with arrays at its leaves (dm-tree's meaning).
Nest = Any


# Values of a time step's `step_type`, as in `dm_env.StepType`.
FIRST, MID, LAST = 0, 1, 2


class Transition(NamedTuple):
    """One n-step transition, or a batch of them with a leading `[N]`.

    `reward` is the discounted n-step sum and `discount` carries one factor fewer than it has steps, so
    that a learner bootstraps with `reward + gamma * discount * value(next_observation)`.
    """

    observation: Nest
    action: Nest
    reward: Nest
    discount: Nest
    next_observation: Nest
    extras: Nest = ()


class Step(NamedTuple):
    """Rows of an episode: `[T, ...]` in an item, `[N, T, ...]` in a batch.

    `reward` and `discount` are those that resulted from `action`; `extras` belong to the time of
    `observation`. `mask` (float32) is 1 on real transitions, 0 on padding and on the closing row, which
    holds the last observation of an episode with zero action, reward and discount.
    """

    observation: Nest
    action: Nest
    reward: Nest
    discount: Nest
    start_of_episode: Nest
    extras: Nest = ()
    mask: Nest = ()


class StepResult(NamedTuple):
    """The result of one learner step.

    Attributes:
      metrics: name to scalar. Values may be tensors on the device, which are read only when logged.
      priorities: `[N]` new priorities of the batch's items, or None.
    """

    metrics: Mapping[str, SupportsFloat]
    priorities: torch.Tensor | None = None


class Gradients(NamedTuple):
    """The gradients of a batch, for the learner that applies them.

    Attributes:
      values: the gradient of each parameter that needs one, in their order; `()` for a parameter without.
      loss: the loss.
      metrics: those of the loss function.
      learner_steps: learner steps that had produced the parameters, as a 0-d tensor.
    """

    values: Sequence[torch.Tensor | tuple[()]]
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    learner_steps: torch.Tensor
