"""Conversion between the actions of an environment and those of a policy's distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs

from framework.networks.distributions import Categorical, DiagonalGaussian, MultiCategorical


class Actions:
    """Converts between the environment's actions and the sampled actions of the policy's distribution.

    Discrete sampled actions count from 0. Continuous ones are in half-widths around the middle of their
    range, or in the environment's units without a range. They may exceed the range: the environment gets them
    clipped, and the learner gets them as sampled.

    Args:
      spec: the action spec of one env.
      squash: continuous actions stay in their range, -1 to 1 as drawn, for a `SquashedGaussian`. Numbers
        whose bounds are equal are left out of the drawn ones.

    Attributes:
      continuous: whether actions are real numbers.
      head_spec: what `make_policy_head` makes the head for.

    Raises:
      ValueError: if the spec is not one array, or lacks bounds that are needed.
    """

    def __init__(self, spec: Any, squash: bool = False):
        if tree.is_nested(spec) or not hasattr(spec, "shape"):
            raise ValueError(f"action spec: got {spec!r}, expected one array of actions.")
        self._shape, self._dtype = tuple(spec.shape), np.dtype(spec.dtype)
        size = int(np.prod(spec.shape, dtype=np.int64))
        self.continuous = np.issubdtype(self._dtype, np.floating)
        self._single = isinstance(spec, dm_specs.DiscreteArray)
        bounded = isinstance(spec, dm_specs.BoundedArray)
        if not self.continuous and not bounded:
            raise ValueError(
                f"action spec: got {spec!r}, expected bounds, which say how many choices there are."
            )
        low = np.broadcast_to(spec.minimum if bounded else -np.inf, spec.shape).reshape(size)
        high = np.broadcast_to(spec.maximum if bounded else np.inf, spec.shape).reshape(size)
        self._low, self._high = low, high
        ranged = np.isfinite(low) & np.isfinite(high)
        self._squash, self._free = self.continuous and squash, np.arange(size)
        if self._squash:
            self._free = np.flatnonzero(low < high)
            if not ranged.all() or not len(self._free):
                raise ValueError(
                    f"action spec: got {spec!r}, expected finite bounds, some of them not equal. Wrap the "
                    "environment, or use an agent for such actions."
                )
            self.head_spec: Any = dm_specs.BoundedArray((len(self._free),), np.float32, -1.0, 1.0)
        elif self.continuous:
            self.head_spec = dm_specs.Array((size,), np.float32)
        elif self._single:
            self.head_spec = spec
        else:
            counts = high.astype(np.int64) - low.astype(np.int64)
            self.head_spec = dm_specs.BoundedArray((size,), np.int64, 0, counts)
        if self.continuous:
            self._middle = np.where(ranged, (np.where(ranged, low, 0) + np.where(ranged, high, 0)) / 2, 0.0)
            self._scale = np.where(ranged, (np.where(ranged, high, 1) - np.where(ranged, low, -1)) / 2, 1.0)

    def to_environment(self, drawn: np.ndarray) -> np.ndarray:
        """`[B]` or `[B, D]` as drawn to what the environment takes, `[B, *shape]`."""
        if self._single:
            return drawn.astype(self._dtype, copy=False)
        if self._squash and len(self._free) < len(self._low):
            free, drawn = drawn, np.zeros((len(drawn), len(self._low)))
            drawn[:, self._free] = free
        if self.continuous:
            values = np.clip(self._middle + self._scale * drawn, self._low, self._high)
        else:
            values = drawn + self._low
        return values.astype(self._dtype).reshape(len(drawn), *self._shape)

    def drawn(self, data: Any) -> torch.Tensor:
        """The actions of a batch of transitions `[N]` or rows `[N, T]`, as they were drawn.

        Actions that may leave their range are in the extras, as `action`.
        """
        if self.continuous and not self._squash:
            return data.extras["action"]
        if self._single:
            return data.action.long()
        flat = data.action.reshape(*data.action.shape[: data.action.dim() - len(self._shape)], -1)
        if self._squash:
            middle, scale = (
                torch.as_tensor(each[self._free]).to(flat) for each in (self._middle, self._scale)
            )
            return ((flat[..., self._free] - middle) / scale).float()
        low, last = self._low.astype(np.int64), np.array(self.head_spec.maximum)
        drawn = flat.long() - torch.as_tensor(low, device=flat.device)
        # Closing rows have action 0, which need not be one that there is.
        return drawn.clamp(min=0).minimum(torch.as_tensor(last, device=drawn.device))

    def parameters(self, distribution: Any) -> dict[str, torch.Tensor]:
        """The parameters that determine this distribution."""
        if self.continuous:
            return {"mean": distribution.mean, "log_std": distribution.log_std}
        if self._single:
            return {"logits": distribution.logits}
        return {"logits": torch.cat([part.logits for part in distribution.parts], -1)}

    def distribution(self, parameters: dict[str, torch.Tensor]) -> Any:
        """The distribution with these `parameters`."""
        if self.continuous:
            return DiagonalGaussian(parameters["mean"], parameters["log_std"])
        if self._single:
            return Categorical(parameters["logits"])
        sizes = [int(n) + 1 for n in self.head_spec.maximum]
        return MultiCategorical(parameters["logits"], sizes)
