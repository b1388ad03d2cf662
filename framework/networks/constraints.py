"""Layers whose weights keep a constraint, which learners restore after each optimizer step.

A forward pass then costs what it costs without the constraint, and policies, target networks and checkpoints
get numbers that satisfy it.
"""

from __future__ import annotations

import torch
from torch import nn

from framework.networks.modules import Linear, Module


class Constrained:
    """A module with a method `constrain`, which learners call without gradients after each optimizer step."""

    def constrain(self) -> None:
        """Restores the constraint, in place."""
        raise NotImplementedError


class SphereLinear(Constrained, Linear):
    """A linear layer without bias, whose weights of each output have norm 1 (Lee et al., 2025, SimBaV2).

    Weights begin orthogonal (Saxe et al., 2014), as far as the sizes allow.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        nn.init.orthogonal_(self.weight)
        with torch.no_grad():
            self.constrain()

    def constrain(self) -> None:
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=1, keepdim=True))


class SpectralConv2d(Constrained, Module, nn.Conv2d):
    """A convolution divided by the largest singular value of its weights (Miyato et al., 2018).

    The weights are the matrix `[out_channels, in_channels * height * width]`, whose singular vectors are
    buffers. Power iteration moves them: some steps to begin with, and one after each optimizer step, where
    torch's `spectral_norm` makes one in each pass of `training`. Gradients pass through the singular value.
    """

    _FIRST_ITERATIONS = 15  # torch makes as many.

    left: torch.Tensor
    right: torch.Tensor

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, padding: int = 0):
        super().__init__(in_channels, out_channels, kernel_size, padding=padding)
        weight = self.weight.detach().flatten(1)
        for name, size in zip(("left", "right"), weight.shape, strict=True):
            self.register_buffer(name, nn.functional.normalize(torch.randn(size), dim=0))
        with torch.no_grad():
            for _ in range(self._FIRST_ITERATIONS):
                self.constrain()

    def constrain(self) -> None:
        weight = self.weight.flatten(1)
        nn.functional.normalize(weight @ self.right, dim=0, out=self.left)
        nn.functional.normalize(weight.T @ self.left, dim=0, out=self.right)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Products of matrices would be in bfloat16 with autocast.
        largest = (self.left.unsqueeze(1) * self.weight.flatten(1) * self.right).sum()
        return self._conv_forward(images, self.weight / largest, self.bias)
