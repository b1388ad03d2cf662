"""Items of whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from framework.adders.block import PriorityFns
from framework.adders.sequence import MASK, START, STREAM, RowAdder, step_signature
from framework.types import FIRST, LAST, Nest, Step

PaddingFn = Callable[[tuple[int, ...], np.dtype], np.ndarray]

# Initial number of rows for each env; doubled when an episode is longer.
_FIRST_CAPACITY = 64


class EpisodeAdder(RowAdder):
    """Writes one `Step` item for each finished episode, with all its T + 1 rows.

    Unfinished episodes are not written: a FIRST step or `reset()` in mid-episode drops the open one.
    `num_dropped_episodes` counts them.
    """

    def __init__(
        self,
        client: Any,
        max_sequence_length: int,
        padding_fn: PaddingFn | None = None,
        *,
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          max_sequence_length: the largest number of rows (observations) of an episode; it has one transition
            fewer. A step that would make an episode longer raises `ValueError` and is not added.
          padding_fn: takes the `(shape, dtype)` of one row's leaf and returns the value that fills items up
            to `max_sequence_length`, as `numpy.zeros` does. Rows of padding have `start_of_episode` False and
            mask 0. None writes items that are as long as their episode.
          priority_fns: `{table: fn or None}`; each item goes to each table. `fn` takes a `Step` of k items
            (leaves `[k, max_sequence_length, ...]`, padded) and returns k priorities. None means the largest
            priority so far.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too; None
            means 512.
          max_delay: seconds; see `BlockAdder`.
        """
        if max_sequence_length != int(max_sequence_length) or max_sequence_length < 2:
            raise ValueError(
                f"max_sequence_length: got {max_sequence_length!r}, expected a whole number of at least 2: "
                "An episode of one transition has two rows."
            )
        self._max = int(max_sequence_length)
        self._padding_fn = padding_fn
        super().__init__(
            client, 0, priority_fns, max_in_flight_items=max_in_flight_items, max_delay=max_delay
        )

    @classmethod
    def signature(
        cls, environment_spec: Any, extras_spec: Nest = (), sequence_length: int | None = None
    ) -> Step:
        """Returns the specs of one item, for `replay.Table(signature=...)`.

        Args:
          environment_spec: specs of the environment.
          extras_spec: specs of the extras; `()` if there are none.
          sequence_length: `max_sequence_length` if the adder has a `padding_fn`, else None.
        """
        return step_signature(environment_spec, extras_spec, sequence_length)

    def _begin(self) -> None:
        super()._begin()
        # The open episodes: row ids [B, capacity] and, for priority functions only, the rows themselves.
        self._capacity = min(self._max, _FIRST_CAPACITY)
        self._episodes = np.full((self._width, self._capacity), -1, np.int64)
        self._values: dict[str, np.ndarray] = {}
        # Rows of the open episode of each env, the open row included.
        self._counted = np.ones(self._width, np.int64)
        self._longest = 1

    def _advance(self, kind: Any) -> None:
        if self._longest >= self._max and (over := (self._counted >= self._max) & (kind != FIRST)).any():
            raise ValueError(
                f"max_sequence_length: the episodes of envs {np.flatnonzero(over).tolist()} have "
                f"{self._max} observations already, which is the limit. Give a larger max_sequence_length or "
                "limit the environment's steps; reset() or add_first() drops these episodes and goes on."
            )
        if self._envs is None:
            self._longest = 1 if kind == FIRST else self._longest + 1
            self._counted[0] = self._longest
        else:
            self._counted += 1
            self._counted[kind == FIRST if isinstance(kind, np.ndarray) else slice(None)] = 1
            self._longest = int(self._counted.max())
        super()._advance(kind)

    def _forget(self) -> None:
        super()._forget()
        self._release(STREAM, self._episodes)
        self._episodes[:] = -1
        self._counted[:] = self._longest = 1

    def _shift(self, by: int) -> None:
        # Rows are not released before their episode ends: _episodes refers to them.
        self._rows[:] = -1
        self._origin -= by

    def _emit(self, t: int) -> None:
        new, real = self._append_rows(t)
        counts = self._counts(t, across_episodes=False)
        closing = new & ~real
        columns = {STREAM: self._rows[: t + 1]}
        if self._needs_data:
            columns.update(self._block_values(t, new, real))
        self._reserve(int(counts[new].max(initial=1)), columns)
        # The rows of an env's second episode in this block wait until the first one is taken out.
        ordinal = np.cumsum(closing, axis=0) - closing
        finished: list[tuple[int, int, dict[str, np.ndarray]]] = []
        for i in range(int(ordinal[new].max(initial=0)) + 1):
            now = new & (ordinal == i)
            times, envs = np.nonzero(now)
            places = counts[times, envs] - 1
            for name, block in columns.items():
                self._target(name)[envs, places] = block[times, envs]
            for time, env in zip(*np.nonzero(now & closing), strict=True):
                count = int(counts[time, env])
                episode = {name: self._target(name)[env, :count].copy() for name in columns}
                self._episodes[env] = -1
                if count > 1 and self._kinds[time, env] == LAST:
                    finished.append((int(time), int(env), episode))
                else:
                    self.num_dropped_episodes += count > 1
                    self._release(STREAM, episode[STREAM])
        if finished:
            finished.sort(key=lambda episode: episode[:2])
            self._write([episode for _, _, episode in finished])

    def _target(self, name: str) -> np.ndarray:
        return self._episodes if name == STREAM else self._values[name]

    def _reserve(self, rows: int, columns: dict[str, np.ndarray]) -> None:
        """Grows the arrays to episodes of `rows` rows."""
        while self._capacity < rows:
            self._capacity = min(self._max, 2 * self._capacity)
        missing = self._capacity - self._episodes.shape[1]
        if missing:
            self._episodes = np.pad(self._episodes, ((0, 0), (0, missing)), constant_values=-1)
        for name, block in columns.items():
            if name != STREAM:
                shape = (self._width, self._capacity, *block.shape[2:])
                have = self._values.get(name)
                if have is None or have.shape != shape:
                    grown = np.zeros(shape, block.dtype)
                    if have is not None:
                        grown[:, : have.shape[1]] = have
                    self._values[name] = grown

    def _block_values(self, t: int, new: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the block's rows `[t + 1, B, *shape]` by column."""
        values = {
            name: array[: t + 1]
            for field in (self._observation, self._action, self._reward, self._discount, self._extras)
            if field is not None
            for name, array in zip(field.names, field.arrays, strict=True)
        }
        values[START] = self._kinds[: t + 1] == FIRST
        values[MASK] = real.astype(np.float32)
        return values

    def _padding_values(self) -> dict[str, np.ndarray]:
        if self._padding_fn is None:
            return super()._padding_values()
        values = {}
        for name, shape, dtype in self._leaf_specs():
            value = np.asarray(self._padding_fn(shape, dtype))
            if value.shape != shape:
                raise ValueError(
                    f"padding_fn: got shape {value.shape} for column {name!r}, expected {shape}: the value "
                    "of one row, as numpy.zeros(shape, dtype) makes it."
                )
            values[name] = value.astype(dtype, copy=False)
        return values

    def _write(self, episodes: list[dict[str, np.ndarray]]) -> None:
        sizes = np.array([len(episode[STREAM]) for episode in episodes])
        rows = np.empty((len(episodes), self._max), np.int64)
        for i, episode in enumerate(episodes):
            rows[i, : sizes[i]] = episode[STREAM]
            # Rows beyond the length of a ragged item are never read, but must exist.
            rows[i, sizes[i] :] = episode[STREAM][-1] if self._padding_fn is None else self._padding_row()
        lengths = sizes if self._padding_fn is None else None
        self._write_items(self._slices(rows, lengths), len(rows), lambda: self._data(episodes))
        for episode in episodes:
            self._release(STREAM, episode[STREAM])

    def _data(self, episodes: list[dict[str, np.ndarray]]) -> Step:
        """Returns the items' values, for priority functions."""
        padding = self._padding_values()
        padding[START], padding[MASK] = np.zeros((), np.bool_), np.zeros((), np.float32)

        def stacked(name: str) -> np.ndarray:
            value = np.empty((len(episodes), self._max, *padding[name].shape), padding[name].dtype)
            value[:] = padding[name]
            for i, episode in enumerate(episodes):
                value[i, : len(episode[name])] = episode[name]
            return value

        return self._step(stacked)
