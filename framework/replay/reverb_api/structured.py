"""Reverb's `StructuredWriter`: creates items from steps by patterns and conditions.

```python
step = structured.create_reference_step({"observation": None, "reward": None})
pattern = {"o": step["observation"][-3:], "r": step["reward"][-1]}
config = structured.create_config(
    pattern, "replay", conditions=[structured.Condition.step_index() % 2 == 0]
)
writer = client.structured_writer([config])
```

A pattern refers to the leaves of a step by their position in the flattened step, not by name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay import contracts
from framework.replay.reverb_api.columns import ColumnHistory, WrittenStep
from framework.replay.reverb_api.trajectory_writer import TrajectoryWriter
from framework.replay.types import TensorSpec
from framework.types import Nest

# Reads the last steps of a leaf: (position of the leaf, number of steps) -> [L, ...].
Reader = Callable[[int, int], np.ndarray]
# The priority of an item, from the steps that its pattern covers and their number.
PriorityFn = Callable[[Reader, int], float]


@dataclass(frozen=True)
class Reference:
    """A leaf of the step. Negative indices select which of the last steps an item gets."""

    leaf: int
    path: str

    def __getitem__(self, index: int | slice) -> Pattern:
        bounds = index if isinstance(index, slice) else slice(index, index + 1)
        steps = range(bounds.start or 0, bounds.stop or 0, bounds.step or 1)
        if not steps or steps.stop > 0 or steps.step < 0:
            raise ValueError(
                f"pattern of {self.path!r}: got index {index!r}, expected a negative number, or a slice with "
                "a negative start, a later stop that is negative or None, and a positive stride."
            )
        return Pattern(self.leaf, self.path, steps, bounds is not index)


@dataclass(frozen=True)
class Pattern:
    """Leaf number `leaf` of the last `steps`, which are negative; without a time axis if `squeeze`."""

    leaf: int
    path: str
    steps: range
    squeeze: bool


@dataclass(frozen=True)
class Moment:
    """The state that conditions test; see `Condition`."""

    step_index: int
    steps_since_applied: int
    is_end_episode: bool
    read: Callable[[int], np.ndarray | None]


@dataclass(frozen=True)
class Condition:
    """A test that must hold for a config to be applied: `Condition.step_index() % 2 == 0`.

    Attributes:
      test: the function.
      leaf: the leaf of the step that it reads; None if it reads none.
    """

    test: Callable[[Moment], bool]
    leaf: int | None = None

    @staticmethod
    def step_index() -> Quantity:
        """Returns the number of the step in its episode, from 0."""
        return Quantity(lambda moment: moment.step_index)

    @staticmethod
    def steps_since_applied() -> Quantity:
        """Returns the number of steps since the config was last applied or the writer was created.

        It counts steps of all episodes, including the current one.
        """
        return Quantity(lambda moment: moment.steps_since_applied)

    @staticmethod
    def is_end_episode() -> Condition:
        """Holds in `end_episode`; the last step of the episode is the last step of the pattern."""
        return Condition(lambda moment: moment.is_end_episode)

    @staticmethod
    def data(step_structure: Nest) -> Nest:
        """Returns the nest of the step's values: `Condition.data(step)["reward"] >= 1`.

        No comparison holds in a step that has None at the leaf. A comparison raises `ValueError` if the value
        is not a scalar.
        """
        leaves, structure = nests.flatten(step_structure)
        values = [Quantity(functools.partial(_value_of, leaf), leaf) for leaf in range(len(leaves))]
        return nests.packer(structure)(values)


def _value_of(leaf: int, moment: Moment) -> float | None:
    data = moment.read(leaf)
    if data is not None and data.size != 1:
        raise ValueError(f"condition on leaf {leaf} of the step: got shape {data.shape}, expected a scalar.")
    return None if data is None else data.item()


@dataclass(frozen=True, eq=False)
class Quantity:
    """A number that a condition compares; comparisons with None are false. See `Condition` for the leaf."""

    value: Callable[[Moment], float | None]
    leaf: int | None = None

    def _apply(self, operation: Callable[[Any, Any], Any], other: float) -> Callable[[Moment], Any]:
        def apply(moment: Moment) -> Any:
            value = self.value(moment)
            return None if value is None else operation(value, other)

        return apply

    def __mod__(self, divisor: int) -> Quantity:
        return Quantity(self._apply(operator.mod, divisor), self.leaf)

    def _compare(self, relation: Callable[[Any, Any], bool], other: float) -> Condition:
        return Condition(self._apply(relation, other), self.leaf)

    __eq__ = functools.partialmethod(_compare, operator.eq)
    __ne__ = functools.partialmethod(_compare, operator.ne)
    __ge__ = functools.partialmethod(_compare, operator.ge)
    __gt__ = functools.partialmethod(_compare, operator.gt)
    __le__ = functools.partialmethod(_compare, operator.le)
    __lt__ = functools.partialmethod(_compare, operator.lt)
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Config:
    """Creates items of `table` with the nest `pattern` whenever all `conditions` hold.

    Attributes:
      leaves: the leaves of the pattern.
      structure: the structure of the pattern, as in `framework.nest`.
    """

    pattern: Nest
    table: str
    conditions: tuple[Condition, ...]
    priority: PriorityFn
    leaves: list[Pattern]
    structure: nests.Structure

    @property
    def lookback(self) -> int:
        """Number of steps that the history must have."""
        return max(-leaf.steps[0] for leaf in self.leaves)

    @property
    def reads(self) -> set[int]:
        """The leaves of a step that the pattern and the conditions read."""
        of_conditions = {each.leaf for each in self.conditions if each.leaf is not None}
        return {leaf.leaf for leaf in self.leaves} | of_conditions


def create_reference_step(step_structure: Nest) -> Nest:
    """Returns a nest like `step_structure` with a `Reference` at each leaf."""
    _, structure = nests.flatten(step_structure)
    paths = nests.paths(structure)
    return nests.packer(structure)([Reference(leaf, path) for leaf, path in enumerate(paths)])


def pattern_from_transform(step_structure: Nest, transform: Callable[[Nest], Nest]) -> Nest:
    """Returns `transform(create_reference_step(step_structure))`."""
    return transform(create_reference_step(step_structure))


def constant_priority_fn(value: float) -> PriorityFn:
    """Returns a priority function that gives every item the priority `value`."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"priority: got {value}, expected a finite number >= 0.")
    return lambda read, lookback: value


