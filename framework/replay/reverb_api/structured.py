"""Patterns for ``StructuredWriter``: which slices of the last steps make an item, and when.

::

    step = structured.create_reference_step({"observation": None, "reward": None})
    pattern = {"o": step["observation"][-3:], "r": step["reward"][-1]}
    config = structured.create_config(
        pattern, "replay", conditions=[structured.Condition.step_index() % 2 == 0]
    )
    writer = client.structured_writer([config])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dm_env.specs
import numpy as np

from framework import nest as nests
from framework.types import Nest

# The steps that a pattern covers, as a reader of columns: (path, number of last steps) -> [L, ...].
PriorityFn = Callable[[Callable[[str, int], np.ndarray], int], float]


class Reference:
    """A leaf of the step that a pattern refers to; index it with negative numbers to say which of the last
    steps."""

    __slots__ = ("path",)

    def __init__(self, path: str):
        self.path = path

    def __getitem__(self, index: Any) -> Pattern:
        if isinstance(index, slice):
            start, stop, step = index.start, index.stop, 1 if index.step is None else index.step
            if start is None or start >= 0 or (stop is not None and (stop > 0 or stop <= start)) or step < 1:
                raise ValueError(
                    f"pattern of {self.path!r}: got [{start}:{stop}:{index.step}], expected a "
                    "negative start, a later "
                    "stop that is negative or None, and a positive stride"
                )
            return Pattern(self.path, start, None if stop in (0, None) else stop, step, False)
        if isinstance(index, (int, np.integer)) and index < 0:
            return Pattern(self.path, int(index), None, 1, True)
        raise ValueError(
            f"pattern of {self.path!r}: got index {index!r}, expected a negative number or a slice"
        )


@dataclass(frozen=True)
class Pattern:
    """``path[start:stop:step]``, or ``path[start]`` without a time axis if ``squeeze``."""

    path: str
    start: int
    stop: int | None
    step: int
    squeeze: bool

    @property
    def index(self) -> Any:
        """What to index a history with."""
        return self.start if self.squeeze else slice(self.start, self.stop, self.step)

    @property
    def length(self) -> int | None:
        """Steps that it selects; None without a time axis."""
        if self.squeeze:
            return None
        return len(range(self.start, 0 if self.stop is None else self.stop, self.step))


@dataclass(frozen=True)
class Moment:
    """What conditions look at: ``step_index`` counts from 0 in the episode."""

    step_index: int
    steps_since_applied: int
    is_end_episode: bool
    data: Callable[[str], np.ndarray]


class Condition:
    """A test that must hold for a pattern to be applied: ``Condition.step_index() % 2 == 0``,
    ``Condition.is_end_episode()``."""

    def __init__(self, test: Callable[[Moment], bool], at_end: bool = False):
        self.test = test
        #: Whether it asks for the end of an episode; it is looked at only then.
        self.at_end = at_end

    @staticmethod
    def step_index() -> Quantity:
        """The number of the step in its episode, from 0."""
        return Quantity(lambda moment: moment.step_index)

    @staticmethod
    def steps_since_applied() -> Quantity:
        """Steps since the pattern was applied last, or since the episode began; this one included."""
        return Quantity(lambda moment: moment.steps_since_applied)

    @staticmethod
    def is_end_episode() -> Condition:
        """The call is ``end_episode``; the last step of the episode is the last of the pattern."""
        return Condition(lambda moment: moment.is_end_episode, at_end=True)

    @staticmethod
    def data(step_structure: Nest) -> Nest:
        """The nest of the step's values (scalars): ``Condition.data(step)["reward"] >= 1``."""
        leaves, structure = nests.flatten(step_structure)
        paths = nests.paths(structure)
        return nests.packer(structure)([Quantity(_value_of(path)) for path in paths][: len(leaves)])


def _value_of(path: str) -> Callable[[Moment], float]:
    def value(moment: Moment) -> float:
        data = moment.data(path)
        if data.size != 1:
            raise ValueError(f"condition on {path!r}: got shape {data.shape}, expected a scalar")
        return data.reshape(()).item()

    return value


