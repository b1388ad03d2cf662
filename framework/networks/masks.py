"""Action masks: which discrete actions the environment takes after an observation.

A mask is the entry `action_mask` of the observation. It is not 0 where the action is legal: `[..., A]` for
one discrete action, and for several choices the masks of all of them, side by side or as a nest.
`ObservationEncoder` leaves it out, so that no network sees it. Heads of policies take it as `legal`.

A row whose mask allows nothing counts as one that allows everything: episodes may end with such a row, and
padding consists of them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import tree
from torch import nn

from framework import specs
from framework.losses.entropy import mask_logits
from framework.networks.distributions import Categorical
from framework.specs import EnvironmentSpec
from framework.types import Nest


def legal_actions(observation: Nest) -> torch.Tensor | None:
    """The mask `[..., A]` in an observation of tensors; None without one."""
    if isinstance(observation, torch.Tensor):
        return None
    mask = specs.action_mask(observation)
    return torch.cat(tree.flatten(mask), -1) if tree.is_nested(mask) else mask


def masked_policy(head: nn.Module, features: torch.Tensor, observation: Nest) -> Any:
    """The distribution over the legal actions that a head makes of the features of `observation`."""
    legal = legal_actions(observation)
    return head(features) if legal is None else head(features, _allowed(legal))


def mask_values(values: torch.Tensor, observation: Nest) -> torch.Tensor:
    """Values `[..., A]` of the actions; no maximum finds an illegal one, whose value is very low.

    They are finite. Without a mask in `observation` these are the values given.
    """
    legal = legal_actions(observation)
    if legal is None:
        return values
    return mask_logits(values, _allowed(legal))


def _allowed(legal: torch.Tensor) -> torch.Tensor:
    """bool`[..., A]`: the actions that a mask allows, or all if it allows none.

    A bootstrap from the last observation of a truncated episode, whose mask may be 0, has to be a return.
    """
    allowed = legal > 0
    return allowed | ~allowed.any(-1, keepdim=True)


def random_actions(
    values: torch.Tensor, observation: Nest, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Uniform legal actions `[N]`, for values or logits `[N, A]`."""
    legal = legal_actions(observation)
    if legal is None:
        num_actions, shape = values.shape[-1], values.shape[:-1]
        return torch.randint(num_actions, shape, generator=generator, device=values.device)
    return Categorical(torch.zeros_like(values), _allowed(legal)).sample(generator)


def epsilon_greedy(
    values: torch.Tensor,
    observation: Nest,
    epsilon: torch.Tensor | float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The best legal action `[N]` of values `[N, A]`, or with probability `epsilon` a random legal one.

    Args:
      values: values of the actions.
      observation: the observation that they belong to, with or without a mask.
      epsilon: one number, or one for each env, `[N]`.
      generator: generator of the random numbers.
    """
    greedy = mask_values(values, observation).argmax(-1)
    explores = torch.rand(greedy.shape, generator=generator, device=values.device) < epsilon
    return torch.where(explores, random_actions(values, observation, generator), greedy)


def check_action_mask(spec: EnvironmentSpec, agent: str, takes_masks: bool) -> None:
    """Raises ValueError unless the observations have no mask, or one that fits the actions and the agent.

    Args:
      spec: spec of one env.
      agent: name of the agent, for the error.
      takes_masks: whether the agent can use a mask.
    """
    masks = [leaf for path, leaf in specs.leaves(spec.observations) if specs.ACTION_MASK in path]
    if not masks:
        return
    of_one = tree.flatten(specs.action_mask(spec.observations))
    shapes = [mask.shape for mask in masks]
    got = f"{specs.ACTION_MASK}: got shapes {shapes} in the observation, expected"
    if not takes_masks:
        raise ValueError(f"{got} none: {agent} takes no masks. Use an agent that does: see docs/agents.md.")
    choices = specs.choices(spec.actions)
    fits = len(of_one) == len(masks) and all(len(shape) == 1 for shape in shapes)
    if fits:  # Each part of a nest holds whole choices, in their order.
        ends, wanted = (set(itertools.accumulate(sizes)) for sizes in ([s[0] for s in shapes], choices))
        fits = ends <= wanted and max(ends) == max(wanted, default=0)
    if not fits:
        raise ValueError(
            f"{got} {sum(choices)} entries along one axis in one mask, one for each value of each discrete "
            f"action in {spec.actions!r}, or a nest in the order of the actions. Fix the environment's mask."
        )
