"""Parts of agents for continuous control: policies and their critics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from framework.networks.torsos import MLP, ObservationEncoder
from framework.types import Nest


class PolicyNetwork(nn.Module):
    """Encoder, hidden layers and a head: observation `[..., *]` to what the head makes of the features.

    Args:
      observation_spec: nest of dm_env specs of one env.
      hidden_sizes: widths of the hidden layers.
      make_head: width of the features to the head, such as `Actions.make_head`.
      layer_norm: normalizes each hidden layer before its activation.
    """

    def __init__(
        self,
        observation_spec: Nest,
        hidden_sizes: Sequence[int],
        make_head: Callable[[int], nn.Module],
        layer_norm: bool = False,
    ):
        super().__init__()
        self.encoder = ObservationEncoder(observation_spec)
        self.body = MLP(self.encoder.output_size, hidden_sizes, layer_norm=layer_norm)
        self.head = make_head(self.body.output_size)

    def forward(self, observation: Nest) -> Any:
        return self.head(self.body(self.encoder(observation)))


class DeterministicHead(nn.Module):
    """`[..., input_size]` to actions `[..., size]` between -1 and 1, by a tanh (Lillicrap et al., 2016).

    The last layer begins with weights between -0.003 and 0.003, as in the paper: the first actions are near
    0, where the tanh passes gradients.
    """

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.actions = nn.Linear(input_size, size)
        for parameter in self.actions.parameters():
            nn.init.uniform_(parameter, -3e-3, 3e-3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.actions(features))


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Freezes the parameters of `module`. Gradients still pass through it to its inputs."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
