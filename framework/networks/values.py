"""Heads that estimate values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from framework.networks.encoders import ObservationEncoder
from framework.networks.mlp import MLP
from framework.types import Nest


class QNetwork(nn.Module):
    """Values of all discrete actions: observation ``[..., *]`` to ``[..., num_actions]``.

    With ``dueling``, Q = V + A - mean(A) with two streams of equal hidden sizes (Wang et al., 2016, equation
    9). Images are encoded first, vectors go straight into the hidden layers.

    Args:
      observation_spec: nest of dm_env specs of one lane.
      num_actions: how many actions there are.
      hidden_sizes: hidden layers; with ``dueling``, the last one is there once per stream.
      dueling: whether values and advantages have a stream of their own.
      layer_norm: normalises each hidden layer before its activation.
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