def td_error(
    max_priority_weight: float, step_structure: Nest, get_field_from_step_fn: Callable[[Nest], Reference]
) -> PriorityFn:
    """Returns a priority function of TD errors: `w * max |td| + (1 - w) * mean |td|` over an item's steps.

    The formula is R2D2's (Kapturowski et al. 2019).

    Args:
      max_priority_weight: the weight w, in [0, 1].
      step_structure: the nest of a step.
      get_field_from_step_fn: takes a reference step and returns its leaf with the TD errors.
    """
    if not 0.0 <= max_priority_weight <= 1.0:
        raise ValueError(f"max_priority_weight: got {max_priority_weight}, expected 0 to 1.")
    leaf = get_field_from_step_fn(create_reference_step(step_structure)).leaf

    def priority(read: Reader, lookback: int) -> float:
        errors = np.abs(read(leaf, lookback).astype(np.float64))
        return float(max_priority_weight * errors.max() + (1.0 - max_priority_weight) * errors.mean())

    return priority


def create_config(
    pattern: Nest, table: str, conditions: Sequence[Condition] = (), priority: PriorityFn | None = None
) -> Config:
    """Returns a `Config`; the priority of its items is 1 by default."""
    leaves, structure = nests.flatten(pattern)
    if not leaves:
        raise ValueError("pattern: got a nest without leaves, expected at least one step[...][...].")
    for path, leaf in zip(nests.paths(structure), leaves, strict=True):
        if not isinstance(leaf, Pattern):
            raise ValueError(f"pattern, leaf {path!r}: got {type(leaf).__name__}, expected step[...][-n].")
    for condition in conditions:
        if not isinstance(condition, Condition):
            raise ValueError(f"conditions: got {type(condition).__name__}, expected Condition.…() >= n.")
    priority = priority or constant_priority_fn(1.0)
    return Config(pattern, table, tuple(conditions), priority, leaves, structure)


def unpack_pattern(config: Config) -> Nest:
    """Returns the nest of a config's pattern."""
    return config.pattern


