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

    `reward` is the discounted sum of n rewards. `discount` has one factor gamma fewer than the transition has
    steps, so that a learner bootstraps with `reward + gamma * discount * value(next_observation)`.
    """

    observation: Nest
    action: Nest
    reward: Nest
    discount: Nest
    next_observation: Nest
    extras: Nest = ()


class OneStep(NamedTuple):
    """The first step of an n-step `Transition`, as its `extras`: for losses with two horizons (DQfD).

    `reward`, `discount` and `next_observation` are the transition's with n = 1. `extras` are the
    policy's.
    """

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


class MultiAgentTimeStep(NamedTuple):
    """A `dm_env.TimeStep` of a multi-agent environment: nests keyed by agent, and the step type of each.

    `step_type` is the environment's, whose episode ends when its last agent's does. An agent that is
    not in the episode, because its own has ended or begins later, is FIRST: as at a reset, its action is
    ignored, its reward is 0 and its discount 1. Its observation is zeros until it is in the episode again.
    So `agents[name] != FIRST` masks the transitions of an agent:

    ```text
    step_type     FIRST  MID    MID    MID    LAST   FIRST
    agents["a"]   FIRST  MID    LAST   FIRST  FIRST  FIRST      ends early, and waits for the others
    agents["b"]   FIRST  MID    MID    MID    LAST   FIRST
    ```

    Where `step_type` is FIRST, so are all agents. Where it is LAST, the episodes of all agents end.
    """

    step_type: Nest
    reward: Nest
    discount: Nest
    observation: Nest
    agents: Nest = ()


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
      metrics: the loss function's.
      learner_steps: learner steps that had produced the parameters, as a 0-d tensor.
    """

    values: Sequence[torch.Tensor | tuple[()]]
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    learner_steps: torch.Tensor


class Progress(NamedTuple):
    """The progress of learning when the parameters of a policy were published.

    Attributes:
      version: number of learner steps that produced the parameters.
      env_steps: env steps of the program at that time. Exploration schedules are functions of this.
    """

    version: int = 0
    env_steps: int = 0
