"""The history of a writer: steps, columns that slice and index them, and the parts that items refer to."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import numpy as np

Index = int | slice | Sequence[int]


class Step:
    """One step: its row in the writer's stream and its data, by path.

    `row` is None before the step has any data, and again after the writer released the row.
    """

    __slots__ = ("data", "row")

    def __init__(self) -> None:
        self.row: int | None = None
        self.data: dict[str, np.ndarray] = {}


class Steps:
    """The steps since the last reset, including the open step. The oldest steps may be forgotten.

    All columns of a writer share the steps, so that one index means the same step in each column.
    """

    def __init__(self) -> None:
        self.kept: collections.deque[Step] = collections.deque()
        self.num_forgotten = 0

    def __len__(self) -> int:
        return self.num_forgotten + len(self.kept)

    def forget(self) -> Step:
        """Forgets the oldest step and returns it."""
        self.num_forgotten += 1
        return self.kept.popleft()

    def clear(self) -> list[Step]:
        """Starts a new history and returns the steps of the old one."""
        steps = list(self.kept)
        self.kept.clear()
        self.num_forgotten = 0
        return steps


class TrajectoryColumn:
    """Some steps of one column, for `create_item`: `history["x"][-3:]`. An int index drops the time axis."""

    __slots__ = ("path", "source", "squeeze", "steps")

    def __init__(self, path: str, steps: tuple[Step, ...], squeeze: bool, source: Steps):
        self.path = path
        self.steps = steps
        self.squeeze = squeeze
        self.source = source

    @property
    def shape(self) -> tuple[int, ...]:
        """`[L, ...]`, or `[...]` for one step."""
        shape = self.steps[0].data[self.path].shape
        return shape if self.squeeze else (len(self.steps), *shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the data."""
        return self.steps[0].data[self.path].dtype

    @property
    def is_squeezed(self) -> bool:
        """Whether this is one step without a time axis."""
        return self.squeeze

    def numpy(self) -> np.ndarray:
        """Returns a copy of the data."""
        if self.squeeze:
            return self.steps[0].data[self.path].copy()
        return np.stack([step.data[self.path] for step in self.steps])

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Index) -> TrajectoryColumn:
        """Selects some of these steps; an int index drops the time axis."""
        if isinstance(index, slice):
            steps = self.steps[index]
        elif isinstance(index, int):
            steps = (self.steps[index],)
        else:
            steps = tuple(self.steps[at] for at in index)
        if not steps:
            raise ValueError(
                f"{self!r}: got index {index}, expected one that selects at least one of {len(self)} steps."
            )
        return TrajectoryColumn(self.path, steps, isinstance(index, int), self.source)

    def __iter__(self) -> Iterator[TrajectoryColumn]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"TrajectoryColumn({self.path!r}, shape={self.shape}, dtype={self.dtype})"


class ColumnHistory:
    """One column since the last reset. An index counts all steps, including those already forgotten.

    `history[-1]` is one step; `history[-3:]`, `history[::2]` and `history[[0, 2]]` are several, in the order
    of the index.
    """

    def __init__(self, path: str, keep: int, steps: Steps):
        self.path = path
        #: Number of the last steps that items can refer to.
        self.keep = keep
        self._steps = steps

    def has(self, at: int) -> bool:
        """Returns whether step `at >= 0` is kept and has data in this column."""
        return self._oldest() <= at < len(self) and (
            self.path in self._steps.kept[at - self._steps.num_forgotten].data
        )

    def _oldest(self) -> int:
        return max(self._steps.num_forgotten, len(self._steps) - self.keep)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Index) -> TrajectoryColumn:
        """Selects steps; an int index drops the time axis.

        Raises:
          ValueError: The index selects no step, or one that is no longer kept or has no data in this column.
          IndexError: There is no such step.
        """
        length = len(self._steps)
        squeeze = False
        if isinstance(index, slice):
            numbers: Sequence[int] = range(*index.indices(length))
        elif isinstance(index, (int, np.integer)):
            numbers, squeeze = [int(index)], True
        else:
            numbers = index
        if not len(numbers):
            raise ValueError(
                f"history of {self.path!r}: got index {index}, expected one that selects at least one of "
                f"{length} steps."
            )
        path, kept, first, oldest = self.path, self._steps.kept, self._steps.num_forgotten, self._oldest()
        steps = []
        for number in numbers:
            at = number + length if number < 0 else number
            if not oldest <= at < length or path not in kept[at - first].data:
                raise self._missing(number, at)
            steps.append(kept[at - first])
        return TrajectoryColumn(self.path, tuple(steps), squeeze, self._steps)

    def _missing(self, number: int, at: int) -> Exception:
        length = len(self._steps)
        if not 0 <= at < length:
            return IndexError(f"history of {self.path!r}: got step {number}, expected one of {length} steps.")
        if at < self._oldest():
            why = f"is no longer kept: num_keep_alive_refs is {self.keep}"
        else:
            why = "has no data in this column (None)"
        return ValueError(f"history of {self.path!r}: step {number} {why}")

    def __iter__(self) -> Iterator[TrajectoryColumn | None]:
        """Yields each step since the last reset; None for steps without data or no longer kept."""
        return (self[at] if self.has(at) else None for at in range(len(self)))

    def __repr__(self) -> str:
        return f"ColumnHistory({self.path!r}, {len(self)} steps)"
