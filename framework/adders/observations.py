"""The rows of an n-step adder's observations in replay: one per observation, or one per frame of a stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from framework.adders.fields import Field
from framework.types import FIRST


class ObservationRows:
    """Each observation is one row of the stream `observations`."""

    stream = "observations"

    def __init__(
        self,
        writer: Any,
        release: Callable[[str, np.ndarray], None],
        field: Field,
        kinds: np.ndarray,
        history: int,
        skip: int,
    ):
        """`kinds` int8 `[time, B]` and `field` are the adder's; field rows are `skip` rows behind."""
        self._writer = writer
        self._release = release
        self._field = field
        self._kinds = kinds
        self._history = history
        self._skip = skip
        # Row numbers; -1: not in replay.
        self._rows = np.full(kinds.shape, -1, np.int64)

    def append(self, t: int) -> None:
        """Appends the rows up to `t`, including the newest observation, where the newest items end."""
        first = self._history + int(self._rows[self._history].flat[0] >= 0)
        columns = self._field.columns(first - self._skip, t + 1 - self._skip)
        rows = self._writer.append(self.stream, columns)
        self._rows[first : t + 1] = rows.reshape(-1, self._kinds.shape[1])

    def at(self, index: np.ndarray) -> np.ndarray:
        """Returns the rows of the observations with flat indices `time * B + env`, `[n]` or `[n, k]`."""
        return self._rows.reshape(-1, *self._rows.shape[2:])[index]

    def shift(self, by: int) -> None:
        """Moves observations `by` time steps to the front and releases those that leave the array."""
        history = self._history
        self._release(self.stream, self._rows[:by])
        self._rows[: history + 1] = self._rows[by : by + history + 1]
        self._rows[history + 1 :] = -1

    def forget(self) -> None:
        """Releases every row."""
        self._release(self.stream, self._rows)
        self._rows[:] = -1


class StackedRows(ObservationRows):
    """Each frame is one row of the stream `frames`; an observation is a stack of k rows, oldest first.

    A step adds one frame. An episode's first observation adds those of its k frames that differ. Frames that
    fill the stack at a reset (zeros, or copies of the first frame) are stored once.
    """

    stream = "frames"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._rows = np.full((*self._kinds.shape, self._field.arrays[0].shape[2]), -1, np.int64)
        self._leased = np.zeros(0, np.int64)

    def append(self, t: int) -> None:
        rows, kinds, field, skip = self._rows, self._kinds, self._field, self._skip
        first = self._history + int(rows[self._history].flat[0] >= 0)
        pictures = [array[first - skip : t + 1 - skip] for array in field.arrays]
        begun = kinds[first : t + 1] == FIRST
        columns = {
            name: array[:, :, -1].reshape(-1, *array.shape[3:])
            for name, array in zip(field.names, pictures, strict=True)
        }
        newest = self._writer.append(self.stream, columns).reshape(begun.shape)
        self._leased = np.concatenate([self._leased, newest.reshape(-1)])
        for i in range(len(begun)):
            time = first + i
            if time:
                rows[time, :, :-1] = rows[time - 1, :, 1:]
            rows[time, :, -1] = newest[i]
            for env in np.flatnonzero(begun[i]):
                self._fill(rows[time, env], [array[i, env] for array in pictures])

    def _fill(self, rows: np.ndarray, stack: list[np.ndarray]) -> None:
        """Appends the older frames of an episode's first observation, from the newest to the oldest."""
        for j in range(len(rows) - 2, -1, -1):
            if all(np.array_equal(array[j], array[j + 1]) for array in stack):
                rows[j] = rows[j + 1]
                continue
            columns = {name: array[j : j + 1] for name, array in zip(self._field.names, stack, strict=True)}
            row = self._writer.append(self.stream, columns)
            self._leased = np.concatenate([self._leased, row])
            rows[j] = row[0]

    def check(self, t: int, begun: Any) -> None:
        """Checks that the observations at `t` continue those before: frames stored once must be equal."""
        for name, array in zip(self._field.names, self._field.arrays, strict=True):
            before, now = array[t - 1 - self._skip], array[t - self._skip]
            wrong = (now[:, :-1] != before[:, 1:]).reshape(len(now), -1).any(axis=1) & ~np.asarray(begun)
            if wrong.any():
                raise ValueError(
                    f"{name}: got observations that do not continue the stack of the step before in envs "
                    f"{np.flatnonzero(wrong).tolist()}, expected its frames moved by one and a new one at "
                    "the end. Leave frame_stack out if observations are not stacks of frames; agents do so "
                    "if the environment's observation_spec() is specs.unstacked(...)."
                )

    def shift(self, by: int) -> None:
        history = self._history
        self._rows[: history + 1] = self._rows[by : by + history + 1]
        self._rows[history + 1 :] = -1
        self._keep(np.unique(self._rows[: history + 1]))

    def forget(self) -> None:
        self._rows[:] = -1
        self._keep(np.zeros(0, np.int64))

    def _keep(self, rows: np.ndarray) -> None:
        kept = np.isin(self._leased, rows)
        self._release(self.stream, self._leased[~kept])
        self._leased = self._leased[kept]
