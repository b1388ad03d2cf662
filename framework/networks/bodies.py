"""What is between features and a head in agents for continuous control: an MLP, SimBa, or SimBaV2."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from framework.networks.constraints import SphereLinear
from framework.networks.modules import LayerNorm, Linear, Module, ReLU
from framework.networks.torsos import MLP, in_float32, orthogonal_

# Width of the input, hidden sizes and, for a network with a last layer, width of the output.
MakeBody = Callable[..., Any]
# The values of the config field `network`.
BODIES = ("mlp", "simba", "simba_v2")


def make_body(network: str, **options: Any) -> MakeBody:
    """What makes bodies of this kind, with `options` for an `MLP`; the others have norms of their own."""
    return {"simba": SimBa, "simba_v2": SimBaV2}.get(network) or functools.partial(MLP, **options)


def _one_width(hidden_sizes: Sequence[int]) -> int:
    if len(set(hidden_sizes)) != 1:
        raise ValueError(
            f"hidden_sizes: got {tuple(hidden_sizes)}, expected one width, once for each block. "
            "Give (512, 512) for two, or use network 'mlp'."
        )
    return hidden_sizes[0]


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
        width = _one_width(hidden_sizes)
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


class SimBaV2(Module):
    """`[..., input_size]` to `[..., output_size]` on the unit sphere (Lee et al., 2025, SimBaV2, section 4).

    With `l2(x) = x / |x|`, `SphereLinear` layers W and vectors of scales s, all learned, of width H:

    ```text
    x = l2(s * W l2([inputs, 3]))                       the 3 keeps the length of the inputs
    x = l2(x + a * (l2(W2 relu(s * W1 x)) - x))         a block for each hidden size, with 4 H units between
    outputs = W2 (s * W1 x) + b                         where there is a last layer
    ```

    It expects inputs of mean 0 and variance 1: `normalize_observations`.

    Args:
      input_size: width of the last axis of the input.
      hidden_sizes: H, once for each block.
      output_size: width of the outputs, float32 also with autocast; None leaves them out.
    """

    _SHIFT = 3.0

    def __init__(self, input_size: int, hidden_sizes: Sequence[int], output_size: int | None = None):
        super().__init__()
        width, step = _one_width(hidden_sizes), 1.0 / (len(hidden_sizes) + 1)
        scale = _Scale(width, math.sqrt(2.0 / width))
        self.embedding = nn.Sequential(SphereLinear(input_size + 1, width), scale)
        self.layers = nn.Sequential(*[_SphereBlock(width, step) for _ in hidden_sizes])
        self.head = None if output_size is None else self.make_output(width, output_size)
        self.output_size = output_size or width

    @staticmethod
    def make_output(width: int, output_size: int, parts: int = 1) -> nn.Module:
        """A last layer for features of this `width`; `parts` of its outputs share no weights."""
        return _SphereOutput(width, output_size // parts, parts)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = nn.functional.pad(inputs, (0, 1), value=self._SHIFT)
        features: torch.Tensor = self.layers(_l2(self.embedding(_l2(inputs))))
        return features if self.head is None else in_float32(self.head, features)


def _l2(inputs: torch.Tensor) -> torch.Tensor:
    return inputs / torch.linalg.vector_norm(inputs, dim=-1, keepdim=True).clamp_min(1e-8)


class _Scale(Module):
    """Multiplies by learned numbers. They begin at `initial`, stored as `stored`: less learns faster."""

    def __init__(self, width: int, initial: float, stored: float | None = None):
        super().__init__()
        stored = initial if stored is None else stored
        self.weight, self._factor = nn.Parameter(torch.full((width,), stored)), initial / stored

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (self.weight * self._factor)


class _SphereBlock(Module):
    def __init__(self, width: int, step: float, expansion: int = 4):
        super().__init__()
        inner = expansion * width
        self.first, self.second = SphereLinear(width, inner), SphereLinear(inner, width)
        self.scale = _Scale(inner, math.sqrt(2.0 / inner))
        self.step = _Scale(width, step, 1.0 / math.sqrt(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.scale(self.first(inputs))) + 1e-8  # Zeros have no direction.
        return _l2(inputs + self.step(_l2(self.second(hidden)) - inputs))


class _SphereOutput(Module):
    def __init__(self, width: int, size: int, parts: int):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(SphereLinear(width, width), _Scale(width, 1.0), SphereLinear(width, size))
            for _ in range(parts)
        )
        self.bias = nn.Parameter(torch.zeros(parts * size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(inputs) for part in self.parts], -1) + self.bias
