"""What is between features and a head in agents for continuous control: an MLP, or SimBa."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from framework.networks.modules import LayerNorm, Linear, Module, ReLU
from framework.networks.torsos import MLP, in_float32, orthogonal_

# Width of the input, hidden sizes and, for a network with a last layer, width of the output.
MakeBody = Callable[..., Any]
# The values of the config field `network`.
BODIES = ("mlp", "simba")


def make_body(network: str, **options: Any) -> MakeBody:
    """What makes bodies of this kind, with `options` for an `MLP`; `SimBa` has layer norms of its own."""
    return SimBa if network == "simba" else functools.partial(MLP, **options)


class SimBa(Module):
    """`[..., input_size]` to `[..., output_size]` by residual blocks (Lee et al., 2024, SimBa, section 4).

    A linear layer of width H, a block `x + W2 relu(W1 norm(x))` for each hidden size, with 4 H units between,
    and a last layer norm. It expects inputs of mean 0 and variance 1: `normalize_observations`.

    Args:
      input_size: width of the last axis of the input.
      hidden_sizes: H, once for each block.
      output_size: width of a last linear layer, float32 also with autocast; None leaves it out.
    """

    def __init__(self, input_size: int, hidden_sizes: Sequence[int], output_size: int | None = None):
        super().__init__()
        if len(set(hidden_sizes)) != 1:
            raise ValueError(
                f"hidden_sizes: got {tuple(hidden_sizes)}, expected one width, once for each block. "
                "Give (512, 512) for two, or use network 'mlp'."
            )
        width = hidden_sizes[0]
        blocks = [_SimBaBlock(width) for _ in hidden_sizes]
        self.layers = nn.Sequential(Linear(input_size, width), *blocks, LayerNorm(width))
        self.head = None if output_size is None else Linear(width, output_size)
        for linear in filter(None, (self.layers[0], self.head)):
            orthogonal_(linear, 1.0)  # type: ignore[arg-type]
        self.output_size = output_size or width

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layers(inputs)
        return features if self.head is None else in_float32(self.head, features)


class _SimBaBlock(Module):
    def __init__(self, width: int, expansion: int = 4):
        super().__init__()
        layers = Linear(width, expansion * width), Linear(expansion * width, width)
        for linear in layers:
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
        self.layers = nn.Sequential(LayerNorm(width), layers[0], ReLU(), layers[1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.layers(inputs)
