"""Schedules as functions of the env steps of a program, so that a checkpoint stores only that count.

The count lags behind the envs. Actors report steps when they ask for more: each holds back up to 64 of each
of its envs, or up to 16 at first and a sixteenth of those made later. The learner asks when it publishes, and
an actor acts with the count of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from framework.config_checks import whole_number


def linear(start: float, end: float, steps: int) -> Callable[[Any], Any]:
    """Linear from `start` at step 0 to `end` at step `steps`; constant after that.

    The function takes and returns a number, or in a loss a tensor.
    """
    whole_number("steps", steps, 1)

    def value(step: Any) -> Any:
        if isinstance(step, torch.Tensor):
            return start + (end - start) * (step.double() / steps).clamp(0.0, 1.0)
        return start + (end - start) * min(max(step / steps, 0.0), 1.0)

    return value


def linear_decay(steps: int | None, end: float = 0.0) -> Callable[[Any], Any]:
    """A factor that falls linearly from 1 to `end` over `steps` env steps; always 1 if `steps` is None."""
    return (lambda step: 1.0) if steps is None else linear(1.0, end, steps)