class Quantity:
    """A number that a condition compares."""

    def __init__(self, value: Callable[[Moment], float]):
        self._value = value

    def __mod__(self, divisor: int) -> Quantity:
        return Quantity(lambda moment: self._value(moment) % divisor)

    def _compare(self, relation: Callable[[Any, Any], bool], other: float) -> Condition:
        return Condition(lambda moment: bool(relation(self._value(moment), other)))

    def __eq__(self, other: Any) -> Condition:  # type: ignore[override]
        return self._compare(operator.eq, other)

    def __ne__(self, other: Any) -> Condition:  # type: ignore[override]
        return self._compare(operator.ne, other)

    def __ge__(self, other: float) -> Condition:
        return self._compare(operator.ge, other)

    def __gt__(self, other: float) -> Condition:
        return self._compare(operator.gt, other)

    def __le__(self, other: float) -> Condition:
        return self._compare(operator.le, other)

    def __lt__(self, other: float) -> Condition:
        return self._compare(operator.lt, other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Config:
    """Items of ``table`` with the nest ``pattern``, whenever all ``conditions`` hold."""

    pattern: Nest
    table: str
    conditions: tuple[Condition, ...]
    priority: PriorityFn

    @property
    def lookback(self) -> int:
        """Steps that must be there before it can be applied."""
        return max(-leaf.start for leaf in nests.flatten(self.pattern)[0])


def create_reference_step(step_structure: Nest) -> Nest:
    """A nest like ``step_structure`` with a ``Reference`` at each leaf."""
    _, structure = nests.flatten(step_structure)
    return nests.packer(structure)([Reference(path) for path in nests.paths(structure)])


def pattern_from_transform(step_structure: Nest, transform: Callable[[Nest], Nest]) -> Nest:
    """``transform(create_reference_step(step_structure))``."""
    return transform(create_reference_step(step_structure))


def constant_priority_fn(value: float) -> PriorityFn:
    """Every item has the priority ``value``."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"priority: got {value}, expected a finite number >= 0")
    return lambda read, lookback: value


def td_error(
    max_priority_weight: float, step_structure: Nest, get_field: Callable[[Nest], Reference]
) -> PriorityFn:
    """``w * max |td| + (1 - w) * mean |td|`` over the steps of the item (Kapturowski et al. 2019, R2D2).

    ``get_field(create_reference_step(step_structure))`` says which leaf holds the temporal-difference errors.
    """
    if not 0.0 <= max_priority_weight <= 1.0:
        raise ValueError(f"max_priority_weight: got {max_priority_weight}, expected 0 to 1")
    path = get_field(create_reference_step(step_structure)).path

    def priority(read: Callable[[str, int], np.ndarray], lookback: int) -> float:
        errors = np.abs(read(path, lookback).astype(np.float64))
        return float(max_priority_weight * errors.max() + (1.0 - max_priority_weight) * errors.mean())

    return priority


def create_config(
    pattern: Nest,
    table: str,
    conditions: Sequence[Condition] = (),
    priority: PriorityFn | None = None,
) -> Config:
    """A ``Config``; the priority is 1 if none is given."""
    leaves, structure = nests.flatten(pattern)
    if not leaves:
        raise ValueError("pattern: got a nest without leaves, expected at least one step[...][...]")
    for path, leaf in zip(nests.paths(structure), leaves, strict=True):
        if not isinstance(leaf, Pattern):
            raise ValueError(
                f"pattern, leaf {path!r}: got {type(leaf).__name__}, expected step[...][negative index]"
            )
    for condition in conditions:
        if not isinstance(condition, Condition):
            raise ValueError(
                f"conditions: got {type(condition).__name__}, expected a comparison of Condition.…()"
            )
    return Config(pattern, table, tuple(conditions), priority or constant_priority_fn(1.0))


def unpack_pattern(config: Config) -> Nest:
    """The nest of a config's pattern."""
    return config.pattern


def infer_signature(configs: Sequence[Config], step_spec: Nest) -> Nest:
    """The signature that a table of these configs has, from the specs of one step.

    Raises:
      ValueError: no configs, they are for several tables, differ in structure, dtype or shape, or name a leaf
      that the step
        has not.
    """
    if not configs:
        raise ValueError("configs: got none, expected at least one")
    names = {config.table for config in configs}
    if len(names) > 1:
        raise ValueError(f"configs: got some for tables {sorted(names)}, expected all for one table")
    specs, step_structure = nests.flatten(step_spec)
    known: Mapping[str, Any] = dict(zip(nests.paths(step_structure), specs, strict=True))
    found: list[tuple[Any, list[tuple]]] = []
    for config in configs:
        leaves, structure = nests.flatten(config.pattern)
        described = []
        for leaf in leaves:
            if leaf.path not in known:
                raise ValueError(f"pattern: got leaf {leaf.path!r}, the step has {sorted(known)}")
            spec = known[leaf.path]
            lead = () if leaf.length is None else (leaf.length,)
            described.append((np.dtype(spec.dtype), (*lead, *spec.shape)))
        found.append((structure, described))
    structure, described = found[0]
    lengths = [list(shape) for _, shape in described]
    for other_structure, other in found[1:]:
        if other_structure != structure or any(a[0] != b[0] for a, b in zip(described, other, strict=True)):
            raise ValueError(f"configs: got items {other} and {described} in one table, expected one kind")
        for shape, (_, other_shape) in zip(lengths, other, strict=True):
            if shape[1:] != list(other_shape[1:]) or len(shape) != len(other_shape):
                raise ValueError(
                    f"configs: got items {other} and {described} in one table, expected one kind"
                )
            if shape and shape[0] != other_shape[0]:
                raise ValueError(
                    f"configs: got patterns of lengths {shape[0]} and {other_shape[0]} for one leaf; "
                    "leave the table "
                    "without a signature, or use one table for each"
                )
    paths = nests.paths(structure)
    arrays = [
        dm_env.specs.Array(tuple(shape), dtype, path)
        for shape, (dtype, _), path in zip(lengths, described, paths, strict=True)
    ]
    return nests.packer(structure)(arrays)
