"""From nests of observations to one vector of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework.networks.mlp import MLP, orthogonal_
from framework.types import Nest


class NatureConv(nn.Module):
    """The convolutions of Mnih et al. (2015), "Human-level control through deep reinforcement learning".

    ``[..., C, H, W]`` (or channels last) of uint8 or float to ``[..., output_size]``. uint8 is divided by
    255. The axis with the fewest entries is taken for the channels, so both ``[4, 84, 84]`` and
    ``[84, 84, 4]`` work. Images smaller than 36 pixels, as MinAtar's 10 x 10, get one 3 x 3 convolution.

    Args:
      shape: shape of one image, three axes.
      hidden_size: width of the fully connected layer behind the convolutions.
    """

    def __init__(self, shape: Sequence[int], hidden_size: int = 512):
        super().__init__()
        if len(shape) != 3:
            raise ValueError(f"shape is {tuple(shape)}; expected three axes, as (channels, height, width).")
        self.channels_last = int(np.argmin(shape)) == 2
        channels, height, width = (shape[2], *shape[:2]) if self.channels_last else tuple(shape)
        if min(height, width) >= 36:
            kernels = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        else:
            kernels = [(16, 3, 1)]
        layers: list[nn.Module] = []
        for filters, size, stride in kernels:
            convolution = nn.Conv2d(channels, filters, size, stride)
            orthogonal_(convolution, nn.init.calculate_gain("relu"))
            layers += [convolution, nn.ReLU()]
            channels = filters
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
        if min(height, width) < 1:
            raise ValueError(f"shape is {tuple(shape)}; images need at least 3 x 3 pixels.")
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Flatten(1), nn.Linear(channels * height * width, hidden_size), nn.ReLU())
        orthogonal_(self.head[1], nn.init.calculate_gain("relu"))  # type: ignore[arg-type]
        self.output_size = hidden_size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        leading = images.shape[:-3]
        images = images.reshape(-1, *images.shape[-3:])
        if self.channels_last:
            images = images.permute(0, 3, 1, 2)
        images = images.float() / 255.0 if images.dtype == torch.uint8 else images.float()
        return self.head(self.convolutions(images)).reshape(*leading, self.output_size)


class ObservationEncoder(nn.Module):
    """Any nest of observations, with any leading axes, to one vector of features ``[..., output_size]``.

    Leaves with three axes go through ``NatureConv``; integers of a ``DiscreteArray`` become one-hot
    vectors; all other leaves are flattened. What comes out is concatenated and, if ``hidden_sizes`` is not
    empty and there is anything but images, sent through an MLP.

    Args:
      observation_spec: nest of dm_env specs of one lane.
      hidden_sizes: hidden layers behind the concatenation of the leaves that are no images.
      activation: of those hidden layers.
      image_features: width of what each image becomes.
    """

    def __init__(
        self,
        observation_spec: Nest,
        hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        image_features: int = 512,
    ):
        super().__init__()
        self._specs: list[Any] = tree.flatten(observation_spec)
        self._single = not tree.is_nested(observation_spec)
        images = {}
        width = 0
        for index, spec in enumerate(self._specs):
            if len(spec.shape) == 3:
                images[str(index)] = NatureConv(spec.shape, image_features)
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
        self.output_size = width + image_features * len(images)

    def forward(self, observation: Nest) -> torch.Tensor:
        leaves = [observation] if self._single else tree.flatten(observation)
        if len(leaves) != len(self._specs):
            raise ValueError(f"The observation has {len(leaves)} leaves; its spec has {len(self._specs)}.")
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
