"""What a world model sees and predicts: an encoder and a decoder of nests of observations (DreamerV3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree
from torch import nn

from framework import specs
from framework.losses import dreamer
from framework.networks import inputs
from framework.networks.heads import one_hot
from framework.networks.modules import Module
from framework.networks.world_model import Dense, NormActivation, linear, truncated_normal_
from framework.types import Nest

_MULTIPLES = (2, 3, 4, 4)  # Channels of the convolutions, as multiples of the depth.
_KERNEL = 5
_LEAST = 3  # Height and width from which a picture is not halved again.


class Targets:
    """Observations as a vector `[..., V]` and a picture `[..., C, H, W]`; None for what there is not.

    Numbers are in symlog units, codes are one-hot, bytes are divided by 255. Several pictures are one with
    more channels. `framework.networks.inputs` says what is what; a mask of actions is left out.

    Args:
      observation_spec: nest of dm_env specs of one env.

    Attributes:
      vector_size: V; 0 without numbers and codes.
      picture_shape: (C, H, W), or None.
      between: whether the picture has values from 0 to 1 only.

    Raises:
      ValueError: Pictures have different sizes, or there is nothing to observe.
    """

    def __init__(self, observation_spec: Nest):
        self._leaves = list(
            zip(tree.flatten(observation_spec), inputs.inputs_of(observation_spec), strict=True)
        )
        self.vector_size, shapes, between = 0, [], []
        for leaf, taken in self._leaves:
            if taken.kind == inputs.PICTURE:
                channels, height, width, _ = inputs.picture_axes(leaf.shape)
                shapes.append((channels * (leaf.shape[0] if len(leaf.shape) == 4 else 1), height, width))
                low, high = specs.bounds(leaf)
                between.append(taken.divides or bool((low >= 0).all() and (high <= 1).all()))
            elif taken.kind != inputs.MASK:
                self.vector_size += int(np.prod(leaf.shape, dtype=np.int64)) * (taken.codes or 1)
        if len({shape[1:] for shape in shapes}) > 1 or not (self.vector_size or shapes):
            raise ValueError(
                f"observation spec: got {observation_spec!r}, expected numbers, codes, or pictures of one "
                "size. Wrap the environment."
            )
        self.picture_shape = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes else None
        self.between = all(between)

    def __call__(self, observation: Nest) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        flat, pictures = [], []
        values = [observation] if isinstance(observation, torch.Tensor) else tree.flatten(observation)
        for value, (leaf, taken) in zip(values, self._leaves, strict=True):
            axes = len(leaf.shape)
            leading = value.shape[: value.dim() - axes]
            if taken.kind == inputs.CODES:
                flat.append(one_hot(value, taken.codes).reshape(*leading, -1))
            elif taken.kind != inputs.MASK:
                bytes_ = taken.divides and not value.is_floating_point()
                value = value / 255.0 if bytes_ else value.float()
                if taken.kind == inputs.PICTURE:
                    pictures.append(_channels_first(value, leaf.shape))
                else:
                    flat.append(dreamer.symlog(value.reshape(*leading, -1)))
        picture = torch.cat(pictures, -3) if pictures else None
        if picture is not None and not self.between:
            picture = dreamer.symlog(picture)
        return (torch.cat(flat, -1) if flat else None), picture


def _channels_first(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`[..., C, H, W]`, where the frames of a stack are channels."""
    if len(shape) == 2:
        return value.unsqueeze(-3)
    if inputs.picture_axes(shape)[3]:
        value = value.movedim(-1, -3)
    return value.flatten(-4, -3) if len(shape) == 4 else value


class _Convolution(Module):
    """A 5 x 5 convolution that keeps height and width, perhaps halved, then RMS norm and SiLU."""

    def __init__(self, channels: int, filters: int, halves: bool = False, has_norm: bool = True):
        super().__init__()
        self._halves = halves
        self.convolution = nn.Conv2d(channels, filters, _KERNEL, padding="same")
        truncated_normal_(self.convolution.weight, channels * _KERNEL**2)
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]
        self.norm = NormActivation(filters) if has_norm else None

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        pictures = self.convolution(pictures)
        if self._halves:
            pictures = nn.functional.max_pool2d(pictures, 2, ceil_mode=True)
        return pictures if self.norm is None else self.norm(pictures.movedim(-3, -1)).movedim(-1, -3)


