"""Heads that estimate values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from framework.networks.encoders import ObservationEncoder
from framework.networks.mlp import MLP
from framework.types import Nest


class QNetwork(nn.Module):
    """Values of all discrete actions: observation `[..., *]` to `[..., num_actions]`.

    With `dueling`, Q = V + A - mean(A) with two streams of equal hidden sizes (Wang et al., 2016, equation
    9). Images are encoded first, vectors go straight into the hidden layers.

    Args:
      observation_spec: nest of dm_env specs of one env.
      num_actions: how many actions there are.
      hidden_sizes: hidden layers; with `dueling`, the last one is there once per stream.
      dueling: whether values and advantages have a stream of their own.
      layer_norm: normalizes each hidden layer before its activation.
    """

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: int,
        hidden_sizes: Sequence[int] = (256, 256),
        dueling: bool = False,
        layer_norm: bool = False,
    ):
        super().__init__()
        self.encoder = ObservationEncoder(observation_spec)
        width = self.encoder.output_size
        if dueling:
            self.body: nn.Module = MLP(width, hidden_sizes[:-1], layer_norm=layer_norm)
            width = hidden_sizes[-2] if len(hidden_sizes) > 1 else width
            self.head: nn.Module = MLP(width, hidden_sizes[-1:], num_actions, layer_norm=layer_norm)
            self.value: nn.Module | None = MLP(width, hidden_sizes[-1:], 1, layer_norm=layer_norm)
        else:
            self.body = MLP(width, hidden_sizes, layer_norm=layer_norm)
            width = hidden_sizes[-1] if hidden_sizes else width
            self.head = nn.Linear(width, num_actions)
            self.value = None

    def forward(self, observation: Nest) -> torch.Tensor:
        features = self.body(self.encoder(observation))
        advantages = self.head(features)
        if self.value is None:
            return advantages
        return self.value(features) + advantages - advantages.mean(-1, keepdim=True)


class Critics(nn.Module):
    """Several estimates of the value of an action: observation and action to `[count, ...]`.

    Twin critics are what SAC and TD3 take the smaller of (Fujimoto et al., 2018). Each has its own
    parameters, encoder included.

    Args:
      observation_spec: nest of dm_env specs of one env.
      action_size: D, width of the action `[..., D]`.
      hidden_sizes: hidden layers of each.
      count: how many.
      layer_norm: normalizes each hidden layer before its activation.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: int,
        hidden_sizes: Sequence[int] = (256, 256),
        count: int = 2,
        layer_norm: bool = False,
    ):
        super().__init__()
        encoders = [ObservationEncoder(observation_spec) for _ in range(count)]
        width = encoders[0].output_size + action_size
        self.encoders = nn.ModuleList(encoders)
        self.heads = nn.ModuleList(MLP(width, hidden_sizes, 1, layer_norm=layer_norm) for _ in range(count))

    def forward(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        values = [
            head(torch.cat([encoder(observation), action], -1)).squeeze(-1)
            for encoder, head in zip(self.encoders, self.heads, strict=True)
        ]
        return torch.stack(values)
