"""From nests of observations to one vector of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework.networks.convolutions import NatureConv
from framework.networks.mlp import MLP
from framework.types import Nest


class ObservationEncoder(nn.Module):
    """Any nest of observations, with any leading axes, to one vector of features `[..., output_size]`.

    Leaves with three axes go through `make_convolution`; integers of a `DiscreteArray` become one-hot
    vectors; all other leaves are flattened. What comes out is concatenated and, if `hidden_sizes` is not
    empty and there is anything but images, sent through an MLP.

    Args:
      observation_spec: nest of dm_env specs of one env.
      hidden_sizes: hidden layers behind the concatenation of the leaves that are no images.
      activation: of those hidden layers.
      make_convolution: shape of an image to a module with `output_size`; see `convolutions`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        make_convolution: Callable[[Sequence[int]], Any] = NatureConv,
    ):
        super().__init__()
        self._specs: list[Any] = tree.flatten(observation_spec)
        self._single = not tree.is_nested(observation_spec)
        # One vector, what most observations are, needs nothing done to it.
        self.is_vector = self._single and len(self._specs[0].shape) == 1 and not hidden_sizes
        images = {}
        width = image_features = 0
        for index, spec in enumerate(self._specs):
            if len(spec.shape) == 3:
                images[str(index)] = make_convolution(spec.shape)
                image_features += images[str(index)].output_size
            elif isinstance(spec, dm_specs.DiscreteArray):
                width += spec.num_values
            else:
                width += int(np.prod(spec.shape, dtype=np.int64))
        self.images = nn.ModuleDict(images)
        self.body = (
            MLP(width, hidden_sizes, activation=activation) if width and hidden_sizes else nn.Identity()
        )
        if width and hidden_sizes:
            width = hidden_sizes[-1]
        self.output_size = width + image_features

    def forward(self, observation: Nest) -> torch.Tensor:
        if self.is_vector:
            return observation.float()
        leaves = [observation] if self._single else tree.flatten(observation)
        if len(leaves) != len(self._specs):
            raise ValueError(
                f"observation: got {len(leaves)} leaves, expected {len(self._specs)} as in its spec."
            )
        flat, features = [], []
        for index, (leaf, spec) in enumerate(zip(leaves, self._specs, strict=True)):
            if len(spec.shape) == 3:
                features.append(self.images[str(index)](leaf))
            elif isinstance(spec, dm_specs.DiscreteArray):
                flat.append(nn.functional.one_hot(leaf.long(), spec.num_values).float())
            else:
                axes = len(spec.shape)
                flat.append((leaf.unsqueeze(-1) if axes == 0 else leaf.flatten(-axes)).float())
        if flat:
            features.insert(0, self.body(flat[0] if len(flat) == 1 else torch.cat(flat, -1)))
        return features[0] if len(features) == 1 else torch.cat(features, -1)
