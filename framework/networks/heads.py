"""Heads of policies: features to a distribution over the actions of a spec."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from dm_env import specs as dm_specs
from torch import nn

from framework.networks import distributions
from framework.networks.mlp import orthogonal_

# A small last layer makes the first policy nearly uniform, whatever the features are.
_GAIN = 0.01


class CategoricalHead(nn.Module):
    """`[..., input_size]` to a `Categorical` over `num_actions`."""

    def __init__(self, input_size: int, num_actions: int):
        super().__init__()
        self.logits = nn.Linear(input_size, num_actions)
        orthogonal_(self.logits, _GAIN)

    def forward(self, features: torch.Tensor, legal: torch.Tensor | None = None) -> distributions.Categorical:
        return distributions.Categorical(self.logits(features), legal)


class MultiCategoricalHead(nn.Module):
    """`[..., input_size]` to a `MultiCategorical` over choices of `sizes`."""

    def __init__(self, input_size: int, sizes: tuple[int, ...]):
        super().__init__()
        self.sizes = sizes
        self.logits = nn.Linear(input_size, sum(sizes))
        orthogonal_(self.logits, _GAIN)

    def forward(
        self, features: torch.Tensor, legal: torch.Tensor | None = None
    ) -> distributions.MultiCategorical:
        return distributions.MultiCategorical(self.logits(features), self.sizes, legal)


class GaussianHead(nn.Module):
    """`[..., input_size]` to a `DiagonalGaussian`, the same standard deviation everywhere.

    Args:
      input_size: width of the features.
      size: D, the number of action dimensions.
      initial_std: standard deviation at first.
    """

    def __init__(self, input_size: int, size: int, initial_std: float = 1.0):
        super().__init__()
        self.mean = nn.Linear(input_size, size)
        orthogonal_(self.mean, _GAIN)
        self.log_std = nn.Parameter(torch.full((size,), float(np.log(initial_std))))

    def forward(self, features: torch.Tensor) -> distributions.DiagonalGaussian:
        return distributions.DiagonalGaussian(self.mean(features), self.log_std)


class SquashedGaussianHead(nn.Module):
    """`[..., input_size]` to a `SquashedGaussian` between the bounds of a spec (Haarnoja et al., 2018).

    Mean and log standard deviation both depend on the features; the latter is kept in `log_std_range` by a
    tanh, which unlike a clamp lets gradients through everywhere.
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(
        self,
        input_size: int,
        low: np.ndarray,
        high: np.ndarray,
        log_std_range: tuple[float, float] = (-5.0, 2.0),
    ):
        super().__init__()
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(
                f"action bounds: got {low} and {high}, expected finite ones for a squashed Gaussian."
            )
        if not (low < high).all():
            raise ValueError(
                f"action bounds: got {low} and {high}, expected no equal ones: a squashed Gaussian has no "
                "density between them. Leave such dimensions out."
            )
        self.both = nn.Linear(input_size, 2 * len(low))
        self._log_std_range = log_std_range
        self.register_buffer("low", torch.tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.tensor(high, dtype=torch.float32))

    def forward(self, features: torch.Tensor) -> distributions.SquashedGaussian:
        mean, log_std = self.both(features).chunk(2, -1)
        least, most = self._log_std_range
        log_std = least + 0.5 * (most - least) * (torch.tanh(log_std) + 1.0)
        return distributions.SquashedGaussian(mean, log_std, self.low, self.high)


def make_policy_head(input_size: int, action_spec: Any, squash: bool = False) -> nn.Module:
    """The head that fits one action spec of one env.

    DiscreteArray: `CategoricalHead`. Bounded integers that start at 0: `MultiCategoricalHead`. Floats
    with one axis: `SquashedGaussianHead` with `squash`, else `GaussianHead`, whose actions go beyond
    the bounds: the environment has to clip them.
    """
    if isinstance(action_spec, dm_specs.DiscreteArray):
        return CategoricalHead(input_size, int(action_spec.num_values))
    shape = getattr(action_spec, "shape", None)
    if shape is not None and len(shape) == 1 and isinstance(action_spec, dm_specs.BoundedArray):
        low = np.broadcast_to(action_spec.minimum, shape)
        high = np.broadcast_to(action_spec.maximum, shape)
        if np.issubdtype(action_spec.dtype, np.integer):
            if (low == 0).all():
                return MultiCategoricalHead(input_size, tuple(int(h) + 1 for h in high))
        elif squash:
            return SquashedGaussianHead(input_size, low, high)
    if shape is not None and len(shape) == 1 and np.issubdtype(action_spec.dtype, np.floating) and not squash:
        return GaussianHead(input_size, shape[0])
    raise ValueError(
        f"action spec: got {action_spec!r}, expected a DiscreteArray, "
        "integers that start at 0, or floats with one axis (bounded ones to squash)."
    )