def _sizes(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Height and width of a picture, and after each halving: while both stay 3 or more, at most four."""
    sizes = [(shape[-2], shape[-1])]
    while len(sizes) <= len(_MULTIPLES) and min(sizes[-1]) >= 2 * _LEAST - 1:
        sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
    return sizes


class Encoder(Module):
    """`Targets` to a vector `[..., output_size]`: dense layers, and convolutions with max-pooling.

    Args:
      targets: says what there is to encode.
      sizes: widths of the dense layers for numbers and codes.
      depth: the first convolution has 2 * depth filters.
    """

    def __init__(self, targets: Targets, sizes: Sequence[int], depth: int):
        super().__init__()
        self.output_size = 0
        self.dense = self.images = None
        if targets.vector_size:
            self.dense = Dense(targets.vector_size, sizes)
            self.output_size += sizes[-1]
        if targets.picture_shape is not None:
            channels, layers, sides = targets.picture_shape[0], [], _sizes(targets.picture_shape)
            for multiple in _MULTIPLES[: len(sides) - 1]:
                layers.append(_Convolution(channels, multiple * depth, halves=True))
                channels = multiple * depth
            self.images = nn.ModuleList(layers)
            self.output_size += channels * sides[-1][0] * sides[-1][1]

    def forward(self, vector: torch.Tensor | None, picture: torch.Tensor | None) -> torch.Tensor:
        features = []
        if self.dense is not None:
            features.append(self.dense(vector))
        if self.images is not None and picture is not None:
            leading, pictures = picture.shape[:-3], picture.flatten(0, -4) - 0.5
            for layer in self.images:
                pictures = layer(pictures)
            features.append(pictures.reshape(*leading, -1))
        return features[0] if len(features) == 1 else torch.cat(features, -1)


class Decoder(Module):
    """Features `[..., input_size]` to predictions of `Targets`, whose squared errors are the loss.

    Args:
      input_size: width of the features.
      targets: says what there is to decode.
      sizes: widths of the dense layers for numbers and codes.
      depth: as of the `Encoder`.
    """

    def __init__(self, input_size: int, targets: Targets, sizes: Sequence[int], depth: int):
        super().__init__()
        self.dense = Dense(input_size, sizes, targets.vector_size) if targets.vector_size else None
        self.convolutions: Any = None
        if targets.picture_shape is not None:
            self._sides = _sizes(targets.picture_shape)[::-1]
            filters = [multiple * depth for multiple in _MULTIPLES[: len(self._sides) - 1]][::-1]
            self._least = (*self._sides[0], filters[0])
            self.first = linear(input_size, int(np.prod(self._least)))
            self.first_norm = NormActivation(filters[0])
            layers = [_Convolution(a, b) for a, b in itertools.pairwise(filters)]
            last = _Convolution(filters[-1], targets.picture_shape[0], has_norm=False)
            self.convolutions = nn.ModuleList([*layers, last])
            self._between = targets.between

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        vector = None if self.dense is None else self.dense(features)
        if self.convolutions is None:
            return vector, None
        pictures = self.first_norm(self.first(features.flatten(0, -2)).unflatten(-1, self._least))
        pictures = pictures.movedim(-1, -3)
        for layer, side in zip(self.convolutions, self._sides[1:], strict=True):
            pictures = layer(nn.functional.interpolate(pictures, side))
        pictures = pictures.unflatten(0, features.shape[:-1])
        return vector, pictures.sigmoid() if self._between else pictures

    def loss(
        self, features: torch.Tensor, vector: torch.Tensor | None, picture: torch.Tensor | None
    ) -> torch.Tensor:
        """The squared errors `[...]`, summed over all numbers and pixels."""
        total = torch.zeros(features.shape[:-1], device=features.device)
        pairs = zip(self(features), (vector, picture), strict=True)
        for (predicted, target), axes in zip(pairs, (1, 3), strict=True):
            if predicted is not None and target is not None:
                total = total + (predicted.float() - target).square().flatten(-axes).sum(-1)
        return total
