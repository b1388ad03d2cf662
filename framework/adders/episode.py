"""Items of whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from framework.adders.block import NO_ROW, PriorityFns
from framework.adders.sequence import MASK, START, RowAdder
from framework.config_checks import whole_number
from framework.types import FIRST, LAST

PaddingFn = Callable[[tuple[int, ...], np.dtype], np.ndarray]


class EpisodeAdder(RowAdder):
    """Writes one `Step` item for each finished episode, with all its T + 1 rows.

    Unfinished episodes are not written: a FIRST step or `reset()` in mid-episode drops the open one.
    `num_dropped_episodes` counts them. `end_episodes()` finishes it.
    """

    _checks_steps = True
    _writes_unfinished = False  # Within `end_episodes`.

    def __init__(
        self,
        client: Any,
        max_sequence_length: int,
        padding_fn: PaddingFn | None = None,
        *,
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
        limit_name: str = "max_sequence_length",
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          max_sequence_length: the largest number of rows (observations) of an episode, at least 2; it has
            one transition fewer. A step that would make an episode longer raises `ValueError` and is not
            added.
          padding_fn: takes the `(shape, dtype)` of one row's leaf and returns the value that fills items up
            to `max_sequence_length`, as `numpy.zeros` does. Rows of padding have `start_of_episode` False and
            mask 0. None writes items that are as long as their episode.
          priority_fns: `{table: fn or None}`; each item goes to each table. `fn` takes a `Step` of k items
            (leaves `[k, max_sequence_length, ...]`, padded) and returns k priorities. None means the largest
            priority so far.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too; None
            means 512.
          max_delay: seconds; see `BlockAdder`.
          limit_name: the name of the setting that limits the episodes, for the error.
        """
        self._length = whole_number("max_sequence_length", max_sequence_length, 2)
        self._padding_fn, self._limit_name = padding_fn, limit_name
        self._ragged = padding_fn is None
        super().__init__(client, 0, priority_fns, max_in_flight_items, max_delay)

    def end_episodes(self) -> None:
        with self._lock:
            self._write_block(timeout=0)  # The episodes that a FIRST step cut short stay out.
            self._writes_unfinished = True
            try:
                super().end_episodes()
                self._write_block(timeout=0)
            finally:
                self._writes_unfinished = False

    def _check(self, kinds: np.ndarray) -> None:
        if self._t + self._num_shifted + 1 - self._origin.min() < self._length:
            return
        over = (self._count(self._t)[self._t] >= self._length) & (kinds != FIRST)
        if over.any():
            raise ValueError(
                f"{self._limit_name}: got episodes of more than {self._length} observations in envs "
                f"{np.flatnonzero(over).tolist()}, expected at most {self._length - 1} steps. Give a larger "
                f"{self._limit_name}, or limit the environment's steps, as StepLimit does. To drop these "
                "episodes and go on, call reset() or add_first()."
            )

    def _emit(self, t: int) -> None:
        new, real, counts = self._new_rows(t)
        # Rows stay in the arrays until their episode ends.
        oldest = np.where(self._kinds[t] == LAST, t, self._origin - self._num_shifted).min()
        self._next_history = t - int(oldest)
        times, envs = np.nonzero(new & ~real)
        sizes = counts[times, envs]
        is_whole = (self._kinds[times, envs] == LAST) | (self._writes_unfinished & (sizes > 1))
        self._append_rows(t, new, real)
        self._write(times[is_whole], envs[is_whole], sizes[is_whole], real)
        self.num_dropped_episodes += int(np.count_nonzero((sizes > 1) & ~is_whole))
        for time, env, size in zip(times, envs, sizes, strict=True):
            rows = self._rows[time - size + 1 : time + 1, env]
            self._release(self._stream, rows)
            rows[:] = NO_ROW

    def _padding_values(self) -> dict[str, np.ndarray]:
        values = super()._padding_values()
        for name, zero in values.items():
            if self._padding_fn is None or name in (START, MASK):
                continue
            value = np.asarray(self._padding_fn(zero.shape, zero.dtype))
            if value.shape != zero.shape:
                raise ValueError(
                    f"padding_fn: got shape {value.shape} for column {name!r}, expected {zero.shape}: the "
                    "value of one row, as numpy.zeros(shape, dtype) makes it."
                )
            values[name] = value.astype(zero.dtype, copy=False)
        return values
