"""B environments stepped in the caller's thread: one after the other, or together by gymnasium."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.action_masks import MaskChecker
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment, EnvironmentFault
from framework.environments.single import SingleEnv, env_seeds
from framework.types import MultiAgentTimeStep, Nest

_MISSING = (KeyError, IndexError, TypeError)


class FieldChecker:
    """Turns the actions, observations, rewards or discounts of B envs into arrays that fit their spec.

    Attributes:
      build: a function from the arrays, one per leaf of the spec, to a nest like the spec.
    """

    def __init__(
        self, name: str, field: str, spec: Nest, num_envs: int, starts: Sequence[int] = (), first_env: int = 0
    ):
        """Makes the checker of one field.

        Args:
          name: the environment's name, for errors.
          field: `action`, `observation`, `reward` or `discount`. Integers of an action must be within the
            spec's bounds, too.
          spec: the spec of one env.
          num_envs: B.
          starts: per leaf, the first value of a gymnasium Discrete space, whose spec counts from 0.
          first_env: the number of env 0 in errors.
        """
        self._name, self._field = name, field
        self._envs, self._first_env = range(num_envs), first_env
        self._unseen = field == "observation"
        self.build = nests.unflattener(spec)
        # A spec's properties are Python calls: read once, not at every step.
        self._leaves: list[tuple[specs.Path, tuple[int, ...], np.dtype, Any, int]] = []
        self._shapes = [(num_envs, *leaf.shape) for leaf in tree.flatten(spec)]
        leaves = specs.leaves(spec)
        for (path, leaf), start in zip(leaves, starts or [0] * len(leaves), strict=True):
            bounded = field == "action" and isinstance(leaf, specs.BoundedArray) and leaf.dtype.kind in "iu"
            bounds = (leaf.minimum, leaf.maximum) if bounded else None
            self._leaves.append((path, leaf.shape, leaf.dtype, bounds, start))

    def __call__(self, nest: Nest) -> list[np.ndarray]:
        """Takes a nest of `[B, ...]`; returns one array per leaf, possibly the caller's own.

        Raises:
          EnvironmentFault: A part is missing, or has another shape or dtype, or is not finite.
        """
        try:
            arrays = [np.asarray(specs.pick(nest, leaf[0]) if leaf[0] else nest) for leaf in self._leaves]
            if [array.shape for array in arrays] != self._shapes:
                raise ValueError
        except (*_MISSING, ValueError) as error:
            raise self._find_misfit(self._shapes, [nest], [None]) from error
        if self._unseen:
            self._warn_of_rounding(arrays)
        return self._check(arrays, self._envs)

    def gather(self, values: Sequence[Nest], envs: Sequence[int]) -> list[np.ndarray]:
        """Takes one nest for each of `envs`; returns one new array `[len(envs), ...]` per leaf."""
        arrays = []
        for path, shape, dtype, _, _ in self._leaves:
            try:
                parts = [specs.pick(value, path) for value in values] if path else values
                array = np.array(parts, dtype if dtype.kind == "f" else None)
                if array.shape != (len(envs), *shape):
                    if shape:
                        raise ValueError(array.shape)
                    array = array.reshape(len(envs))  # one number may come as an array of one number
            except (*_MISSING, ValueError) as error:
                raise self._find_misfit([leaf[1] for leaf in self._leaves], values, envs) from error
            arrays.append(array)
        if self._unseen:
            self._warn_of_rounding(
                [specs.pick(values[0], leaf[0]) if leaf[0] else values[0] for leaf in self._leaves]
            )
        return self._check(arrays, envs)

    def _warn_of_rounding(self, observation: Sequence[Any]) -> None:
        """Warns, at the first observation, of floats that have more digits than their spec."""
        self._unseen = False
        for (path, _, dtype, *_), leaf in zip(self._leaves, observation, strict=True):
            given = getattr(leaf, "dtype", dtype)
            if given.kind == dtype.kind == "f" and given.itemsize > dtype.itemsize:
                place = specs.path_name(self._field, path)
                warnings.warn(
                    f"{self._name}: {place} has dtype {given}, expected {dtype}, to which it is rounded. "
                    f"Return it as {dtype}, or change the spec."
                )

    def _check(self, arrays: list[np.ndarray], envs: Sequence[int]) -> list[np.ndarray]:
        """Checks the values of arrays of the right shapes, and converts them."""
        for index, (path, _, dtype, bounds, start) in enumerate(self._leaves):
            array = arrays[index]
            if array.dtype != dtype:
                numbers = array.dtype.kind in ("iubf" if dtype.kind == "f" else "iub")
                converted = array.astype(dtype) if numbers else array
                # Integers of another size are taken if they fit.
                if not numbers or (dtype.kind != "f" and np.count_nonzero(converted != array)):
                    place = specs.path_name(self._field, path)
                    first = None if self._field == "action" else envs[0]
                    raise self._fault(f"{place} has dtype {array.dtype}, expected {dtype}", first)
                array = converted
            if dtype.kind == "f":
                # On a batch of small arrays count_nonzero() takes a fifth of the time of all().
                if np.count_nonzero(np.isfinite(array)) != array.size:
                    raise self._bad_value(path, array, ~np.isfinite(array), envs, "not finite")
            elif bounds is not None:
                outside = (array < bounds[0]) | (array > bounds[1])
                if np.count_nonzero(outside):
                    raise self._bad_value(path, array, outside, envs, f"outside {bounds[0]} ... {bounds[1]}")
            if start:  # Not negated: the dtype may be unsigned.
                array = array + start if self._field == "action" else array - start
            arrays[index] = array
        return arrays

    def _find_misfit(
        self, shapes: Sequence[tuple[int, ...]], values: Sequence[Nest], envs: Sequence[int | None]
    ) -> EnvironmentFault:
        """The fault of the first value that lacks a part or has another shape or dtype."""
        for env, value in zip(envs, values, strict=True):
            for (path, *_), shape in zip(self._leaves, shapes, strict=True):
                place, expected = specs.path_name(self._field, path), str(shape) if shape else "one number"
                try:
                    array = np.asarray(specs.pick(value, path))
                except _MISSING:
                    structure = (
                        f"{tree.map_structure(type, value)}, which lacks a part of the {self._field} spec"
                    )
                    return self._fault(f"{place} is missing from {structure}", env)
                if array.shape != shape:
                    return self._fault(f"{place} has shape {array.shape}, expected {expected}", env)
                if array.dtype.kind not in "iubf":
                    return self._fault(f"{place} has dtype {array.dtype}, expected {expected}", env)
        return self._fault(f"{self._field}: got {values!r}, expected values of one shape")

    def _bad_value(
        self, path: specs.Path, array: np.ndarray, bad: np.ndarray, envs: Sequence[int], why: str
    ) -> EnvironmentFault:
        index = int(np.nonzero(bad.reshape(len(bad), -1).any(axis=1))[0][0])
        place, env = specs.path_name(self._field, path), envs[index]
        if self._field == "action":
            return self._fault(f"{place} of env {env} is {array[index]!r}, {why}")
        what = "NaN" if np.isnan(array[index]).any() else "infinity"
        return self._fault(f"{place} holds {what}: {array[index]!r}; expected finite numbers", env)

    def _fault(self, what: str, env: int | None = None) -> EnvironmentFault:
        where = self._name if env is None else f"{self._name}, env {self._first_env + env}"
        if self._field == "action":
            fix = "Return one action per env within action_spec(); check the parameters and losses for NaN."
        else:
            fix = f"Make the environment agree with its {self._field}_spec(); see check_environment()."
        return EnvironmentFault(f"{where}: {what}. {fix}")


class InlineEnvironment(BatchedEnvironment):
    """Steps each env in turn.

    Attributes:
      columns: the `observation`, `reward` and `discount` of the last time step, and with several agents their
        step types (`agents`): one array per leaf.
    """

    can_step_envs = takes_seed = True

    def __init__(self, name: str, make_envs: Sequence[Callable[[], SingleEnv]], *, first_env: int = 0):
        """Builds the envs.

        Args:
          name: name of the environment, for errors.
          make_envs: one function per env.
          first_env: the number of env 0 in errors (a process has only some of all envs).
        """
        self.name = name
        self.num_envs = len(make_envs)
        self._first_env = first_env
        self._envs: list[SingleEnv] = []
        try:
            for index, make in enumerate(make_envs):
                self._envs.append(make())
                if self._envs[index].spec != self._envs[0].spec:
                    raise EnvironmentFault(
                        f"{name}, env {first_env + index}: got the spec {self._envs[index].spec}, expected "
                        f"{self._envs[0].spec} as in env {first_env}. All envs must have the same spec."
                    )
        except BaseException:
            self.close()
            raise
        first, num_envs = self._envs[0], self.num_envs
        self.spec = spec = first.spec
        self._check_action = FieldChecker(name, "action", spec.actions, num_envs, first.action_starts)
        self._checks = {
            "observation": FieldChecker(
                name, "observation", spec.observations, num_envs, first.observation_starts, first_env
            ),
            "reward": FieldChecker(name, "reward", spec.rewards, num_envs, (), first_env),
            "discount": FieldChecker(name, "discount", spec.discounts, num_envs, (), first_env),
        }
        self._check_mask = MaskChecker(name, spec, first_env)
        agents = specs.agents(spec)
        self._time_step = MultiAgentTimeStep if agents else dm_env.TimeStep
        if agents:
            types = dict.fromkeys(agents, specs.BoundedArray((), np.int64, FIRST, LAST))
            self._checks["agents"] = FieldChecker(name, "agents", types, num_envs, (), first_env)
        # Discrete actions of int64 are given as Python's ints, all others as arrays of their spec's dtype.
        self._discrete = [leaf.shape == () and leaf.dtype == np.int64 for leaf in tree.flatten(spec.actions)]
        self._single_action = not tree.is_nested(spec.actions)
        # The reward and the discount of the step that starts an episode.
        self._first_reward = specs.zeros(spec.rewards)
        self._first_discount = tree.map_structure(np.ones_like, specs.zeros(spec.discounts))
        self._step_types = [LAST] * num_envs  # LAST: the next step starts an episode
        self.columns: dict[str, list[np.ndarray]] = {}

    def reset(self) -> dm_env.TimeStep:
        self._step_types = [LAST] * self.num_envs
        return self._advance([None] * self.num_envs, range(self.num_envs))

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._advance(self._split(action), range(self.num_envs))

    def step_envs(self, action: Nest, active: np.ndarray) -> dm_env.TimeStep:
        return self._advance(self._split(action), np.nonzero(active)[0].tolist())

    def end_episodes(self, envs: np.ndarray) -> None:
        for env in np.nonzero(envs)[0]:
            self._step_types[env] = LAST

    def _split(self, action: Nest) -> Sequence[Nest]:
        """The action of each env. Copied, since environments may keep it and policies may reuse theirs."""
        per_leaf: list[Sequence[Any]] = [
            array.tolist() if discrete else list(array.copy())
            for array, discrete in zip(self._check_action(action), self._discrete, strict=True)
        ]
        if self._single_action:
            return per_leaf[0]
        return [self._check_action.build([leaf[env] for leaf in per_leaf]) for env in range(self.num_envs)]

    def _advance(self, actions: Sequence[Nest], envs: Sequence[int]) -> dm_env.TimeStep:
        """Steps or resets `envs`; the others keep their last values."""
        step_types = self._step_types
        observations: list[Nest] = []
        rewards: list[Nest] = [self._first_reward] * len(envs)
        discounts: list[Nest] = [self._first_discount] * len(envs)
        for index, env in enumerate(envs):
            environment = self._envs[env]
            try:
                if step_types[env] == LAST:
                    observation = environment.reset()
                    step_types[env] = FIRST
                else:
                    observation, rewards[index], discounts[index], step_types[env] = environment.step(
                        actions[env]
                    )
            except Exception as error:
                call = "reset()" if step_types[env] == LAST else f"step({actions[env]!r})"
                where = f"{self.name}, env {self._first_env + env}"
                raise EnvironmentFault(f"{where}: {call} raised {type(error).__name__}: {error}.") from error
            observations.append(observation)
        values = {"observation": observations, "reward": rewards, "discount": discounts}
        if "agents" in self._checks:
            types = [(step_types[env], self._envs[env].agents) for env in envs]
            values["agents"] = [of or dict.fromkeys(self.spec.actions, step_type) for step_type, of in types]
        columns = {field: check.gather(values[field], envs) for field, check in self._checks.items() if envs}
        if len(envs) < self.num_envs:
            for field, arrays in columns.items():
                for index, array in enumerate(arrays):
                    arrays[index] = self.columns[field][index].copy()
                    arrays[index][envs] = array
        self.columns = columns or self.columns
        timestep = self._time_step(
            step_type=np.array(step_types, np.int64),
            **{field: check.build(self.columns[field]) for field, check in self._checks.items()},
        )
        self._check_mask(timestep.step_type, timestep.observation)
        return timestep

    def render(self, env: int = 0) -> np.ndarray:
        picture = self._envs[env].render()
        if not isinstance(picture, np.ndarray):
            raise NotImplementedError(
                f"{self.name}: render() gave {type(picture).__name__}, expected an array; make the "
                "environment with render_mode='rgb_array'."
            )
        return picture

    def close(self) -> None:
        """Closes every env, even if some fail; a failure is raised at the end."""
        with contextlib.ExitStack() as stack:
            while self._envs:
                stack.callback(self._envs.pop().close)


class VectorEnvironment(BatchedEnvironment):
    """A `gymnasium.vector.VectorEnv` in `NEXT_STEP` autoreset mode, which computes all envs together.

    All envs may share one random generator (CartPole's do). The episodes of env i then depend on the number
    of envs, unlike with the other ways to step.
    """

    takes_seed = True

    def __init__(self, name: str, environment: Any, seed: int | None):
        """Takes over `environment`, which must not have been reset yet.

        Raises:
          ValueError: The environment resets in a mode other than NEXT_STEP.
        """
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv  # 0.2 s

        self.name = name
        self._environment = environment
        self.num_envs = int(environment.num_envs)
        mode = autoreset_mode(environment)
        if mode != "NextStep":
            raise ValueError(
                f"{name}: the vector environment's autoreset mode is {mode!r}, expected NEXT_STEP: otherwise "
                "the last observation of an episode is lost. Use stepping='inline' or 'processes', or make "
                "the vector environment with autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP."
            )
        self._seed: int | list[int | None] | None = seed
        if seed is not None and isinstance(environment.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            # With one integer these seed env i with it plus i: neighboring seeds would share most envs.
            self._seed = env_seeds(seed, self.num_envs)
        space, action_space = environment.single_observation_space, environment.single_action_space
        self.spec = specs.from_spaces(space, action_space)
        starts = specs.discrete_offsets
        self._check_action = FieldChecker(
            name, "action", self.spec.actions, self.num_envs, starts(action_space)
        )
        self._check_observation = FieldChecker(
            name, "observation", self.spec.observations, self.num_envs, starts(space)
        )
        self._check_reward = FieldChecker(name, "reward", self.spec.rewards, self.num_envs)
        self._check_mask = MaskChecker(name, self.spec)
        self._over: np.ndarray | None = None  # bool[B]: envs whose last step was LAST; None before a reset

    def reset(self) -> dm_env.TimeStep:
        seed, self._seed = self._seed, None
        try:
            observation, _ = self._environment.reset(seed=seed)
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: reset() raised {type(error).__name__}: {error}.") from error
        envs = self.num_envs
        self._over = np.zeros(envs, bool)
        timestep = dm_env.TimeStep(
            step_type=np.full(envs, FIRST, np.int64),
            reward=np.zeros(envs, np.float32),
            discount=np.ones(envs, np.float32),
            observation=self._take(observation),
        )
        self._check_mask(timestep.step_type, timestep.observation)
        return timestep

    def step(self, action: Nest) -> dm_env.TimeStep:
        action = self._check_action.build(self._check_action(action))
        if self._over is None:  # dm_env: a step before any reset is a reset
            return self.reset()
        try:
            observation, reward, terminated, truncated, _ = self._environment.step(action)
        except Exception as error:
            raise EnvironmentFault(f"{self.name}: step() raised {type(error).__name__}: {error}.") from error
        observation = self._take(observation)
        reward = self._check_reward(reward)[0].copy()
        over = terminated | truncated
        step_type = np.where(over, LAST, MID)
        discount = 1.0 - terminated.astype(np.float32)
        if np.count_nonzero(self._over):
            step_type[self._over] = FIRST
            reward = np.where(self._over, np.float32(0), reward)
            discount[self._over] = 1.0
            over = over & ~self._over
        self._over = over
        self._check_mask(step_type, observation)
        return dm_env.TimeStep(step_type, reward, discount, observation)

    def _take(self, observation: Nest) -> Nest:
        """Copies, since the environment may write into the same arrays again."""
        return self._check_observation.build([leaf.copy() for leaf in self._check_observation(observation)])

    def render(self, env: int = 0) -> np.ndarray:
        pictures = self._environment.render()
        if pictures is None:
            raise NotImplementedError(f"{self.name}: make the environment with render_mode='rgb_array'.")
        return np.asarray(pictures[env])

    def close(self) -> None:
        self._environment.close()


def autoreset_mode(environment: Any) -> str | None:
    """`NextStep`, `SameStep` or `Disabled` as a gymnasium vector environment declares it, or None."""
    mode = (getattr(environment, "metadata", None) or {}).get("autoreset_mode")
    return getattr(mode, "value", mode)
