"""The history of a ``TrajectoryWriter``: columns that slice and index, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from framework import nest as nests

# Reads rows of a column back: (column, rows int64 [L]) -> [L, ...].
Reader = Callable[[str, np.ndarray], np.ndarray]


class Shape(NamedTuple):
    """The structure of a nest: the paths of its leaves and how to put leaves back."""

    paths: list[str]
    pack: Callable[[list[Any]], Any]


class Describer:
    """Flattens nests; what it has worked out of a structure it keeps."""

    def __init__(self) -> None:
        self._known: dict[Any, Shape] = {}

    def __call__(self, nest: Any) -> tuple[list[Any], Shape]:
        """``(leaves, shape)``; the same shape object for the same structure."""
        if type(nest) is dict and not any(isinstance(value, (dict, list, tuple)) for value in nest.values()):
            key: Any = tuple(nest)  # the common flat case
            known = self._known.get(key)
            if known is not None:
                return [nest[path] for path in known.paths], known
        leaves, structure = nests.flatten(nest)
        frozen = nests.freeze(structure)
        known = self._known.get(frozen)
        if known is None:
            known = self._known[frozen] = Shape(nests.paths(structure), nests.packer(structure))
        if type(nest) is dict and list(nest) and known.paths == sorted(nest):
            self._known[tuple(nest)] = known
        return leaves, known


class TrajectoryColumn:
    """Some steps of one column, for ``create_item``: ``history["x"][-3:]``; without a time axis from an int
    index."""

    __slots__ = ("_read", "column", "dtype", "path", "rows", "squeeze", "step_shape", "stream")

    def __init__(
        self,
        stream: str,
        column: str,
        path: str,
        rows: tuple[int, ...],
        squeeze: bool,
        spec: tuple[tuple[int, ...], np.dtype],
        read: Reader,
    ):
        self.stream = stream
        self.column = column
        self.path = path
        self.rows = rows
        self.squeeze = squeeze
        self.step_shape, self.dtype = spec
        self._read = read

    @property
    def shape(self) -> tuple[int, ...]:
        """``[L, ...]``, or ``[...]`` of one step."""
        return self.step_shape if self.squeeze else (len(self.rows), *self.step_shape)

    @property
    def is_squeezed(self) -> bool:
        """Whether it is one step without a time axis."""
        return self.squeeze

    def numpy(self) -> np.ndarray:
        """The data, copied."""
        data = self._read(self.column, np.array(self.rows, np.int64))
        return data[0] if self.squeeze else data

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice | list[int]) -> TrajectoryColumn:
        """Some of these steps; from an int one step without a time axis."""
        if isinstance(index, slice):
            rows = self.rows[index]
        elif isinstance(index, list):
            rows = tuple(self.rows[at] for at in index)
        else:
            rows = (self.rows[index],)
        if not rows:
            raise ValueError(f"{self!r}: {index} selects none of {len(self)} steps, expected some")
        squeeze = not isinstance(index, (slice, list))
        spec = (self.step_shape, self.dtype)
        return TrajectoryColumn(self.stream, self.column, self.path, rows, squeeze, spec, self._read)

    def __iter__(self) -> Iterator[TrajectoryColumn]:
        return (self[at] for at in range(len(self)))

    def __repr__(self) -> str:
        return f"TrajectoryColumn({self.path!r}, shape={self.shape}, dtype={self.dtype})"


class ColumnHistory:
    """One column since the last reset; an index counts steps, whether or not they are still kept.

    ``history[-1]`` is one step, ``history[-3:]``, ``history[::2]`` and ``history[[0, 2]]`` are several, in
    the order asked for.
    """

    def __init__(self, stream: str, column: str, path: str, keep: int, read: Reader):
        self.stream = stream
        self.column = column
        self.path = path
        self.keep = keep
        self.spec: tuple[tuple[int, ...], np.dtype] = ((), np.dtype(np.float32))
        self._read = read
        self._cells: dict[int, int] = {}  # step -> row, for steps that are kept and have the column
        self._length = 0

    def put(self, step: int, row: int) -> None:
        """The column is in ``step``."""
        self._cells[step] = row
        self._length = step + 1

    def has(self, step: int) -> bool:
        """Whether the column was put in ``step``, which is kept."""
        return step in self._cells

    def close(self, steps: int) -> None:
        """``steps`` steps are complete; forgets those that are older than ``keep``."""
        self._length = max(self._length, steps)
        oldest = self._length - self.keep
        while self._cells and (first := next(iter(self._cells))) < oldest:
            del self._cells[first]

    def last(self) -> TrajectoryColumn:
        """The step that was put last."""
        row = self._cells[self._length - 1]
        return TrajectoryColumn(self.stream, self.column, self.path, (row,), True, self.spec, self._read)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> TrajectoryColumn:
        if isinstance(index, slice):
            steps = list(range(*index.indices(self._length)))
        elif isinstance(index, (list, tuple, np.ndarray)):
            steps = [int(step) for step in index]
        else:
            steps = [int(index)]
        squeeze = not isinstance(index, (slice, list, tuple, np.ndarray))
        if not steps:
            raise ValueError(
                f"history of {self.path!r}: {index} selects none of {self._length} steps, expected some"
            )
        rows = []
        for step in steps:
            at = step + self._length if step < 0 else step
            if not 0 <= at < self._length:
                raise IndexError(f"history of {self.path!r}: step {step} is not among {self._length} steps")
            row = self._cells.get(at)
            if row is None:
                expired = at < self._length - self.keep
                raise ValueError(
                    f"history of {self.path!r}: step {step} "
                    + (
                        f"is no longer kept: num_keep_alive_refs is {self.keep}"
                        if expired
                        else "has no data in this column (None)"
                    )
                )
            rows.append(row)
        return TrajectoryColumn(
            self.stream, self.column, self.path, tuple(rows), squeeze, self.spec, self._read
        )

    def __iter__(self) -> Iterator[TrajectoryColumn | None]:
        """Each step since the last reset, None for those without data or no longer kept."""
        return (self[step] if step in self._cells else None for step in range(self._length))

    def __repr__(self) -> str:
        return f"ColumnHistory({self.path!r}, {self._length} steps, {len(self._cells)} kept)"
