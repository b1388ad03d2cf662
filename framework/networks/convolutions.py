"""Networks for images: `[..., C, H, W]` (or channels last) of uint8 or float to `[..., output_size]`.

uint8 is divided by 255. The axis with the fewest entries is taken for the channels, so that both
`[4, 84, 84]` and `[84, 84, 4]` work. All have `output_size`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from framework.networks.mlp import orthogonal_

_RELU_GAIN = nn.init.calculate_gain("relu")


class _Images(nn.Module):
    """Brings images of any layout to `[M, C, H, W]` float, and the features back to the leading axes."""

    output_size: int

    def __init__(self, shape: Sequence[int]):
        super().__init__()
        if len(shape) != 3:
            raise ValueError(f"shape: got {tuple(shape)}, expected three axes, as (channels, height, width).")
        self._channels_last = int(np.argmin(shape)) == 2
        self.channels, self.height, self.width = (
            (shape[2], *shape[:2]) if self._channels_last else tuple(shape)
        )
        if min(self.height, self.width) < 3:
            raise ValueError(f"shape: got {tuple(shape)}, expected at least 3 x 3 pixels.")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        leading = images.shape[:-3]
        images = images.reshape(-1, *images.shape[-3:])
        if self._channels_last:
            images = images.permute(0, 3, 1, 2)
        device = images.device.type
        if torch.is_grad_enabled() and device == "cpu":
            # A fifth faster to learn from; to act on, in small batches, it is not. Now, as a pixel is a byte.
            images = images.contiguous(memory_format=torch.channels_last)
        if images.dtype == torch.uint8:
            # At once to what mixed precision computes in, which holds all of 0 to 255 exactly.
            mixed = torch.is_autocast_enabled(device)
            images = images.to(torch.get_autocast_dtype(device) if mixed else torch.float32).div_(255.0)
        else:
            images = images.float()
        return self.features(images).reshape(*leading, self.output_size)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """`[M, C, H, W]` float to `[M, output_size]`."""
        raise NotImplementedError


class _Stack(_Images):
    """Convolutions `(filters, size, stride)` with ReLU, then one fully connected layer with ReLU.

    MinAtar's 10 x 10 and other small images would vanish under large strides: they get the network of Young
    and Tian (2019) instead, 16 filters of 3 x 3 and a layer of 128.
    """

    def __init__(
        self,
        shape: Sequence[int],
        kernels: Sequence[tuple[int, int, int]],
        hidden_size: int | None,
        usual_size: int,
    ):
        super().__init__(shape)
        small = min(self.height, self.width) < 36
        if small:
            kernels = [(16, 3, 1)]
        if hidden_size is None:
            hidden_size = 128 if small else usual_size
        layers: list[nn.Module] = []
        channels, height, width = self.channels, self.height, self.width
        for filters, size, stride in kernels:
            convolution = nn.Conv2d(channels, filters, size, stride)
            orthogonal_(convolution, _RELU_GAIN)
            layers += [convolution, nn.ReLU()]
            channels = filters
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
        linear = nn.Linear(channels * height * width, hidden_size)
        orthogonal_(linear, _RELU_GAIN)
        self.layers = nn.Sequential(*layers, nn.Flatten(1), linear, nn.ReLU())
        self.output_size = hidden_size

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class NatureConv(_Stack):
    """Mnih et al. (2015), with a last layer of 512; images smaller than 36 pixels get MinAtar's network."""

    def __init__(self, shape: Sequence[int], hidden_size: int | None = None):
        super().__init__(shape, [(32, 8, 4), (64, 4, 2), (64, 3, 1)], hidden_size, 512)


class ShallowConv(_Stack):
    """The shallow network of IMPALA (Espeholt et al., 2018, figure 3, left), with a last layer of 256.

    Images smaller than 36 pixels get MinAtar's network.
    """

    def __init__(self, shape: Sequence[int], hidden_size: int | None = None):
        super().__init__(shape, [(16, 8, 4), (32, 4, 2)], hidden_size, 256)


class ResidualConv(_Images):
    """The deep residual network of IMPALA (Espeholt et al., 2018, figure 3, right).

    For each entry of `filters`: a 3 x 3 convolution, a 3 x 3 max-pooling that halves the image, and two
    residual blocks of two 3 x 3 convolutions; then one fully connected layer.
    """

    def __init__(self, shape: Sequence[int], filters: Sequence[int] = (16, 32, 32), hidden_size: int = 256):
        super().__init__(shape)
        layers: list[nn.Module] = []
        channels, height, width = self.channels, self.height, self.width
        for count in filters:
            layers.append(nn.Conv2d(channels, count, 3, padding=1))
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            layers += [_ResidualBlock(count), _ResidualBlock(count)]
            channels = count
            height, width = (height + 1) // 2, (width + 1) // 2
        linear = nn.Linear(channels * height * width, hidden_size)
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(1), linear, nn.ReLU())
        self.output_size = hidden_size

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.layers(images)
