"""The frames of stacked observations: each is one row in replay."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import tree

from framework.adders.fields import Field
from framework.replay.writer import BatchWriter
from framework.types import FIRST, Nest


class Frames:
    """Stores each frame once, in the stream `frames`; an observation is a stack of k rows, oldest first.

    A step adds one frame. An episode's first observation adds its frames that differ. Frames that
    fill the stack at a reset (zeros, or copies of the first frame) are stored once.
    """

    stream = "frames"

    def __init__(self, writer: BatchWriter, field: Field, names: Collection[str]):
        """Makes the frames of an adder.

        Args:
          writer: the adder's writer.
          field: the adder's observations.
          names: columns of those leaves of `field` that are stacks, `[time, B, k, ...]`.
        """
        self._writer = writer
        self._field = field
        self.names = names
        self._leased = np.zeros(0, np.int64)

    def append(self, rows: np.ndarray, first: int, kinds: np.ndarray) -> None:
        """Appends the frames of the observations from time index `first` on, and enters them in `rows`.

        Args:
          rows: int64 `[time, B, k]`, the row of each frame.
          first: time index of the first new observation.
          kinds: int8 `[>= time, B]`, step types.
        """
        last, width, k = rows.shape
        stacks = self._field.take(slice(first * width, last * width))
        stacks = {name: stacks[name] for name in self.names}
        newest = self._append({name: array[:, -1] for name, array in stacks.items()}).reshape(-1, width)
        for time in range(first, last):
            if time:
                rows[time, :, :-1] = rows[time - 1, :, 1:]
            rows[time, :, -1] = newest[time - first]
            for env in np.flatnonzero(kinds[time] == FIRST):
                stack = {name: array[(time - first) * width + env] for name, array in stacks.items()}
                # The older frames, from the newest to the oldest.
                for j in range(k - 2, -1, -1):
                    if all(np.array_equal(array[j], array[j + 1]) for array in stack.values()):
                        rows[time, env, j] = rows[time, env, j + 1]
                    else:
                        frame = self._append({name: array[j : j + 1] for name, array in stack.items()})
                        rows[time, env, j] = frame[0]

    def _append(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        rows = self._writer.append(self.stream, columns)
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

    def release_except(self, rows: np.ndarray) -> None:
        """Releases the frames that are not in `rows`."""
        kept = np.isin(self._leased, rows)
        if not kept.all():
            self._writer.release(self.stream, self._leased[~kept])
            self._leased = self._leased[kept]


def restacked(observation: Nest, length: int) -> Nest:
    """Stacks the frames in items of a `SequenceAdder`: `[N, length * k, ...]` to `[N, length, k, ...]`.

    Args:
      observation: arrays or tensors. Leaves `[N, length, ...]` stay as they are.
      length: number of rows of an item.
    """

    def stack(leaf: Any) -> Any:
        return leaf if leaf.shape[1] == length else leaf.reshape(len(leaf), length, -1, *leaf.shape[2:])

    return tree.map_structure(stack, observation)
