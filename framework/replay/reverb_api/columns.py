"""The history of a writer: steps, columns that slice and index them, and the parts that items refer to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

Index = int | slice | Sequence[int]


@dataclasses.dataclass(slots=True, eq=False)
class WrittenStep:
    """One step: its row in the writer's stream and its data, by path.

    `row` is None before the step has any data, and again after the writer released the row. `episode` is the
    id of the step's episode.
    """

    episode: int
    row: int | None = None
    data: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, eq=False)
class WrittenSteps:
    """The steps since the last reset, including the open step. The oldest steps may be forgotten.

    All columns of a writer share the steps, so that one index means the same step in each column.

    Attributes:
      kept: the steps that are not forgotten, by number.
      length: number of steps, including those already forgotten.
    """

    kept: dict[int, WrittenStep] = dataclasses.field(default_factory=dict)
    length: int = 0


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class TrajectoryColumn:
    """Some steps of one column, for `create_item`: `history["x"][-3:]`.

    Attributes:
      path: the path of the column in the nest of a step.
      steps: the selected steps.
      is_squeezed: whether this is one step without a time axis, as selected by an int index.
      source: the history of the writer that wrote the steps.
    """

    path: str
    steps: tuple[WrittenStep, ...]
    is_squeezed: bool
    source: WrittenSteps

    @property
    def shape(self) -> tuple[int, ...]:
        """`[L, ...]`, or `[...]` for one step."""
        shape = self.steps[0].data[self.path].shape
        return shape if self.is_squeezed else (len(self.steps), *shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the data."""
        return self.steps[0].data[self.path].dtype

    def numpy(self) -> np.ndarray:
        """Returns a copy of the data."""
        arrays = [step.data[self.path] for step in self.steps]
        return arrays[0].copy() if self.is_squeezed else np.stack(arrays)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Index) -> TrajectoryColumn:
        """Selects some of these steps; an int index drops the time axis."""
        numbers, squeeze = _select(self, index)
        return TrajectoryColumn(self.path, tuple([self.steps[at] for at in numbers]), squeeze, self.source)

    def __iter__(self) -> Iterator[TrajectoryColumn]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"TrajectoryColumn({self.path!r}, shape={self.shape}, dtype={self.dtype})"


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class ColumnHistory:
    """One column since the last reset. An index counts all steps, including those already forgotten.

    `history[-1]` is one step; `history[-3:]`, `history[::2]` and `history[[0, 2]]` are several, in the order
    of the index.

    Attributes:
      path: the path of the column in the nest of a step.
      keep: number of the last steps that items can refer to.
      steps: the steps of the writer.
    """

    path: str
    keep: int
    steps: WrittenSteps

    def has(self, at: int) -> bool:
        """Returns whether step `at >= 0` is kept and has data in this column."""
        step = self.steps.kept.get(at)
        return step is not None and at >= self.steps.length - self.keep and self.path in step.data

    def __len__(self) -> int:
        return self.steps.length

    def __getitem__(self, index: Index) -> TrajectoryColumn:
        """Selects steps; an int index drops the time axis.

        Raises:
          ValueError: The index selects no step, or one that is no longer kept or has no data in this column.
          IndexError: There is no such step.
          TypeError: The index is something else, such as a mask.
        """
        numbers, squeeze = _select(self, index)
        length, path, kept = self.steps.length, self.path, self.steps.kept
        oldest = length - self.keep
        steps = []
        for number in numbers:
            at = number + length if number < 0 else number
            step = kept.get(at)
            if step is None or at < oldest or path not in step.data:
                raise self._missing(number, at)
            steps.append(step)
        return TrajectoryColumn(path, tuple(steps), squeeze, self.steps)

    def _missing(self, number: int, at: int) -> Exception:
        length = self.steps.length
        if not 0 <= at < length:
            return IndexError(f"history of {self.path!r}: got step {number}, expected one of {length} steps.")
        why = "has no data in this column (None)"
        if at not in self.steps.kept or at < length - self.keep:
            why = f"is no longer kept: num_keep_alive_refs is {self.keep}"
        return ValueError(f"history of {self.path!r}: step {number} {why}.")

    def __iter__(self) -> Iterator[TrajectoryColumn | None]:
        """Yields each step since the last reset; None for steps without data or no longer kept."""
        return (self[at] if self.has(at) else None for at in range(len(self)))

    def __repr__(self) -> str:
        return f"ColumnHistory({self.path!r}, {len(self)} steps)"


def _select(column: TrajectoryColumn | ColumnHistory, index: Index) -> tuple[Sequence[int], bool]:
    """Returns the numbers of the steps that an index selects, and whether the index is an int."""
    if isinstance(index, (int, np.integer)):
        return [int(index)], True
    if not isinstance(index, (slice, range)):
        kind = np.asarray(index)
        if kind.ndim != 1 or (kind.size and kind.dtype.kind not in "iu"):
            raise TypeError(f"{column!r}: got index {index!r}, expected an int, a slice or a list of ints.")
    numbers = range(*index.indices(len(column))) if isinstance(index, slice) else index
    if not len(numbers):
        raise ValueError(f"{column!r}: got index {index}, expected at least one of {len(column)} steps.")
    return numbers, False
