"""Environments: anything from a name or a callable to one batched dm_env environment."""

from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment, EnvironmentFault
from framework.environments.factory import make

__all__ = [
    "FIRST",
    "LAST",
    "MID",
    "BatchedEnvironment",
    "EnvironmentFault",
    "make",
]
