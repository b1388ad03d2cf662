"""Nested actions: dicts and tuples of discrete and continuous parts, as one vector of independent parts.

A sampled joint action is `[..., D]`: the sampled actions of the parts side by side, in the order of
`tree.flatten`. A choice is one entry, a whole number; the entries are float32 if some part is continuous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework import nest as nests
from framework import specs
from framework.networks.distributions import Joint, join, split_joint
from framework.networks.heads import Actions, make_policy_head
from framework.networks.modules import Module


class JointHead(Module):
    """`[..., input_size]` to a `Joint`, with a head for each part.

    Args:
      heads: the heads.
      sizes: as in `Joint`.
      num_logits: for each part, the number of entries of its action mask.
    """

    def __init__(self, heads: Sequence[nn.Module], sizes: Sequence[int | None], num_logits: Sequence[int]):
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self._sizes, self._num_logits = list(sizes), list(num_logits)

    def forward(self, features: torch.Tensor, legal: torch.Tensor | None = None) -> Joint:
        if legal is None:
            return Joint([head(features) for head in self.heads], self._sizes)
        masks = zip(self.heads, legal.split(self._num_logits, -1), strict=True)
        parts = [head(features, mask) if mask.shape[-1] else head(features) for head, mask in masks]
        return Joint(parts, self._sizes)


class JointActions:
    """`Actions` for a nest of action specs.

    Args:
      spec: the action spec of one env.
      squash: as in `Actions`. Then all parts are continuous.

    Attributes:
      continuous: whether some part is continuous. The learner then gets the joint actions as sampled, unless
        they are squashed.
      head_spec: the spec of the joint actions, if they are squashed.
    """

    def __init__(self, spec: Any, squash: bool = False):
        self._parts = [Actions(leaf, squash) for leaf in tree.flatten(spec)]
        self._build = nests.unflattener(spec)
        self._squash = squash
        self._sizes = [part.head_spec.shape[0] if part.head_spec.shape else None for part in self._parts]
        self.continuous = any(part.continuous for part in self._parts)
        size = sum(size or 1 for size in self._sizes)
        self.head_spec: Any = dm_specs.BoundedArray((size,), np.float32, -1.0, 1.0) if squash else None

    def make_head(self, input_size: int) -> nn.Module:
        """The head of a policy; squashed actions have the head of one vector."""
        if self._squash:
            return make_policy_head(input_size, self.head_spec, squash=True)
        heads = [make_policy_head(input_size, part.head_spec) for part in self._parts]
        return JointHead(heads, self._sizes, [sum(specs.choices(part.head_spec)) for part in self._parts])

    def to_environment(self, drawn: Any) -> Any:
        """Joint actions `[B, D]`, a tensor or an array, to a nest of actions of the environment."""
        pieces = split_joint(drawn, self._sizes)
        return self._build([part.to_environment(p) for part, p in zip(self._parts, pieces, strict=True)])

    def drawn(self, data: Any) -> torch.Tensor:
        """The joint actions of a batch of transitions `[N, D]` or rows `[N, T, D]`."""
        if self.continuous and not self._squash:
            return data.extras["action"]
        leaves = zip(self._parts, tree.flatten(data.action), strict=True)
        return join([part.drawn(data._replace(action=leaf)) for part, leaf in leaves], self._sizes)

    def parameters(self, distribution: Joint) -> dict[str, Any]:
        """The parameters that determine this distribution, by the index of the part."""
        pairs = zip(self._parts, distribution.parts, strict=True)
        return {str(index): part.parameters(of) for index, (part, of) in enumerate(pairs)}

    def distribution(self, parameters: dict[str, Any]) -> Joint:
        """The distribution with these `parameters`."""
        parts = [part.distribution(parameters[str(index)]) for index, part in enumerate(self._parts)]
        return Joint(parts, self._sizes)


def make_actions(spec: Any) -> Actions | JointActions:
    """The conversions for one action spec or a nest of them."""
    return JointActions(spec) if tree.is_nested(spec) else Actions(spec)


def make_squashed_actions(spec: Any, agent: str) -> Actions | JointActions:
    """The conversions for bounded real numbers or a nest of them, sampled as one vector between -1 and 1.

    Raises:
      ValueError: The spec has other parts; `agent` is the name in the error.
    """
    parts = tree.flatten(spec)
    if not all(isinstance(part, dm_specs.BoundedArray) and part.dtype.kind == "f" for part in parts):
        raise ValueError(
            f"action spec: got {spec!r}, expected bounded real numbers or a nest of them for {agent}. "
            "Use an agent for such actions, such as PPO: see docs/agents.md."
        )
    return JointActions(spec, squash=True) if tree.is_nested(spec) else Actions(spec, squash=True)
