"""Schedules as functions of the env steps of a program, so that a checkpoint stores only that count."""

from __future__ import annotations

from collections.abc import Callable

from framework.config_checks import whole_number


def linear(start: float, end: float, steps: int) -> Callable[[int], float]:
    """Linear from `start` at step 0 to `end` at step `steps`; constant after that."""
    whole_number("steps", steps, 1)
    return lambda step: start + (end - start) * min(max(step / steps, 0.0), 1.0)


def linear_decay(steps: int | None, end: float = 0.0) -> Callable[[int], float]:
    """A factor that falls linearly from 1 to `end` over `steps` env steps; always 1 if `steps` is None."""
    return (lambda step: 1.0) if steps is None else linear(1.0, end, steps)
