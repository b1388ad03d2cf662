"""Layers that compute otherwise in some passes of a loss: dropout, and batch renormalization.

A loss says in which, by `with` blocks. torch's `training` does not: a policy that acts, a target network and
an exported policy are modules like the learner's, and one loss may need both kinds of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from framework.networks.modules import Module

# A tensor `[N, ...]` to uniform numbers in [0, 1) of its shape, such as `LossContext.uniform_like`.
UniformLike = Callable[[torch.Tensor], torch.Tensor]


class Dropout(Module):
    """Sets inputs to 0 with probability `rate`, divides others by 1 - `rate` (Srivastava et al., 2014).

    It passes its inputs on unchanged outside of a `dropout` block.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.uniform_like: UniformLike | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.uniform_like is None:
            return inputs
        kept = self.uniform_like(inputs.float()) >= self.rate
        return inputs * (kept / (1.0 - self.rate))


class BatchRenorm(Module):
    """Batch renormalization (Ioffe, 2017, algorithm 1) of inputs `[..., size]`.

    In a `batch_statistics` block, it normalizes by the mean and variance of the batch, corrected by
    `r * x + d` to what the running statistics would give, within limits; then these move. In all other
    passes, the running statistics normalize. They are buffers, so actors and checkpoints have them. During
    the first `warm_up` batches, nothing is corrected, as in CrossQ's code (Bhatt et al., 2024).

    Each of several learners normalizes by the statistics of its own shard.
    """

    _LARGEST_SCALE, _LARGEST_SHIFT, _EPSILON = 3.0, 5.0, 1e-3

    mean: torch.Tensor
    variance: torch.Tensor
    batches: torch.Tensor

    def __init__(self, size: int, momentum: float = 0.99, warm_up: int = 100_000):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("batches", torch.zeros(1, dtype=torch.int64))
        self._momentum, self._warm_up = momentum, warm_up
        self.uses_batch = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.float()
        std = (self.variance + self._EPSILON).sqrt()
        if not self.uses_batch:
            scale = self.weight / std
            return torch.addcmul(self.bias - self.mean * scale, inputs, scale)
        rows = inputs.flatten(0, -2)
        # With a momentum of 1, torch leaves the statistics of the batch here. `var_mean` would take longer.
        mean, variance = self.mean.clone(), self.variance.clone()
        normal = nn.functional.batch_norm(
            rows, mean, variance, training=True, momentum=1.0, eps=self._EPSILON
        )
        with torch.no_grad():
            variance = variance * ((len(rows) - 1) / len(rows))  # It was the unbiased estimate.
            r, d = (variance + self._EPSILON).sqrt() / std, (mean - self.mean) / std
            is_warm, limit = self.batches >= self._warm_up, self._LARGEST_SCALE
            r = torch.where(is_warm, r.clamp(1.0 / limit, limit), torch.ones_like(r))
            d = torch.where(is_warm, d.clamp(-self._LARGEST_SHIFT, self._LARGEST_SHIFT), torch.zeros_like(d))
            self.mean.lerp_(mean, 1.0 - self._momentum)
            self.variance.lerp_(variance, 1.0 - self._momentum)
            self.batches.add_(1)
        return torch.addcmul(d * self.weight + self.bias, normal, r * self.weight).reshape(inputs.shape)


@contextmanager
def dropout(modules: Iterable[nn.Module], uniform_like: UniformLike) -> Iterator[None]:
    """`Dropout` layers of `modules` drop inputs meanwhile, by numbers of `uniform_like`."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, Dropout)]
    for layer in layers:
        layer.uniform_like = uniform_like
    try:
        yield
    finally:
        for layer in layers:
            layer.uniform_like = None


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """`BatchRenorm` layers of `module` normalize by the batch meanwhile, and their statistics move."""
    layers = [layer for layer in module.modules() if isinstance(layer, BatchRenorm)]
    for layer in layers:
        layer.uses_batch = True
    try:
        yield
    finally:
        for layer in layers:
            layer.uses_batch = False
