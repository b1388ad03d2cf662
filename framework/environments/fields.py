"""The border to the code of environments: checks of the actions and time steps of B envs, at every step."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import FIRST, LAST, MID, EnvironmentFault
from framework.types import MultiAgentTimeStep, Nest

STEP_TYPE = specs.BoundedArray((), np.int64, FIRST, LAST)
_MISSING = (KeyError, IndexError, TypeError)
_LARGEST_INTEGER = 2**24  # Up to this, float32 holds all integers.


class FieldChecker:
    """Turns the actions, observations, rewards or discounts of B envs into arrays that fit their spec.

    Attributes:
      build: a function from the arrays, one per leaf of the spec, to a nest like the spec.
      exact: of rewards, the float64 values of the last call, one array per leaf, where float32 rounds some;
        None: it holds all exactly.
    """

    def __init__(
        self, name: str, field: str, spec: Nest, num_envs: int, starts: Sequence[int] = (), first_env: int = 0
    ):
        """Makes the checker of one field.

        Args:
          name: the environment's name, for errors.
          field: `action`, `observation`, `reward`, `discount` or `agents` (step types). Integers of an
            action, values of a Discrete space and step types must be within the bounds of the spec; so must
            discounts, and within [0, 1] if it has none.
          spec: the spec of one env.
          num_envs: B.
          starts: per leaf, the first value of a gymnasium Discrete space, whose spec counts from 0.
          first_env: the number of env 0 in errors.
        """
        self._name, self._field = name, field
        self._envs, self._first_env = range(num_envs), first_env
        self._is_action, self._is_reward, self._is_discount = (
            field == name for name in ("action", "reward", "discount")
        )
        self._warned: set[Any] = set()
        self._rounding = field == "observation"  # Whether a warning of rounded numbers is due.
        # How many calls are looked at for parts that the spec lacks: a reset and a step.
        self._spec, self._looks = spec, 2 * tree.is_nested(spec)
        self.exact: list[np.ndarray] | None = None
        self.build = nests.unflattener(spec)
        # A spec's properties are Python calls: read once, not at every step.
        self._leaves: list[tuple[specs.Path, tuple[int, ...], np.dtype, Any, int]] = []
        self._shapes = [(num_envs, *leaf.shape) for leaf in tree.flatten(spec)]
        leaves = specs.leaves(spec)
        for (path, leaf), start in zip(leaves, starts or [0] * len(leaves), strict=True):
            self._leaves.append((path, leaf.shape, leaf.dtype, self._bounds(leaf), start))
        # Whether the field is one float of each env; a discount's bounds must hold 0 and 1.
        numbers = [(path, shape, dtype.kind) for path, shape, dtype, *_ in self._leaves] == [((), (), "f")]
        low, high = self._leaves[0][3][:2] if numbers and self._is_discount else (0, 1)
        self._is_quick = numbers and (self._is_reward or self._is_discount) and low <= 0 and high >= 1

    def _bounds(self, leaf: Any) -> tuple[Any, Any, bool] | None:
        """The bounds of a leaf, and whether values beyond them are an error, not a warning."""
        if self._is_discount:
            return getattr(leaf, "minimum", 0.0), getattr(leaf, "maximum", 1.0), True
        if not isinstance(leaf, specs.BoundedArray) or leaf.dtype.kind not in "iu":
            return None
        low, high, limits = leaf.minimum, leaf.maximum, np.iinfo(leaf.dtype)
        if self._field == "observation" and (low <= limits.min).all() and (high >= limits.max).all():
            return None  # Pixels, for one.
        # Networks take the values of a Discrete space as codes, and other integers as quantities.
        return low, high, self._field != "observation" or isinstance(leaf, specs.DiscreteArray)

    def __call__(self, nest: Nest) -> list[np.ndarray]:
        """Takes a nest of `[B, ...]`; returns one array per leaf, possibly the caller's own.

        Raises:
          EnvironmentFault: A part is missing, or has another shape or dtype, or is not finite, or is outside
            the bounds that hold.
        """
        arrays: list[np.ndarray] = []
        if self._looks:
            self._look_for_extra_parts([nest])
        try:
            for leaf, shape in zip(self._leaves, self._shapes, strict=True):
                array = np.asarray(specs.pick(nest, leaf[0]) if leaf[0] else nest)
                if array.shape != shape:
                    raise ValueError
                arrays.append(array)
        except (*_MISSING, ValueError) as error:
            raise self._find_misfit(self._shapes, [nest], [None]) from error
        if self._rounding:
            for (path, _, dtype, *_), array in zip(self._leaves, arrays, strict=True):
                if array.dtype != dtype:
                    self._warn_of_rounding(path, dtype, array.dtype)
        return self._check(arrays, self._envs)

    def gather(self, values: Sequence[Nest], envs: Sequence[int]) -> list[np.ndarray]:
        """Takes one nest for each of `envs`; returns one new array `[len(envs), ...]` per leaf."""
        if self._is_quick and (quick := self._gather_quickly(values)) is not None:
            return [quick]
        arrays = []
        if self._looks:
            self._look_for_extra_parts(values)
        for path, shape, dtype, _, _ in self._leaves:
            try:
                parts = [specs.pick(value, path) for value in values] if path else values
                # The spec's dtype comes later: numpy would make numbers of text, and NaN of None.
                array = np.array(parts)
                if array.shape != (len(envs), *shape):
                    if shape:
                        raise ValueError(array.shape)
                    array = array.reshape(len(envs))  # one number may come as an array of one number
                if array.dtype.kind not in "iubf":
                    raise TypeError(array.dtype)
            except (*_MISSING, ValueError) as error:
                raise self._find_misfit([leaf[1] for leaf in self._leaves], values, envs) from error
            if self._rounding and array.dtype != dtype:
                for part in parts:
                    self._warn_of_rounding(path, dtype, getattr(part, "dtype", dtype))
            arrays.append(array)
        return self._check(arrays, envs)

    def _gather_quickly(self, values: Sequence[Any]) -> np.ndarray | None:
        """Rewards or discounts that obviously fit, else None: comparing lists is faster than arrays."""
        self.exact = None
        try:
            array = np.array(values, self._leaves[0][2])
            # Text, None, NaN, and what the dtype rounds differ from the array's values.
            fits = array.ndim == 1 and array.tolist() == values
            known = values.count(0.0) + values.count(1.0) == len(values)
            if fits and (known or (self._is_reward and math.isfinite(sum(values)))):
                return array
        except (TypeError, ValueError):
            pass
        return None

    def _look_for_extra_parts(self, values: Sequence[Nest]) -> None:
        """Warns once of parts that the spec lacks, which nobody sees."""
        self._looks -= 1
        if extra := next(filter(None, (specs.extra_parts(self._spec, value) for value in values)), None):
            self._looks = 0
            warnings.warn(
                f"{self._name}: {self._field}: got the parts {', '.join(extra)}, expected none beside "
                f"{', '.join('/'.join(map(str, path)) for path, *_ in self._leaves)}: they are left out. "
                f"Add them to the {self._field}_spec(), or do not return them."
            )

    def _warn_of_rounding(
        self, path: specs.Path, dtype: np.dtype, given: Any, is_rounded: bool = False
    ) -> None:
        """Warns once of floats that have more digits than their spec, and of integers that it rounds."""
        longer = getattr(given, "kind", "") == dtype.kind == "f" and given.itemsize > dtype.itemsize
        if (longer or is_rounded) and self._rounding:
            self._rounding = False
            place = specs.path_name(self._field, path)
            warnings.warn(
                f"{self._name}: {place} has dtype {given}, expected {dtype}, to which it is rounded. "
                f"Return it as {dtype}, or change the spec."
            )

    def _check(self, arrays: list[np.ndarray], envs: Sequence[int]) -> list[np.ndarray]:
        """Checks the values of arrays of the right shapes, and converts them."""
        exact = None
        for index, (path, _, dtype, bounds, start) in enumerate(self._leaves):
            array = given = arrays[index]
            if array.dtype != dtype:
                numbers = array.dtype.kind in ("iubf" if dtype.kind == "f" else "iub")
                if numbers:
                    array = given.astype(dtype)
                # Integers of another size are taken if they fit.
                if not numbers or (dtype.kind != "f" and np.count_nonzero(array != given)):
                    place = specs.path_name(self._field, path)
                    first = None if self._is_action else envs[0]
                    raise self._fault(f"{place} has dtype {given.dtype}, expected {dtype}", first)
                if self._rounding and given.dtype.kind in "iu" and np.count_nonzero(array != given):
                    self._warn_of_rounding(path, dtype, given.dtype, is_rounded=True)
                if self._is_reward and dtype.kind == "f" and np.count_nonzero(array != given):
                    exact = list(arrays) if exact is None else exact
                    exact[index] = given.astype(np.float64)
            if start and not self._is_action:
                array = array - start
            if self._is_discount:
                inside = (array >= bounds[0]) & (array <= bounds[1])
                if np.count_nonzero(inside) != array.size:
                    raise self._bad_value(path, given, ~inside, envs, f"outside {bounds[0]} ... {bounds[1]}")
            elif dtype.kind == "f":
                # On a batch of small arrays count_nonzero() takes a fifth of the time of all().
                if np.count_nonzero(np.isfinite(array)) != array.size:
                    raise self._bad_value(path, given, ~np.isfinite(array), envs, "not finite")
            elif bounds is not None:
                outside = (array < bounds[0]) | (array > bounds[1])
                if np.count_nonzero(outside):
                    self._refuse_or_warn(path, array, outside, envs, bounds)
            if start and self._is_action:  # A negated value would wrap around in an unsigned dtype.
                array = array + start
            arrays[index] = array
        if exact is not None:
            exact = [array.astype(np.float64) for array in exact]
            if "integers" not in self._warned and any(abs(each).max() > _LARGEST_INTEGER for each in exact):
                self._warn_of_large_rewards(exact, arrays)
        self.exact = exact
        return arrays

    def _refuse_or_warn(
        self, path: specs.Path, array: np.ndarray, outside: np.ndarray, envs: Sequence[int], bounds: Any
    ) -> None:
        low, high, is_error = bounds
        fault = self._bad_value(path, array, outside, envs, f"outside {low} ... {high}")
        if is_error:
            raise fault
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(str(fault))

    def _warn_of_large_rewards(self, exact: list[np.ndarray], rounded: list[np.ndarray]) -> None:
        self._warned.add("integers")
        for given, held in zip(exact, rounded, strict=True):
            for value, near in zip(given.flat, held.flat, strict=True):
                if value != near and abs(value) > _LARGEST_INTEGER:
                    warnings.warn(
                        f"{self._name}: reward: got {value:.17g}, which float32 holds as {near:.17g}: above "
                        f"{_LARGEST_INTEGER:,} it has no digits for units. Returns are exact, but the agent "
                        "learns from the rounded rewards. Scale the rewards down."
                    )
                    return

    def _find_misfit(
        self, shapes: Sequence[tuple[int, ...]], values: Sequence[Nest], envs: Sequence[int | None]
    ) -> EnvironmentFault:
        """The fault of the first value that lacks a part or has another shape or dtype."""
        for env, value in zip(envs, values, strict=True):
            for (path, _, dtype, *_), shape in zip(self._leaves, shapes, strict=True):
                place, expected = specs.path_name(self._field, path), str(shape) if shape else "one number"
                try:
                    part = specs.pick(value, path)
                    array = np.asarray(part)
                except _MISSING:
                    return self._fault(self._missing(value, path), env)
                except ValueError as error:  # Lists of different lengths.
                    return self._fault(f"{place} is no array: {error}; expected {expected}", env)
                if array.dtype.kind not in "iubf":
                    shown = f" ({part!r:.40})" if array.size == 1 else ""
                    expected = str(dtype) if shape else expected
                    return self._fault(f"{place} has dtype {array.dtype}{shown}, expected {expected}", env)
                if array.shape != shape and not (shape == () and array.size == 1 and env is not None):
                    return self._fault(f"{place} has shape {array.shape}, expected {expected}", env)
        return self._fault(f"{self._field}: got {values!r}, expected values of one shape")

    def _missing(self, value: Nest, path: specs.Path) -> str:
        """What is wrong with a nest that lacks the part at `path`."""
        for depth, key in enumerate(path):
            place = specs.path_name(self._field, path[:depth])
            if not tree.is_nested(value):
                parts = dict.fromkeys(str(p[depth]) for p, *_ in self._leaves if p[:depth] == path[:depth])
                return f"{place} is {value!r:.60}, expected a nest with the parts {', '.join(parts)}"
            try:
                value = specs.pick(value, (key,))
            except _MISSING:
                break
        names = tree.map_structure(lambda leaf: type(leaf).__name__, value)
        return f"{place}/{key} is missing from {names}, which lacks a part of the {self._field} spec"

    def _bad_value(
        self, path: specs.Path, array: np.ndarray, bad: np.ndarray, envs: Sequence[int], why: str
    ) -> EnvironmentFault:
        index = int(np.nonzero(bad.reshape(len(bad), -1).any(axis=1))[0][0])
        place, env, value = specs.path_name(self._field, path), envs[index], array[index]
        if self._is_action:
            return self._fault(f"{place} of env {env} is {value!r}, {why}")
        if value.dtype.kind != "f" or np.isfinite(value).all():
            why = f"beyond {self._leaves[0][2]}" if why == "not finite" else why
            return self._fault(f"{place} is {value!r}, {why}", env)
        what = "NaN" if np.isnan(value).any() else "infinity"
        return self._fault(f"{place} holds {what}: {value!r}; expected finite numbers", env)

    def _fault(self, what: str, env: int | None = None) -> EnvironmentFault:
        where = self._name if env is None else f"{self._name}, env {self._first_env + env}"
        if self._is_action:
            fix = "Return one action per env within action_spec(); check the parameters and losses for NaN."
        else:
            fix = f"Make the environment agree with its {self._field}_spec(); see check_environment()."
        return EnvironmentFault(f"{where}: {what}. {fix}")


def time_step_spec(spec: specs.EnvironmentSpec) -> dm_env.TimeStep | MultiAgentTimeStep:
    """The specs of a whole time step of one env, with several agents of each agent's step type, too."""
    fields = (STEP_TYPE, spec.rewards, spec.discounts, spec.observations)
    if agents := specs.agents(spec):
        return MultiAgentTimeStep(*fields, dict.fromkeys(agents, STEP_TYPE))
    return dm_env.TimeStep(*fields)


