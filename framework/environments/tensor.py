"""Batched environments whose time steps are torch tensors, on a device; and their border to numpy.

torch takes a second to import, so this module does without it until there is a tensor.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import dm_env
import numpy as np

from framework import specs
from framework.environments.base import BatchedEnvironment
from framework.environments.fields import FieldChecker, copied
from framework.environments.fields import arrays as arrays
from framework.environments.rows import TimeStepChecker
from framework.environments.wrappers import EnvironmentWrapper
from framework.types import Nest

if TYPE_CHECKING:
    import torch


class TensorEnvironment(BatchedEnvironment):
    """B environments whose time steps are torch tensors on `device`, as simulators on a GPU have them.

    ```python
    timestep = environment.reset()
    timestep = environment.step(action)        # action: nest of tensors or arrays [B, ...]
    timestep.step_type                         # int64[B], on the device like all else
    timestep.reward, timestep.discount         # float32[B]
    timestep.observation                       # nest of tensors [B, ...]
    ```

    All else is as in a `BatchedEnvironment`: LAST, then FIRST at the next step, whose action is ignored. A
    returned tensor is not written again. A subclass defines `spec`, `reset` and `step`, or the functions of a
    `tensor_dynamics.TensorDynamics`.
    """

    device: torch.device


class AsArrays(EnvironmentWrapper):
    """Gives the time steps of a tensor environment as arrays, for wrappers and for policies without torch."""

    def reset(self) -> dm_env.TimeStep:
        return arrays(self._environment.reset())

    def step(self, action: Nest) -> dm_env.TimeStep:
        return arrays(self._environment.step(action))

    def repeat_actions(self, num_repeats: int) -> None:
        self._environment.repeat_actions(num_repeats)


def as_arrays(environment: BatchedEnvironment) -> BatchedEnvironment:
    """The environment itself, or one that gives the time steps of a tensor environment as arrays."""
    return environment if environment.device is None else AsArrays(environment)


class TensorChecker(FieldChecker):
    """Checks tensors where they are, with one wait for the device; what is wrong is told as of arrays.

    A call returns tensors. Arrays, and tensors of another dtype or device, are converted if they fit.

    Args:
      device: the environment's.
      arguments: of `FieldChecker`.
    """

    def __init__(self, device: Any, *arguments: Any, **options: Any):
        import torch

        super().__init__(*arguments, **options)
        like = [np.zeros((), dtype) for _, _, dtype, _, _ in self._leaves]
        self._like = [
            torch.tensor(each, device=device).expand(shape)
            for each, shape in zip(like, self._shapes, strict=True)
        ]
        self._device = device
        self._limits = [
            None if bounds is None else tuple(torch.tensor(bound, device=device) for bound in bounds[:2])
            for *_, bounds, _ in self._leaves
        ]
        # Leaves that can have wrong values.
        self._looked = [
            index
            for index, (leaf, limits) in enumerate(zip(self._like, self._limits, strict=True))
            if leaf.numel() and (limits is not None or leaf.is_floating_point())
        ]

    def __call__(self, nest: Nest) -> list[Any]:
        import torch

        self.exact = None
        if self._looks:
            self._look_for_extra_parts([nest])
        try:
            leaves = [specs.pick(nest, leaf[0]) if leaf[0] else nest for leaf in self._leaves]
        except (KeyError, IndexError, TypeError):
            leaves = []
        if leaves and all(map(_is_like, leaves, self._like)):
            good = [_is_good(leaves[index], self._limits[index]) for index in self._looked]
            if not good or bool(functools.reduce(operator.and_, good)):
                return leaves
        return [torch.tensor(array, device=self._device) for array in super().__call__(arrays(nest))]


def _is_like(leaf: Any, like: torch.Tensor) -> bool:
    return (
        type(leaf) is type(like)
        and leaf.dtype == like.dtype
        and leaf.shape == like.shape
        and leaf.device == like.device
    )


def _is_good(leaf: torch.Tensor, limits: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
    """Whether all numbers are finite, and within the limits: bool, on the device."""
    if limits is not None and limits[0].dim():
        return ((leaf >= limits[0]) & (leaf <= limits[1])).all()
    least, most = leaf.aminmax()  # NaN if there is any.
    if limits is None:
        return least.isfinite() & most.isfinite()
    return (least >= limits[0]) & (most <= limits[1])


class TensorTimeStepChecker(TimeStepChecker):
    """Checks each time step of a tensor environment, and copies it on its device."""

    def __init__(self, device: Any, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options, make=functools.partial(TensorChecker, device))

    def write_to(self, rows: Any) -> None:
        return  # Rows are arrays.

    def __call__(self, timestep: Any) -> Any:
        fields = [
            check.build(copied(check(getattr(timestep, field)))) for field, check in self.fields.items()
        ]
        self.exact = self.fields["reward"].exact
        timestep = type(self._like)(*fields)
        if self._has_mask or self._has_agents:
            self._check_together(timestep)
        return timestep


def checker(environment: BatchedEnvironment) -> Any:
    """The class of the checker of this environment's time steps."""
    device = environment.device
    return TimeStepChecker if device is None else functools.partial(TensorTimeStepChecker, device)
