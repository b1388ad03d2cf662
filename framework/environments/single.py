"""Adapters from one dm_env or gymnasium environment to the common interface of an env."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import LAST, MID, BatchedEnvironment
from framework.types import Nest


class SingleEnv(abc.ABC):
    """One environment. It never starts a new episode by itself; the batch calls `reset`."""

    spec: specs.EnvironmentSpec

    @abc.abstractmethod
    def reset(self) -> Nest:
        """Starts an episode; returns the observation."""

    @abc.abstractmethod
    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        """`(observation, reward, discount, step_type)`; step_type is MID or LAST."""

    @abc.abstractmethod
    def render(self) -> Any:
        """A picture of the present state."""

    @abc.abstractmethod
    def close(self) -> None: ...


class GymnasiumAdapter(SingleEnv):
    """A gymnasium environment. `terminated` is LAST with discount 0, `truncated` LAST with discount 1."""

    def __init__(self, environment: Any, seed: int | None):
        self._environment = environment
        self._seed = seed
        self.spec = specs.from_spaces(environment.observation_space, environment.action_space)
        self._observation_offsets = _Offsets(self.spec.observations, environment.observation_space, -1)
        self._action_offsets = _Offsets(self.spec.actions, environment.action_space, 1)

    def reset(self) -> Nest:
        # Only the first reset is seeded: seeding again would repeat the same episode.
        seed, self._seed = self._seed, None
        observation, _ = self._environment.reset(seed=seed)
        return self._observation_offsets(observation)

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        if self._action_offsets.needed:
            action = self._action_offsets(action)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        if self._observation_offsets.needed:
            observation = self._observation_offsets(observation)
        if terminated:
            return observation, reward, 0.0, LAST
        return observation, reward, 1.0, LAST if truncated else MID

    def render(self) -> Any:
        return self._environment.render()

    def close(self) -> None:
        self._environment.close()


class _Offsets:
    """Adds `sign * start` to the leaves that come from Discrete spaces with a start other than 0."""

    def __init__(self, spec: Nest, space: Any, sign: int):
        self._spec = spec
        self._offsets = [sign * offset for offset in specs.discrete_offsets(space)]
        self.needed = any(self._offsets)

    def __call__(self, nest: Nest) -> Nest:
        if not self.needed:
            return nest
        values = [specs.pick(nest, path) for path, _ in specs.leaves(self._spec)]
        shifted = [
            value + offset if offset else value for value, offset in zip(values, self._offsets, strict=True)
        ]
        return nests.unflattener(self._spec)(shifted)


class DmEnvAdapter(SingleEnv):
    """A dm_env environment; rewards and discounts may be nested or arrays and become float32."""

    def __init__(self, environment: dm_env.Environment):
        self._environment = environment
        spec = specs.make_environment_spec(environment)
        self.spec = specs.EnvironmentSpec(
            observations=_plain_dicts(spec.observations),
            actions=_plain_dicts(spec.actions),
            rewards=tree.map_structure(_as_float32, _plain_dicts(spec.rewards)),
            discounts=tree.map_structure(_as_float32, _plain_dicts(spec.discounts)),
        )

    def reset(self) -> Nest:
        timestep = self._environment.reset()
        if not timestep.first():
            raise ValueError(f"reset() returned step_type {timestep.step_type!r}, expected FIRST.")
        return timestep.observation

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        step_type, reward, discount, observation = self._environment.step(action)
        if step_type == 0:
            raise ValueError(
                "step() returned FIRST although the step before was not LAST. End the episode with LAST."
            )
        return observation, reward, discount, int(step_type)

    def render(self) -> Any:
        render = getattr(self._environment, "render", None)
        if render is not None:
            return render()
        physics = getattr(self._environment, "physics", None)
        if physics is not None:  # dm_control
            return physics.render(height=240, width=320, camera_id=0)
        raise NotImplementedError(f"{type(self._environment).__name__} has no render() method.")

    def close(self) -> None:
        self._environment.close()


class BatchOfOne(SingleEnv):
    """A batched environment of one env, as a single one: what a factory makes with `environments.make`."""

    def __init__(self, environment: BatchedEnvironment):
        self._environment = environment
        self.spec = specs.make_environment_spec(environment)

    def reset(self) -> Nest:
        return _only(self._environment.reset().observation)

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        batched = tree.map_structure(lambda leaf: np.asarray(leaf)[None], action)
        step_type, reward, discount, observation = self._environment.step(batched)
        return _only(observation), _only(reward), _only(discount), int(step_type[0])

    def render(self) -> Any:
        return self._environment.render()

    def close(self) -> None:
        self._environment.close()


def _only(nest: Nest) -> Nest:
    return tree.map_structure(lambda leaf: leaf[0], nest)


def _plain_dicts(nest: Nest) -> Nest:
    """OrderedDicts (dm_control's) and other mappings as dicts, so that specs and values have equal types."""
    if isinstance(nest, Mapping):
        return {key: _plain_dicts(value) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*map(_plain_dicts, nest))
    if isinstance(nest, tuple | list):
        return type(nest)(map(_plain_dicts, nest))
    return nest


def _as_float32(spec: specs.Array) -> specs.Array:
    if isinstance(spec, specs.BoundedArray):
        return specs.BoundedArray(spec.shape, np.float32, spec.minimum, spec.maximum, name=spec.name)
    return specs.Array(spec.shape, np.float32, name=spec.name)


def make_env(environment: Any, seed: int | None) -> SingleEnv:
    """Wraps what a factory returned.

    Raises:
      TypeError: it is neither dm_env's nor gymnasium's.
      ValueError: it is a batch of several envs.
    """
    if isinstance(environment, BatchedEnvironment):
        if environment.num_envs == 1:
            return BatchOfOne(environment)
        raise ValueError(
            f"environment factory: got a batch of {environment.num_envs} envs, expected one env. Give the "
            "factory a parameter num_envs, so that each node can ask for the envs that it steps."
        )
    if isinstance(environment, dm_env.Environment):
        return DmEnvAdapter(environment)
    import gymnasium

    if isinstance(environment, gymnasium.Env):
        return GymnasiumAdapter(environment, seed)
    if all(hasattr(environment, name) for name in ("reset", "step", "observation_spec", "action_spec")):
        return DmEnvAdapter(environment)
    raise TypeError(
        f"the environment factory returned {type(environment).__name__}, expected a dm_env.Environment or a "
        "gymnasium.Env (environments of the old gym package: wrap them in a gymnasium.Env)."
    )


def call_factory(
    factory: Callable[..., Any], seed: int | None, options: Mapping[str, Any], num_envs: int = 1
) -> Any:
    """Calls `factory`; `seed` and `num_envs` are passed if it names such a parameter and `options` do not."""
    known: Mapping[str, Any] = {"seed": seed, "num_envs": num_envs}
    named = {name: value for name, value in known.items() if takes(factory, name)}
    return factory(**{**named, **options})


def takes(factory: Callable[..., Any], parameter: str) -> bool:
    """Whether `factory` names `parameter`."""
    try:
        return parameter in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin, say
        return False


def env_seeds(seed: int | None, num_envs: int) -> list[int | None]:
    """One independent seed per env; env i's does not depend on how many envs there are."""
    if seed is None:
        return [None] * num_envs
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(num_envs)]
