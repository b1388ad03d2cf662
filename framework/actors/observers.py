"""Observers: metrics of each episode in addition to return and length, logged by an `EnvironmentLoop`."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import dm_env
import numpy as np
import tree

from framework.environments.base import BatchedEnvironment
from framework.types import FIRST, Nest


class EnvironmentLoopObserver(abc.ABC):
    """Observes all envs of a loop and returns metrics of the episodes that end."""

    @abc.abstractmethod
    def observe_first(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep) -> None:
        """Called after `environment.reset()`."""

    @abc.abstractmethod
    def observe(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep, action: Nest) -> None:
        """Called after each step. `timestep` is the result of `action`.

        Envs of `timestep` that are FIRST have just begun an episode. Their action was ignored.
        """

    @abc.abstractmethod
    def get_metrics(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        """Called when the episodes of `envs` (int64 `[k]`) have ended. Returns name to one value per env.

        An observer that has seen nothing of an episode returns NaN for it.
        """


class _Extremes(EnvironmentLoopObserver):
    """Minimum, maximum and mean over an episode of each number of a nest, averaged over the numbers."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._clear()

    def _clear(self) -> None:
        # [B, width], allocated with the first values.
        self._minimum = self._maximum = self._total = np.zeros((0, 0))
        self._count = np.zeros(0)

    def observe_first(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep) -> None:
        self._clear()

    def _begin(self, envs: np.ndarray) -> None:
        """Clears the statistics of `envs`, bool `[B]`."""
        if len(self._count):
            self._minimum[envs], self._maximum[envs] = np.inf, -np.inf
            self._total[envs], self._count[envs] = 0.0, 0.0

    def _add(self, nest: Nest, envs: np.ndarray) -> None:
        """Adds the numbers of a nest `[B, ...]`, only for `envs` (bool `[B]`)."""
        leaves = [np.asarray(leaf, np.float64).reshape(len(envs), -1) for leaf in tree.flatten(nest)]
        values = np.concatenate(leaves, axis=1)
        if self._total.shape != values.shape:
            self._minimum, self._maximum = np.full(values.shape, np.inf), np.full(values.shape, -np.inf)
            self._total, self._count = np.zeros(values.shape), np.zeros(len(envs))
        chosen = envs[:, None]
        np.minimum(self._minimum, values, out=self._minimum, where=chosen)
        np.maximum(self._maximum, values, out=self._maximum, where=chosen)
        np.add(self._total, values, out=self._total, where=chosen)
        self._count += envs

    def get_metrics(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        count, none = np.zeros(len(envs)), np.full(len(envs), np.nan)
        low = high = mean = none
        if self._total.size:
            count = self._count[envs]
            low, high = self._minimum[envs].min(axis=1), self._maximum[envs].max(axis=1)
            mean = (self._total[envs] / np.maximum(count, 1)[:, None]).mean(axis=1)
        found = {"min": low, "max": high, "mean": mean}
        return {f"{self._prefix}_{name}": np.where(count > 0, each, none) for name, each in found.items()}


class ActionObserver(_Extremes):
    """`action_min`, `action_max`, `action_mean` over each episode."""

    def __init__(self) -> None:
        super().__init__("action")

    def observe(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep, action: Nest) -> None:
        first = timestep.step_type == FIRST
        self._add(action, ~first)
        self._begin(first)


class ObservationObserver(_Extremes):
    """`observation_min`, `observation_max`, `observation_mean` over each episode."""

    def __init__(self) -> None:
        super().__init__("observation")

    def observe_first(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep) -> None:
        super().observe_first(environment, timestep)
        self._add(timestep.observation, np.ones(len(timestep.step_type), np.bool_))

    def observe(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep, action: Nest) -> None:
        self._begin(timestep.step_type == FIRST)
        self._add(timestep.observation, np.ones(len(timestep.step_type), np.bool_))


class InfoObserver(EnvironmentLoopObserver):
    """The numbers that `info_metrics` names, at the end of an episode: the newest of its `info`, or NaN."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._environment: BatchedEnvironment | None = None

    def observe_first(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep) -> None:
        self._environment = environment

    def observe(self, environment: BatchedEnvironment, timestep: dm_env.TimeStep, action: Nest) -> None:
        self._environment = environment

    def get_metrics(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        assert self._environment is not None
        infos = self._environment.infos
        return {name: np.asarray(infos[name], np.float64)[envs] for name in self._names}
