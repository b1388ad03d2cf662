"""Normalization by running statistics that are variables: the learner updates them, and actors receive them.

A wrapper of an environment would see the data of one actor only. These modules use the data that is learned
from. They change between learner steps only, so acting and learning use the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tree
from torch import nn

from framework.networks import inputs
from framework.networks.modules import Module

# Sums a tensor over several learners.
Total = Callable[[torch.Tensor], torch.Tensor]


class Moments(Module):
    """Count, mean and variance of a stream, merged batch by batch (Chan, Golub and LeVeque, 1979)."""

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(shape, dtype=torch.float64))

    def update(
        self, values: torch.Tensor, total: Total | None = None, rows: torch.Tensor | None = None
    ) -> None:
        """Adds values `[n, *shape]`; an empty batch changes nothing.

        No size depends on data, so it can be part of a compiled or captured learner step.

        Args:
          values: the values.
          total: sums a tensor over the learners that share the values; None for one learner.
          rows: bool `[n]`, which of them to add; None adds all.
        """
        values = values.double()
        add = total or (lambda tensor: tensor)
        weights = values.new_ones(len(values)) if rows is None else rows.double()
        n = add(weights.sum())
        if rows is not None:  # Rows that do not count may hold NaN, and 0 times NaN is NaN.
            weights = weights.reshape(-1, *[1] * (values.dim() - 1))
            values = values.masked_fill(weights == 0, 0.0)
        mean = add(values.sum(0)) / n.clamp(min=1.0)
        deviations = values - mean if rows is None else weights * (values - mean)
        squares = add((deviations**2).sum(0))
        count = self.count + n
        delta, divisor = mean - self.mean, count.clamp(min=1.0)
        squares = squares + delta**2 * (self.count * n / divisor)
        # Torch 2.13 drops what is added to a float64 tensor without axes when it compiles, but not to a view.
        for own, more in ((self.squares, squares), (self.mean, delta * (n / divisor)), (self.count, n)):
            own.unsqueeze(0).add_(more)

    def std(self) -> torch.Tensor:
        """Standard deviation, float32 `[*shape]`; 1 for fewer than two values."""
        variance = self.squares / self.count.clamp(min=1.0)
        return torch.where(self.count > 1, variance + 1e-8, torch.ones_like(variance)).sqrt().float()

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        """Standard deviations from the mean, float32 `[..., *shape]`, clipped at +-10."""
        # In float64: float32 has no digits left for the differences of numbers such as Unix times.
        return ((values.double() - self.mean).float() / self.std()).clamp(-10.0, 10.0)


class ObservationNormalizer(Module):
    """Scales numbers and float pictures to mean 0 and variance 1, clipped at +-10.

    Pictures of integers and codes stay as they are; see `framework.networks.inputs`.
    """

    def __init__(self, spec: Any, enabled: bool):
        super().__init__()
        leaves = tree.flatten(spec)
        chosen = [
            i
            for i, taken in enumerate(inputs.inputs_of(spec))
            if taken.kind == inputs.NUMBERS
            or (taken.kind == inputs.PICTURE and np.issubdtype(leaves[i].dtype, np.floating))
        ]
        self._indices = chosen if enabled else []
        self._moments = [Moments(leaves[i].shape) for i in self._indices]
        self.moments = nn.ModuleList(self._moments)

    def forward(self, observation: Any) -> Any:
        if not self._indices:
            return observation
        leaves = tree.flatten(observation)
        for index, moments in zip(self._indices, self._moments, strict=True):
            leaves[index] = moments.normalize(leaves[index])
        return tree.unflatten_as(observation, leaves)

    def records(self, record: Any) -> Any:
        """A named tuple such as a `Transition` with all observations scaled, now and next, in extras too."""
        fields = dict(zip(record._fields, record, strict=True))
        for name, value in fields.items():
            if name in ("observation", "next_observation"):
                fields[name] = self(value)
            elif hasattr(value, "_fields"):
                fields[name] = self.records(value)
        return type(record)(**fields)

    def update(self, observation: Any, rows: torch.Tensor | None = None, total: Total | None = None) -> None:
        """Adds observations `[N, T, ...]` where `rows`, bool `[N, T]`, is True; all `[N, ...]` without."""
        leaves = tree.flatten(observation)
        for index, moments in zip(self._indices, self._moments, strict=True):
            leaf = leaves[index]
            if rows is None:
                moments.update(leaf, total)
            else:
                moments.update(leaf.flatten(0, 1), total, rows.flatten())


class RewardScale(Module):
    """Rewards divided by the standard deviation of all running returns so far, clipped at +-10.

    A running return is the discounted sum of an env's rewards since its episode began, newest last:
    R_t = gamma R_{t-1} + r_t, as in baselines' `VecNormalize` (Dhariwal et al., 2017). It goes on from one
    unroll to the next: one that restarted there would be smaller, the more so the shorter the unrolls are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.returns = Moments(())

    def forward(self, rewards: torch.Tensor) -> torch.Tensor:
        return (rewards / self.returns.std()).clamp(-10.0, 10.0)

    def update(
        self,
        rewards: torch.Tensor,
        starts: torch.Tensor,
        mask: torch.Tensor,
        gamma: float,
        total: Total | None = None,
        before: torch.Tensor | None = None,
    ) -> None:
        """Adds the running returns of rewards `[N, T]`.

        Args:
          rewards: float `[N, T]`.
          starts: `[N, T]`, 1 where an episode begins.
          mask: `[N, T]`, 0 for rows that do not count.
          gamma: the discount.
          total: sums a tensor over several learners.
          before: `[N]`, the running returns before the first rows. None: 0.
        """
        so_far: Any = torch.zeros_like(rewards[:, 0]) if before is None else before
        returns = []
        # Rows that do not count may hold NaN, and 0 times NaN is NaN.
        rewards = torch.where(mask > 0, rewards, torch.zeros_like(rewards)).double()
        for reward, start, counts in zip(rewards.unbind(1), starts.unbind(1), mask.unbind(1), strict=True):
            so_far = torch.where(counts > 0, reward + gamma * so_far * (start == 0), so_far)
            returns.append(so_far)
        self.returns.update(torch.stack(returns, 1)[mask > 0], total)


class BoundedRewardScale(Module):
    """Rewards divided so that running returns have a standard deviation of at most 1, and are within a limit.

    The divisor is the larger of their standard deviation and their largest size / `limit` (Lee et al., 2025,
    SimBaV2, section 4.3).
    """

    largest: torch.Tensor

    def __init__(self, limit: float):
        super().__init__()
        self.returns, self._limit = Moments(()), limit
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards / torch.maximum(self.returns.std(), self.largest / self._limit)

    def update(self, returns: torch.Tensor, total: Total | None = None, largest: Total | None = None) -> None:
        """Adds running returns `[N]`; `largest` is a function as `LossContext.largest`."""
        self.returns.update(returns, total)
        size = torch.maximum(self.largest, returns.abs().amax())
        self.largest.copy_(size if largest is None else largest(size))
