"""Environments: makes one batched dm_env environment from a name or a callable."""

from framework.environments import wrappers
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment, EnvironmentFault
from framework.environments.checks import Violation, check_environment
from framework.environments.factory import make
from framework.environments.tasks import TaskEnvironment
from framework.environments.wrappers import (
    ActionRepeat,
    ClipAction,
    EnvironmentWrapper,
    Flatten,
    FrameStack,
    ObservationActionReward,
    RescaleAction,
    SinglePrecision,
    StepLimit,
)

__all__ = [
    "FIRST",
    "LAST",
    "MID",
    "ActionRepeat",
    "BatchedEnvironment",
    "ClipAction",
    "EnvironmentFault",
    "EnvironmentWrapper",
    "Flatten",
    "FrameStack",
    "ObservationActionReward",
    "RescaleAction",
    "SinglePrecision",
    "StepLimit",
    "TaskEnvironment",
    "Violation",
    "check_environment",
    "make",
    "wrappers",
]