def infer_signature(configs: Sequence[Config], step_spec: Nest) -> Nest:
    """Returns the signature of a table for the items of `configs`: a nest of `TensorSpec`.

    Args:
      configs: configs of one table and one nest. If their patterns differ in length, the dimension is None.
      step_spec: nest of the step; leaves have `shape` and `dtype`, as TensorFlow's specs do.

    Raises:
      ValueError: There are no configs, they are for several tables, their nests, dtypes or shapes differ, or
        the step lacks a leaf of a pattern.
    """
    if not configs:
        raise ValueError("configs: got none, expected at least one.")
    names, structure = sorted({config.table for config in configs}), configs[0].structure
    if len(names) > 1 or any(config.structure != structure for config in configs):
        raise ValueError(f"configs: got patterns of tables {names}, expected one table, no different nests.")
    step = [TensorSpec.of(spec) for spec in nests.flatten(step_spec)[0]]
    for leaf in [leaf for config in configs for leaf in config.leaves if leaf.leaf >= len(step)]:
        raise ValueError(f"pattern of {leaf.path!r}: got leaf {leaf.leaf}, expected one of {len(step)}.")
    specs = []
    for path, *patterns in zip(nests.paths(structure), *[config.leaves for config in configs], strict=True):
        kinds = {(p.squeeze, step[p.leaf].dtype, step[p.leaf].shape) for p in patterns}
        if len(kinds) > 1:
            raise ValueError(f"configs, leaf {path!r}: got {sorted(map(str, kinds))}, expected one kind.")
        squeeze, dtype, shape = kinds.pop()
        lengths = {len(pattern.steps) for pattern in patterns}
        length = lengths.pop() if len(lengths) == 1 else None
        specs.append(TensorSpec(shape if squeeze else (length, *shape), dtype, path))
    return nests.packer(structure)(specs)


class StructuredWriter(TrajectoryWriter):
    """A `TrajectoryWriter` that creates items by itself, for each step at most one of each config.

    A config is applied after the first part of a step with which its conditions hold and its pattern has all
    of its data. It skips the steps that have none of the columns of its pattern and its conditions, and
    counts no step that it skips. `history` is the list of the columns of the flattened step.

    Args:
      client: any client of `framework.replay`.
      configs: configs made by `create_config`.
    """

    def __init__(self, client: contracts.ReplayClient, configs: Sequence[Config]):
        if not configs:
            raise ValueError("configs: got none, expected at least one structured.create_config(...).")
        super().__init__(client, max(config.lookback for config in configs))
        self._configs = list(configs)
        self._min_leaves = 1 + max(leaf.leaf for config in configs for leaf in config.leaves)
        self._num_leaves: int | None = None  # of the first step
        self._reads = [config.reads for config in configs]
        self._since_applied = [0] * len(configs)  # 0: it was applied in this step
        self._counted: list[WrittenStep | None] = [None] * len(
            configs
        )  # the last that is in `_since_applied`

    def append(self, data: Nest, *, partial_step: bool = False) -> None:
        """Appends a step, or a part of it; None at a leaf means that the step has no data there.

        Raises:
          ValueError: The number of leaves, a dtype or a shape differs from the first step's, or a pattern
            refers to a leaf that the step does not have.
        """
        leaves, structure = nests.flatten(data)
        expected = self._num_leaves or max(len(leaves), self._min_leaves)
        if len(leaves) != expected:
            raise ValueError(
                f"append: got a step with {len(leaves)} leaves {nests.paths(structure)}, expected "
                f"{expected}: as many as in the first step, enough for the patterns."
            )
        super().append(leaves, partial_step=partial_step)
        self._num_leaves = expected
        self._apply(at_end=False)

    def _apply(self, at_end: bool) -> None:
        columns: list[ColumnHistory] = self.history
        length = len(columns[0])
        step = self._steps.kept[length - 1]
        index = self.episode_steps - (not self.step_is_open)

        def read(leaf: int, steps: int) -> np.ndarray:
            return columns[leaf][-steps:].numpy()

        def last(leaf: int) -> np.ndarray | None:
            return columns[leaf][-1].numpy() if columns[leaf].has(length - 1) else None

        for number, config in enumerate(self._configs):
            if not any(columns[leaf].has(length - 1) for leaf in self._reads[number]):
                continue
            if self._counted[number] is not step:
                self._counted[number] = step
                self._since_applied[number] += 1
            moment = Moment(index, self._since_applied[number], at_end, last)
            if (
                self._since_applied[number]
                and all(condition.test(moment) for condition in config.conditions)
                and all(columns[p.leaf].has(length + at) for p in config.leaves for at in p.steps)
            ):
                parts = [columns[p.leaf][p.steps[0] if p.squeeze else p.steps] for p in config.leaves]
                item = nests.packer(config.structure)(parts)
                self.create_item(config.table, config.priority(read, config.lookback), item)
                self._since_applied[number] = 0

    def end_episode(
        self, clear_buffers: bool = True, timeout_ms: int | None = None, timeout: float | None = None
    ) -> None:
        """Applies the configs for the end of an episode, flushes, and starts a new episode."""
        try:
            if self.episode_steps or self.step_is_open:
                self._apply(at_end=True)
        finally:
            super().end_episode(clear_buffers, timeout_ms, timeout)
