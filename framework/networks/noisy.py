"""Noisy networks (Fortunato et al., 2018): linear layers whose weights have noise of a learned size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import nn

from framework.networks.modules import Linear

# A shape to standard normals.
Normal = Callable[..., torch.Tensor]


class NoisyLinear(Linear):
    """A linear layer with factorized Gaussian noise on its parameters (Fortunato et al., 2018, section 3).

    `y = (W + S * f(b) f(a)^T) x + w + s * f(b)` with `f(x) = sign(x) sqrt(|x|)` and normal noise `a` of the
    inputs and `b` of the outputs. `W` and `w` have torch's default initialization, which is the paper's.

    The noise is neither a parameter nor a buffer, so it is not saved or published. A new layer has no noise
    and computes with the means until `redraw_noise` draws some.

    Args:
      in_features: p, width of the input.
      out_features: width of the output.
      initial_noise: the initial standard deviations `S` and `s` are this divided by `sqrt(p)`.
    """

    def __init__(self, in_features: int, out_features: int, initial_noise: float = 0.5):
        super().__init__(in_features, out_features)
        size = initial_noise / math.sqrt(in_features)
        self.weight_noise = nn.Parameter(torch.full((out_features, in_features), size))
        self.bias_noise = nn.Parameter(torch.full((out_features,), size))
        self._noise: tuple[torch.Tensor, torch.Tensor] | None = None

    def redraw(self, normal: Normal | None, rows: int = 1) -> None:
        """See `redraw_noise`."""
        if normal is None:
            self._noise = None
            return
        noise = normal(rows, self.in_features + self.out_features).to(self.weight.device)
        noise = noise.sign() * noise.abs().sqrt()
        self._noise = noise[:, : self.in_features], noise[:, self.in_features :]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._noise is None:
            return super().forward(inputs)
        of_inputs, of_outputs = self._noise
        if of_inputs.shape[0] == 1:  # One noisy weight for all rows costs less than a second product.
            weight = torch.addcmul(self.weight, self.weight_noise, of_outputs.T * of_inputs)
            return nn.functional.linear(
                inputs, weight, torch.addcmul(self.bias, self.bias_noise, of_outputs[0])
            )
        noisy = nn.functional.linear(inputs * of_inputs, self.weight_noise, self.bias_noise)
        return super().forward(inputs) + noisy * of_outputs


def redraw_noise(module: nn.Module, source: torch.Generator | Normal | None, rows: int = 1) -> None:
    """Draws new noise for all `NoisyLinear` layers in `module`.

    Args:
      module: a network.
      source: a generator on the device of the network, or in a loss `context.normal`. None removes the noise,
        so that the layers compute with the means, as in an evaluation.
      rows: 1 for noise that all rows of a batch share, or the number of rows of the next batch `[rows, *]`
        for noise that is independent for each row.
    """
    normal = (
        functools.partial(torch.randn, generator=source, device=source.device)
        if isinstance(source, torch.Generator)
        else source
    )
    for layer in module.modules():
        if isinstance(layer, NoisyLinear):
            layer.redraw(normal, rows)
