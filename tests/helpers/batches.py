"""Learner steps on batches of numpy arrays, as tests make them."""

from __future__ import annotations

from typing import Any

from framework.networks import as_tensors
from framework.types import StepResult


def learn(learner: Any, batch: Any) -> StepResult:
    """One step of `learner` on `batch`, moved to its device first, as a dataset does."""
    return learner.step(batch._replace(data=as_tensors(batch.data, learner.device)))
