"""Multi-layer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}


def make_activation(name: str) -> nn.Module:
    """The activation module called `name`: relu, tanh, elu or silu."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}, expected one of {sorted(ACTIVATIONS)}.")
    return ACTIVATIONS[name]()


def orthogonal_(module: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights with the given gain and zero biases, in place (Saxe et al., 2014)."""
    nn.init.orthogonal_(module.weight, gain)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


class MLP(nn.Module):
    """`[..., input_size]` to `[..., output_size]` through hidden layers with an activation after each.

    Args:
      input_size: width of the last axis of what comes in.
      hidden_sizes: widths of the hidden layers; empty for none.
      output_size: width of a last linear layer without activation; None leaves it out, and the last hidden
        layer is the output.
      activation: relu, tanh, elu or silu.
      orthogonal_gain: gain of orthogonal weights; None keeps torch's default initialization.
      layer_norm: normalizes each hidden layer before its activation (Ba et al., 2016).
    """

    output_size: int

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int] = (),
        output_size: int | None = None,
        activation: str = "relu",
        orthogonal_gain: float | None = None,
        layer_norm: bool = False,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        width = input_size
        for size in hidden_sizes:
            layers.append(nn.Linear(width, size))
            if layer_norm:
                layers.append(nn.LayerNorm(size))
            layers.append(make_activation(activation))
            width = size
        if output_size is not None:
            layers.append(nn.Linear(width, output_size))
            width = output_size
        if orthogonal_gain is not None:
            for layer in layers:
                if isinstance(layer, nn.Linear):
                    orthogonal_(layer, orthogonal_gain)
        self.layers = nn.Sequential(*layers)
        self.output_size = width

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:  # one call less than asking the Sequential
            inputs = layer(inputs)
        return inputs