class TimeStepChecker:
    """Checks the actions that go to B envs, and the time steps that they return.

    Attributes:
      action: the checker of the actions.
      fields: the checkers of a time step's fields, by name.
    """

    def __init__(
        self,
        name: str,
        spec: specs.EnvironmentSpec,
        num_envs: int,
        *,
        observation_starts: Sequence[int] = (),
        action_starts: Sequence[int] = (),
        first_env: int = 0,
        make: Callable[..., FieldChecker] = FieldChecker,
    ):
        """Makes the checkers of all fields; `make` makes that of one. See `FieldChecker`."""
        self._name, self._first_env, self._envs = name, first_env, range(num_envs)
        self.action = make(name, "action", spec.actions, num_envs, action_starts)
        template, starts = time_step_spec(spec), {"observation": observation_starts}
        self.fields = {
            field: make(name, field, of, num_envs, starts.get(field, ()), first_env)
            for field, of in template._asdict().items()
        }
        self._gathered = list(self.fields.values())[1:]
        self._time_step: Any = type(template)
        # Several agents are left out: one that is not in the episode has a mask of zeros.
        self._has_mask, self._has_agents = specs.has_action_mask(spec), bool(specs.agents(spec))
        self._mask_starts = np.cumsum([0, *specs.choices(spec.actions)])[:-1]

    def __call__(self, timestep: Any) -> Any:
        """A copy of a time step of B envs, checked."""
        fields = [
            check.build(copied(check(getattr(timestep, field)))) for field, check in self.fields.items()
        ]
        timestep = self._time_step(*fields)
        if self._has_mask or self._has_agents:
            self._check_together(timestep)
        return timestep

    def gather(self, step_types: Sequence[int], *values: Sequence[Nest]) -> Any:
        """The time step of B envs, from the values of its fields, one for each env."""
        fields: list[Nest] = [np.array(step_types, np.int64)]
        for check, of_envs in zip(self._gathered, values):  # noqa: B905  (one agent has no step types)
            fields.append(check.build(check.gather(of_envs, self._envs)))
        timestep = self._time_step(*fields)
        if self._has_mask or self._has_agents:
            self._check_together(timestep)
        return timestep

    def _check_together(self, timestep: Any) -> None:
        """Checks what several fields say together."""
        if self._has_mask:
            step_type, mask = arrays((timestep.step_type, specs.action_mask(timestep.observation)))
            legal = allowed(mask)
            stuck = ~np.logical_or.reduceat(legal, self._mask_starts, axis=1).all(1) & (step_type != LAST)
            if np.count_nonzero(stuck):
                env = int(np.flatnonzero(stuck)[0])
                raise EnvironmentFault(
                    f"{self._name}, env {self._first_env + env}: {specs.ACTION_MASK} is "
                    f"{legal[env].astype(int)}, expected a legal action for each choice. End the episode "
                    "where nothing can be done."
                )
        if self._has_agents:
            kind = timestep.step_type
            for name, kinds in timestep.agents.items():
                # The agents begin with the environment, and none goes on beyond its end.
                wrong = ((kind == FIRST) & (kinds != FIRST)) | ((kind == LAST) & (kinds == MID))
                if np.count_nonzero(wrong):
                    env = int(np.flatnonzero(wrong)[0])
                    raise EnvironmentFault(
                        f"{self._name}, env {self._first_env + env}: agents: {name} has step type "
                        f"{kinds[env]} where the environment's is {kind[env]}, expected FIRST with FIRST, "
                        "and FIRST or LAST with LAST."
                    )


def allowed(mask: Nest) -> np.ndarray:
    """bool`[B, A]` of a mask, which may be a nest."""
    return np.concatenate(tree.flatten(mask), axis=-1) > 0


def arrays(nest: Nest) -> Nest:
    """The nest with arrays in place of its tensors: views of those on the CPU, copies of others."""
    torch = sys.modules.get("torch")  # Whoever has made a tensor has imported it.
    if torch is None:
        return nest
    return tree.map_structure(
        lambda leaf: leaf.numpy(force=True) if isinstance(leaf, torch.Tensor) else leaf, nest
    )


def copied(leaves: Sequence[Any]) -> list[Any]:
    """Copies of arrays or tensors."""
    return [leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone() for leaf in leaves]
