"""The frames of stacked observations: each is one row in replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tree

from framework.adders.fields import Field
from framework.replay.writer import BatchWriter
from framework.types import FIRST, Nest

NO_ROW = -1
FRAMES = "frames"  # the stream


class Frames:
    """Stores each frame once, in the stream `frames`; an observation is a stack of k rows, oldest first.

    A step adds one frame. An episode's first observation adds its frames that differ. Frames that
    fill the stack at a reset (zeros, or copies of the first frame) are stored once.

    Attributes:
      names: columns of the leaves that are stacks, `[time, B, k, ...]`.
      rows: int64 `[time, B, k]`, the number of each frame's row in replay; -1 if it is not there.
    """

    def __init__(
        self, writer: BatchWriter, field: Field, stacks: int | Mapping[str, int], shape: tuple[int, int]
    ):
        """Makes the frames of a block.

        Args:
          writer: the adder's writer.
          field: the block's observations.
          stacks: the number k of frames of all leaves, or of the columns that are stacks; equal for all.
          shape: `(time, B)`.

        Raises:
          ValueError: A leaf is not a stack of k frames.
        """
        if isinstance(stacks, int):
            stacks = dict.fromkeys(field.names, stacks)
        for name, array in zip(field.names, field.arrays, strict=True):
            if name in stacks and array.shape[2:3] != (stacks[name],):
                raise ValueError(
                    f"frame_stack: got {stacks[name]} and {name} of shape {array.shape[2:]}, expected "
                    "that many frames along the first axis of each observation."
                )
        self._writer, self._field = writer, field
        self.names = tuple(stacks)
        self.rows: np.ndarray = np.full((*shape, *set(stacks.values())), NO_ROW, np.int64)
        self._leased = np.zeros(0, np.int64)
        self._padding: np.ndarray | None = None

    def padding(self) -> int:
        """The number of the row of a frame of zeros, which is what padding consists of."""
        if self._padding is None:
            columns = zip(self._field.names, self._field.arrays, strict=True)
            zeros = {name: np.zeros((1, *a.shape[3:]), a.dtype) for name, a in columns if name in self.names}
            self._padding = self._writer.append(FRAMES, zeros)
        return int(self._padding[0])

    def append(self, history: int, end: int, step_types: np.ndarray) -> None:
        """Appends the new frames of the observations from time index `history` to `end`.

        Args:
          history: time index of the first row of the block.
          end: time index of the open row, which has its observation.
          step_types: int8 `[time, B]`.
        """
        rows = self.rows
        first, last = history + int(rows[history].flat[-1] >= 0), end + 1
        _, width, k = rows.shape
        stacks = self._field.take(slice(first * width, last * width))
        stacks = {name: stacks[name] for name in self.names}
        newest = self._append({name: array[:, -1] for name, array in stacks.items()}).reshape(-1, width)
        for time in range(first, last):
            if time:
                rows[time, :, :-1] = rows[time - 1, :, 1:]
            rows[time, :, -1] = newest[time - first]
            for env in np.flatnonzero(step_types[time] == FIRST):
                stack = {name: array[(time - first) * width + env] for name, array in stacks.items()}
                # The older frames, from the newest to the oldest.
                for j in range(k - 2, -1, -1):
                    if all(np.array_equal(array[j], array[j + 1]) for array in stack.values()):
                        rows[time, env, j] = rows[time, env, j + 1]
                    else:
                        frame = self._append({name: array[j : j + 1] for name, array in stack.items()})
                        rows[time, env, j] = frame[0]

    def _append(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        rows = self._writer.append(FRAMES, columns)
        self._leased = np.concatenate([self._leased, rows])
        return rows

    def check(self, t: int, begun: np.ndarray) -> None:
        """Raises `ValueError` if observations at `t` do not continue those before."""
        for name, array in zip(self._field.names, self._field.arrays, strict=True):
            if name not in self.names:
                continue
            before, now = array[t - 1 - self._field.skip], array[t - self._field.skip]
            wrong = (now[:, :-1] != before[:, 1:]).reshape(len(now), -1).any(axis=1) & ~begun
            if wrong.any():
                raise ValueError(
                    f"{name}: got observations that do not continue the previous step's stack in envs "
                    f"{np.flatnonzero(wrong).tolist()}, expected its frames moved by one and a new one at "
                    "the end. Leave frame_stack out if observations are not stacks of frames; agents do so "
                    "if the environment's observation_spec() is specs.unstacked(...)."
                )

    def shift(self, by: int, history: int) -> None:
        """Moves rows `by` to the front, as their block does, and releases the frames that none refers to."""
        if by:
            self.rows[: history + 1] = self.rows[by : by + history + 1]
            self.rows[history + 1 :] = NO_ROW
        kept = np.isin(self._leased, self.rows)
        if not kept.all():
            self._writer.release(FRAMES, self._leased[~kept])
            self._leased = self._leased[kept]

    def clear(self) -> None:
        """Releases all frames."""
        self.rows[:] = NO_ROW
        padding, self._padding = self._padding, None
        if padding is not None:
            self._leased = np.concatenate([self._leased, padding])
        self.shift(0, 0)


def restacked(observation: Nest, length: int) -> Nest:
    """Stacks the frames in items of a `SequenceAdder`: `[N, length * k, ...]` to `[N, length, k, ...]`.

    Args:
      observation: arrays or tensors. Leaves `[N, length, ...]` stay as they are.
      length: number of rows of an item.
    """

    def stack(leaf: Any) -> Any:
        return leaf if leaf.shape[1] == length else leaf.reshape(len(leaf), length, -1, *leaf.shape[2:])

    return tree.map_structure(stack, observation)
