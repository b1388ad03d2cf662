"""Observers: extra measurements of an ``EnvironmentLoop``, reported with each episode."""

from __future__ import annotations

import abc
from typing import Any

import dm_env
import numpy as np
import tree

from framework.types import Nest


class EnvironmentLoopObserver(abc.ABC):
    """Watches all envs of a loop and gives figures of the episodes that end."""

    @abc.abstractmethod
    def observe_first(self, environment: Any, timestep: dm_env.TimeStep) -> None:
        """Called after ``environment.reset()``."""

    @abc.abstractmethod
    def observe(self, environment: Any, timestep: dm_env.TimeStep, action: Nest) -> None:
        """Called after each step; ``timestep`` is what the environment answered to ``action``.

        Envs of ``timestep`` that are FIRST have just begun an episode; their action was ignored.
        """

    @abc.abstractmethod
    def get_metrics(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        """Called when the episodes of ``envs`` (int64[k]) have ended: name to one figure per env."""


class _Extremes(EnvironmentLoopObserver):
    """Minimum, maximum and mean over an episode of each number of a nest, averaged over the numbers."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._minimum = self._maximum = self._total = np.zeros((0, 0))
        self._count = np.zeros(0)

    def _clear(self, num_envs: int, width: int) -> None:
        self._minimum = np.full((num_envs, width), np.inf)
        self._maximum = np.full((num_envs, width), -np.inf)
        self._total = np.zeros((num_envs, width))
        self._count = np.zeros(num_envs)

    def _forget(self, envs: np.ndarray) -> None:
        self._minimum[envs], self._maximum[envs] = np.inf, -np.inf
        self._total[envs], self._count[envs] = 0.0, 0.0

    def _add(self, values: np.ndarray, envs: np.ndarray) -> None:
        """``values`` [B, width]; only ``envs`` (bool[B]) count."""
        if self._total.shape != values.shape:
            self._clear(*values.shape)
        chosen = envs[:, None]
        np.minimum(self._minimum, values, out=self._minimum, where=chosen)
        np.maximum(self._maximum, values, out=self._maximum, where=chosen)
        np.add(self._total, values, out=self._total, where=chosen)
        self._count += envs

    def get_metrics(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        count = np.maximum(self._count[envs], 1)[:, None]
        return {
            f"{self._prefix}_min": self._minimum[envs].min(axis=1),
            f"{self._prefix}_max": self._maximum[envs].max(axis=1),
            f"{self._prefix}_mean": (self._total[envs] / count).mean(axis=1),
        }


def _flat(nest: Nest, num_envs: int) -> np.ndarray:
    """All numbers of each env side by side, float64[B, width]."""
    leaves = [np.asarray(leaf, np.float64).reshape(num_envs, -1) for leaf in tree.flatten(nest)]
    return np.concatenate(leaves, axis=1)


class ActionObserver(_Extremes):
    """``action_min``, ``action_max``, ``action_mean`` over each episode."""

    def __init__(self) -> None:
        super().__init__("action")

    def observe_first(self, environment: Any, timestep: dm_env.TimeStep) -> None:
        self._forget(np.arange(len(self._count)))

    def observe(self, environment: Any, timestep: dm_env.TimeStep, action: Nest) -> None:
        first = timestep.step_type == dm_env.StepType.FIRST
        self._add(_flat(action, len(first)), ~first)
        if first.any():
            self._forget(np.nonzero(first)[0])


class ObservationObserver(_Extremes):
    """``observation_min``, ``observation_max``, ``observation_mean`` over each episode."""

    def __init__(self) -> None:
        super().__init__("observation")

    def observe_first(self, environment: Any, timestep: dm_env.TimeStep) -> None:
        self._forget(np.arange(len(self._count)))
        self._observe(timestep)

    def observe(self, environment: Any, timestep: dm_env.TimeStep, action: Nest) -> None:
        first = np.nonzero(timestep.step_type == dm_env.StepType.FIRST)[0]
        if first.size and len(self._count):
            self._forget(first)
        self._observe(timestep)

    def _observe(self, timestep: dm_env.TimeStep) -> None:
        num_envs = len(timestep.step_type)
        self._add(_flat(timestep.observation, num_envs), np.ones(num_envs, bool))
