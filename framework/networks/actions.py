"""Between the actions of an environment and those that a policy's distribution is about."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs

from framework.networks.distributions import Categorical, DiagonalGaussian, MultiCategorical


class Actions:
    """Between the environment's actions and those that the policy's distribution is about.

    Choices count from 0 there. Continuous actions are in half-widths around the middle of their range (in
    the environment's own units if it has none) and may leave it: the environment gets them clipped, the
    learner as they were drawn.
    """

    def __init__(self, spec: Any):
        if tree.is_nested(spec) or not hasattr(spec, "shape"):
            raise ValueError(f"Expected one array of actions; the action spec is {spec!r}.")
        self._shape, self._dtype = tuple(spec.shape), np.dtype(spec.dtype)
        size = int(np.prod(spec.shape, dtype=np.int64))
        self.continuous = np.issubdtype(self._dtype, np.floating)
        self._single = isinstance(spec, dm_specs.DiscreteArray)
        bounded = isinstance(spec, dm_specs.BoundedArray)
        if not self.continuous and not bounded:
            raise ValueError(
                f"Expected bounds, which say how many choices there are; the action spec is {spec!r}."
            )
        low = np.broadcast_to(spec.minimum if bounded else -np.inf, spec.shape).reshape(size)
        high = np.broadcast_to(spec.maximum if bounded else np.inf, spec.shape).reshape(size)
        self._low, self._high = low, high
        if self.continuous:
            ranged = np.isfinite(low) & np.isfinite(high)
            self._middle = np.where(ranged, (np.where(ranged, low, 0) + np.where(ranged, high, 0)) / 2, 0.0)
            self._scale = np.where(ranged, (np.where(ranged, high, 1) - np.where(ranged, low, -1)) / 2, 1.0)
            self.head_spec: Any = dm_specs.Array((size,), np.float32)
        elif self._single:
            self.head_spec = spec
        else:
            counts = high.astype(np.int64) - low.astype(np.int64)
            self.head_spec = dm_specs.BoundedArray((size,), np.int64, 0, counts)

    def to_environment(self, drawn: np.ndarray) -> np.ndarray:
        """``[B]`` or ``[B, size]`` as drawn to what the environment takes, ``[B, *shape]``."""
        if self._single:
            return drawn.astype(self._dtype, copy=False)
        if self.continuous:
            values = np.clip(self._middle + self._scale * drawn, self._low, self._high)
        else:
            values = drawn + self._low
        return values.astype(self._dtype).reshape(len(drawn), *self._shape)

    def drawn(self, data: Any) -> torch.Tensor:
        """The actions of the rows ``[N, T]`` of a batch, as they were drawn."""
        if self.continuous:
            return data.extras["action"]
        if self._single:
            return data.action.long()
        low, last = self._low.astype(np.int64), np.array(self.head_spec.maximum)
        drawn = data.action.flatten(2).long() - torch.as_tensor(low, device=data.action.device)
        # Closing rows have action 0, which need not be one that there is.
        return drawn.clamp(min=0).minimum(torch.as_tensor(last, device=drawn.device))

    def parameters(self, distribution: Any) -> dict[str, torch.Tensor]:
        """What tells this distribution from others of its kind."""
        if self.continuous:
            return {"mean": distribution.mean, "log_std": distribution.log_std}
        if self._single:
            return {"logits": distribution.logits}
        return {"logits": torch.cat([part.logits for part in distribution.parts], -1)}

    def distribution(self, parameters: dict[str, torch.Tensor]) -> Any:
        """The distribution with these ``parameters``."""
        if self.continuous:
            return DiagonalGaussian(parameters["mean"], parameters["log_std"])
        if self._single:
            return Categorical(parameters["logits"])
        sizes = [int(n) + 1 for n in self.head_spec.maximum]
        return MultiCategorical(parameters["logits"], sizes)
