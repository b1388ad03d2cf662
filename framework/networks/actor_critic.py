"""The networks of PPO and A2C: a policy and a value, with or without a memory."""

from __future__ import annotations

import math
from typing import Any

import torch
import tree
from torch import nn

from framework import specs
from framework.networks.heads import GaussianHead
from framework.networks.joint import make_actions
from framework.networks.masks import masked_policy
from framework.networks.modules import Module
from framework.networks.torsos import MLP, ObservationEncoder, RecurrentCore
from framework.specs import EnvironmentSpec


class ActorCritic(Module):
    """The distribution over actions, and the value, of an observation.

    Args:
      spec: the spec of one env.
      hidden_sizes: widths of the hidden layers of the policy and of the value.
      activation: activation of the hidden layers.
      shared: whether policy and value share hidden layers.
      recurrent: "lstm" or "gru" after the hidden layers, which are then shared. None: neither.
      recurrent_size: width of that layer.
      initial_std: initial standard deviation of continuous actions, in half-widths of their range, or in the
        environment's units without one.
      tanh_mean: whether a tanh keeps the mean of continuous actions in their range.

    Attributes:
      actions: converts between sampled actions and the environment's.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        hidden_sizes: tuple[int, ...] = (64, 64),
        activation: str = "tanh",
        *,
        shared: bool = False,
        recurrent: str | None = None,
        recurrent_size: int = 64,
        initial_std: float = 1.0,
        tanh_mean: bool = False,
    ):
        super().__init__()
        self.actions = make_actions(spec.actions)
        self.encoder = ObservationEncoder(spec.observations)

        def body() -> MLP:
            width, gain = self.encoder.output_size, math.sqrt(2.0)
            return MLP(width, hidden_sizes, activation=activation, orthogonal_gain=gain)

        self.body = body()
        self.value_body = None if shared or recurrent is not None else body()
        self.core = None
        width = self.body.output_size
        if recurrent is not None:
            self.core = RecurrentCore(width, recurrent_size, recurrent)
            width = self.core.output_size
        for leaf in tree.flatten(spec.actions) if tanh_mean else ():
            if leaf.dtype.kind == "f" and not specs.is_bounded(leaf):
                raise ValueError(
                    f"tanh_mean: got True for {leaf!r}, expected False without finite bounds, between which "
                    "the mean would lie. Give the action bounds, or leave tanh_mean out."
                )
        self.head = self.actions.make_head(width)
        for part in self.head.modules():
            if isinstance(part, GaussianHead):
                nn.init.constant_(part.log_std, math.log(initial_std))
                part.tanh_mean = tanh_mean
        self.value_head = MLP(width, (), 1, orthogonal_gain=1.0)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        """The memory's state `[B, ...]` at the start of an episode; `()` without a memory."""
        return () if self.core is None else self.core.initial_state(batch_size)

    def act(self, observation: Any, state: tuple[torch.Tensor, ...]) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """One step of `[B, ...]`: the distribution over actions, and the next state."""
        features = self.body(self.encoder(observation))
        if self.core is not None:
            features, state = self.core.step(features, state)
        return masked_policy(self.head, features, observation), state

    def forward(
        self, observation: Any, state: tuple[torch.Tensor, ...] = (), starts: torch.Tensor | None = None
    ) -> tuple[Any, torch.Tensor]:
        """The distribution over actions and the value of each row.

        Rows are `[M, ...]`. With a memory they are `[N, T, ...]`: the recurrent state begins as `state`
        `[N, ...]` and restarts where `starts [N, T]` is not 0.
        """
        encoded = self.encoder(observation)
        features = self.body(encoded)
        if self.core is not None:
            features, _ = self.core.unroll(features, state, starts)
        value_features = features if self.value_body is None else self.value_body(encoded)
        policy = masked_policy(self.head, features, observation)
        return policy, self.value_head(value_features).squeeze(-1)
