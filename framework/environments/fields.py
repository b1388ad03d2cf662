"""The border to the code of environments: checks of the actions and time steps of B envs.

The structure, shapes and dtypes of a time step are compared at each step. Its values are checked together
with those of the other steps that have been written since the last check, see `write_to`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import EnvironmentFault
from framework.types import Nest

_MISSING = (KeyError, IndexError, TypeError)
_SMALL_BYTES = 1024  # Up to this size of one env's observation, making one array of all is fastest.
_LARGEST_INTEGER = 2**24  # Up to this, float32 holds all integers.


class FieldChecker:
    """Turns the actions, observations, rewards or discounts of B envs into arrays that fit their spec.

    Attributes:
      build: a function from the arrays, one per leaf of the spec, to a nest like the spec.
      exact: what the last call got, one array per leaf, before it was converted.
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
        self._is_action, self._is_discount = field == "action", field == "discount"
        self._is_observation = field == "observation"
        self._is_number = field in ("reward", "discount")  # Floats of any size.
        self._warned: set[Any] = set()
        self._rounding = self._is_observation  # Whether a warning of rounded numbers is due.
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
        # The dtype in which one float, or one small array, of each env comes as an array.
        self._usual: np.dtype | None = None
        # The unsigned dtype and the largest of one integer of each env, from 0 on.
        self._limit: tuple[np.dtype, Any] | None = None
        if len(self._leaves) == 1 and self._leaves[0][0] == () and not self._leaves[0][4]:
            self._find_usual(*self._leaves[0][1:4])
        # Others are checked at each step: step types say what the rows are.
        self._waits = field in ("observation", "reward", "discount")

    def _find_usual(self, shape: tuple[int, ...], dtype: np.dtype, bounds: Any) -> None:
        if self._is_number and shape == () and dtype.kind == "f":
            self._usual = np.dtype(np.float64)
        elif self._is_observation and math.prod(shape) * dtype.itemsize <= _SMALL_BYTES:
            self._usual = dtype
        elif self._is_action and dtype.kind == "i" and bounds and bounds[0].shape == () and bounds[0] == 0:
            unsigned = np.dtype(f"u{dtype.itemsize}")
            self._limit = unsigned, unsigned.type(bounds[1])

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
        if self._limit is not None and type(nest) is np.ndarray and nest.shape == self._shapes[0]:
            unsigned, largest = self._limit
            # Negative numbers are large ones then.
            if nest.dtype == self._leaves[0][2] and not np.count_nonzero(nest.view(unsigned) > largest):
                return [nest]
        return self._check(self._pick(nest), self._envs)

    def gather(self, values: Sequence[Nest], envs: Sequence[int]) -> list[np.ndarray]:
        """Takes one nest for each of `envs`; returns one new array `[len(envs), ...]` per leaf."""
        return self._check([self._stack(index, values, envs) for index in range(len(self._leaves))], envs)

    def write(self, nest: Nest, rows: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> None:
        """Writes a nest of `[B, ...]`, whose values `check_values` checks later.

        Args:
          nest: as in a call.
          rows: an array `[B, ...]` of the spec's dtype per leaf.
          exact: of rewards, a float64 array per leaf for what the environment gave; else empty.
        """
        for index, array in enumerate(self._pick(nest)):
            self._write(index, array, rows[index], exact)

    def write_each(
        self, values: Sequence[Nest], rows: Sequence[np.ndarray], exact: Sequence[np.ndarray]
    ) -> None:
        """Writes one nest of each env; see `write`."""
        if self._usual is not None:
            try:
                array = np.array(values)
                if array.dtype == self._usual and array.shape == rows[0].shape:
                    for row in (*rows, *exact):
                        row[...] = array
                    return
            except ValueError:  # They have several shapes: this is told below.
                pass
        if self._looks:
            self._look_for_extra_parts(values)
        for index, (path, shape, dtype, _, start) in enumerate(self._leaves):
            row = rows[index]
            if self._is_observation:
                try:
                    for env, value in enumerate(values):
                        part = specs.pick(value, path) if path else value
                        if part.shape != shape or part.dtype != dtype:
                            break
                        row[env] = part
                    else:
                        if start:
                            row -= start
                        continue
                except (AttributeError, *_MISSING):  # A number, a list, or a part that is missing.
                    pass
            self._write(index, self._stack(index, values, self._envs), row, exact)

    def _write(self, index: int, given: np.ndarray, row: np.ndarray, exact: Sequence[np.ndarray]) -> None:
        start = self._leaves[index][4]
        if given.dtype == row.dtype or (given.dtype.kind == row.dtype.kind == "f" and self._is_number):
            row[...] = given
            if start:
                row -= start
            if not self._waits:
                self._check_values(index, row, given)
        else:  # What is wrong with it cannot be told from the row.
            array = self._fit(index, given, self._envs)
            self._check_values(index, array, given)
            row[...] = array
        if exact:
            exact[index][...] = given

    def check_values(self, rows: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> None:
        """Checks what was written: `[n * B, ...]` per leaf, the rows of n steps.

        Raises:
          EnvironmentFault: A value is not finite, or is outside the bounds that hold.
        """
        if not exact:
            for index, array in enumerate(rows):
                self._check_values(index, array, array)
        for index, given in enumerate(exact):
            # False for NaN, too.
            if given.size and not np.abs(given).max() <= _LARGEST_INTEGER:
                self._check_values(index, rows[index], given)
                if "integers" not in self._warned:
                    self._warn_of_large_rewards(given, rows[index])

    def _pick(self, nest: Nest) -> list[np.ndarray]:
        """The arrays of a nest of `[B, ...]`, of the right shapes."""
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
        return arrays

    def _stack(self, index: int, values: Sequence[Nest], envs: Sequence[int]) -> np.ndarray:
        """One leaf of several envs' nests, as a new array of the right shape."""
        path, shape, dtype, _, _ = self._leaves[index]
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
        return array

    def _look_for_extra_parts(self, values: Sequence[Nest]) -> None:
        """Warns once of parts that the spec lacks, which no agent sees."""
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
        found = []
        for index, given in enumerate(arrays):
            array = self._fit(index, given, envs)
            self._check_values(index, array, given, envs)
            if (start := self._leaves[index][4]) and self._is_action:
                array = array + start  # A negated value would wrap around in an unsigned dtype.
            found.append(array)
        self.exact = arrays
        return found

    def _fit(self, index: int, given: np.ndarray, envs: Sequence[int]) -> np.ndarray:
        """An array of the spec's dtype, counted from 0; the same one if it fits."""
        path, _, dtype, _, start = self._leaves[index]
        array = given
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
        return array - start if start and not self._is_action else array

    def _check_values(
        self, index: int, array: np.ndarray, given: np.ndarray, envs: Sequence[int] | None = None
    ) -> None:
        """Checks the values of one leaf; `given` are those that the environment returned."""
        path, _, dtype, bounds, _ = self._leaves[index]
        envs = self._envs if envs is None else envs
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

    def _warn_of_large_rewards(self, given: np.ndarray, held: np.ndarray) -> None:
        for value, near in zip(given.flat, held.flat, strict=True):
            if value != near and abs(value) > _LARGEST_INTEGER:
                self._warned.add("integers")
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
        place, value = specs.path_name(self._field, path), array[index]
        env = envs[index % len(envs)]  # The rows may come from several steps.
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
