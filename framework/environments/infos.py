"""What gymnasium has beside time steps: numbers in `info`, as metrics of episodes, and options of resets.

The numbers travel as one more observation, float64 `[2, names]`, from the single env through whatever steps
it, and leave the observations where the batch is made. Agents do not see them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import specs
from framework.environments.base import BatchedEnvironment, UnexpectedReturn
from framework.environments.single import GymnasiumAdapter
from framework.environments.wrappers import EnvironmentWrapper
from framework.types import Nest

# The observation with the numbers, and the environment's own beside it if that is no dict.
_NUMBERS, _OWN = "numbers_of_info", "own_observation"


class Customized:
    """A factory whose gymnasium environments take `reset_options` and give the numbers `names` of `info`."""

    def __init__(self, make: Callable[..., Any], names: Sequence[str], reset_options: Mapping[str, Any]):
        self._make, self._names, self._options = make, tuple(names), dict(reset_options)
        self.__qualname__ = getattr(make, "__qualname__", "environment")
        with contextlib.suppress(TypeError, ValueError):  # It may be a builtin.
            self.__signature__ = inspect.signature(make)

    def __call__(self, **arguments: Any) -> Any:
        import gymnasium  # 0.2 s

        made = self._make(**arguments)
        if isinstance(made, gymnasium.Env):
            return CustomizedAdapter(made, self._names, self._options)
        if self._options or not isinstance(made, BatchedEnvironment):
            setting = "reset_options" if self._options else "info_metrics"
            raise ValueError(
                f"{setting}: got {self._options or self._names} for a {type(made).__name__}, expected none: "
                "gymnasium's environments have them, stepped inline or by processes."
            )
        return made


class CustomizedAdapter(GymnasiumAdapter):
    """A gymnasium environment whose observations also have the newest numbers of its `info`.

    Attributes:
      inside: the environment.
    """

    def __init__(self, environment: Any, names: tuple[str, ...], options: Mapping[str, Any]):
        super().__init__(_Recorder(environment, options), None)
        self.inside, self._names = environment, names
        if names:
            own = self.spec.observations
            starts = tree.unflatten_as(own, list(self.observation_starts) or [0] * len(tree.flatten(own)))
            self.observation_starts = tree.flatten(_join(starts, 0)) if self.observation_starts else ()
            self._numbers = np.zeros((2, len(names)))  # The newest of the episode; whether there is one.
            numbers = specs.Array(self._numbers.shape, np.float64, name=_NUMBERS)
            self.spec = self.spec._replace(observations=_join(own, numbers))

    def reset(self) -> Nest:
        if self._names:
            self._numbers = np.zeros_like(self._numbers)
        return self._with_numbers(super().reset())

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        observation, *others = super().step(action)
        return (self._with_numbers(observation), *others)

    def _with_numbers(self, observation: Nest) -> Nest:
        if not self._names:
            return observation
        info, self._numbers = self._environment.info, self._numbers.copy()
        for index, name in enumerate(self._names):
            if name in info:
                self._numbers[:, index] = _number(name, info[name]), 1.0
        return _join(observation, self._numbers)


class _Recorder:
    """Keeps the `info` of a gymnasium environment, and gives its resets their options."""

    def __init__(self, environment: Any, options: Mapping[str, Any]):
        self._environment, self._options = environment, {"options": dict(options)} if options else {}
        self.info: Mapping[str, Any] = {}

    def reset(self, seed: int | None) -> Any:
        return self._take(self._environment.reset(seed=seed, **self._options))

    def step(self, action: Any) -> Any:
        return self._take(self._environment.step(action))

    def _take(self, result: Any) -> Any:
        info = result[-1] if isinstance(result, tuple) else None
        self.info = info if isinstance(info, Mapping) else {}
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class InfoNumbers(EnvironmentWrapper):
    """Takes the numbers of `info` out of the observations, and has them as `infos`."""

    def __init__(self, environment: BatchedEnvironment, names: Sequence[str]):
        super().__init__(environment)
        self._names, self._found = tuple(names), np.zeros((self.num_envs, 2, len(names)))
        self.spec = self.spec._replace(observations=_own(self.spec.observations))

    @property
    def infos(self) -> Mapping[str, np.ndarray]:
        numbers, has = self._found[:, 0], self._found[:, 1]
        return {name: np.where(has[:, i] > 0, numbers[:, i], np.nan) for i, name in enumerate(self._names)}

    def reset(self) -> dm_env.TimeStep:
        return self._take(self._environment.reset())

    def step(self, action: Any) -> dm_env.TimeStep:
        return self._take(self._environment.step(action))

    def repeat_actions(self, num_repeats: int) -> None:
        self._environment.repeat_actions(num_repeats)

    def _take(self, timestep: dm_env.TimeStep) -> dm_env.TimeStep:
        self._found = timestep.observation[_NUMBERS]
        return timestep._replace(observation=_own(timestep.observation))


def with_infos(environment: BatchedEnvironment, names: Sequence[str]) -> BatchedEnvironment:
    """The environment with the numbers `names` in its `infos`. Raises ValueError if it gives none."""
    observations = environment.spec.observations
    if isinstance(observations, dict) and _NUMBERS in observations:
        return InfoNumbers(environment, names)
    if missing := [name for name in names if name not in environment.infos]:
        raise ValueError(
            f"info_metrics: got {missing[0]!r}, expected names in the `infos` of {environment.name}, which "
            f"has {', '.join(environment.infos) or 'none'}. A batched environment has a property `infos`."
        )
    return environment


def _join(own: Any, numbers: Any) -> dict[str, Any]:
    return {**(own if isinstance(own, Mapping) else {_OWN: own}), _NUMBERS: numbers}


def _own(observations: Any) -> Any:
    if _OWN in observations:
        return observations[_OWN]
    return {name: value for name, value in observations.items() if name != _NUMBERS}


def _number(name: str, value: Any) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise UnexpectedReturn(
            f"returned info with {name!r} {value!r:.80}, expected a finite number, as info_metrics says",
            "Leave it out of info_metrics, or return a number",
        )
    return float(array.item())
