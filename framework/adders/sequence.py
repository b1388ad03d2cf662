"""Items of rows of a fixed length, overlapping or not."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs

from framework.adders.block import BlockAdder, PriorityFns
from framework.adders.fields import column_name, is_absent, result_dtype
from framework.types import FIRST, LAST, Nest, Step

STREAM = "steps"
FIRST_ROWS = "first_rows"
START, MASK = "start_of_episode", "mask"


class EndOfEpisodeBehavior(enum.Enum):
    """How an adder handles the rows at the end of an episode that do not fill a sequence.

    An episode of T = 7 steps has the rows 1 ... 8; row 8 is the closing row. With `sequence_length` 3 and
    `period` 3:

    ```text
    ZERO_PAD    1 2 3 | 4 5 6 | 7 8 0          zeros up to the next write point
    TRUNCATE    1 2 3 | 4 5 6 | 7 8            a shorter item
    WRITE       1 2 3 | 4 5 6 | 6 7 8          the last three rows; episodes with fewer rows are dropped
    CONTINUE    1 2 3 | 4 5 6 | 7 8 1' | ...   the item goes on with rows of the next episode
    ```
    """

    ZERO_PAD = "zero_pad"
    TRUNCATE = "truncate"
    WRITE = "write"
    CONTINUE = "continue"


@dataclasses.dataclass(frozen=True)
class OpenArray:
    """A spec whose sizes may be None, which means any size; `dm_env.specs.Array` has fixed sizes only."""

    shape: tuple[int | None, ...]
    dtype: np.dtype
    name: str | None = None


class RowAdder(BlockAdder):
    """The base of the adders of sequences and episodes: whole rows, stored once, in one stream.

    A row is an observation, its action, the reward and discount that resulted from the action, whether the
    observation is the first of its episode, the extras, and the mask. The mask is 1 if the row is a
    transition, 0 if it is the closing row (the last observation, with zeros for the rest) or padding.
    """

    # Columns of extras that an item stores for its first row only, in the stream FIRST_ROWS.
    _of_first_row: frozenset[str] = frozenset()

    def _begin(self) -> None:
        # Row numbers in replay; -1 where there is no row.
        self._rows = np.full(self._kinds.shape, -1, np.int64)
        # Time index of row 0 of each env's current count: the row at t is number t - origin + 1.
        self._origin = np.full(self._width, self._history, np.int64)
        self._padding: np.ndarray | None = None

    def _append_rows(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Appends the complete rows.

        Returns:
          Two bool arrays `[t + 1 - history, B]`: which rows this call appended, and which are transitions.
        """
        history = self._history
        assert self._observation is not None and self._action is not None
        assert self._reward is not None and self._discount is not None
        kinds = self._kinds[history : t + 1]
        new = np.ones(kinds.shape, np.bool_)
        # Row t is open unless it is LAST; a first row that is LAST was written with the block before.
        new[-1] = kinds[-1] == LAST
        new[0] &= kinds[0] != LAST
        real = np.zeros(kinds.shape, np.bool_)
        real[:-1] = (kinds[:-1] < LAST) & (kinds[1:] > FIRST)
        closing = new & ~real
        fields = [self._action, self._reward, self._discount]
        if self._extras is not None:
            fields.append(self._extras)
        if closing.any():
            for field in fields:
                field.clear(history, closing)
        # Most blocks are whole time steps: then no selection of rows is needed.
        first = int(not new[0].any())
        last = len(new) - int(not new[-1].any())
        where = None if new[first:last].all() else new[first:last]
        begin, end = history + first, history + last
        columns = self._observation.columns(begin - self._skip, end - self._skip, where)
        for field in fields:
            columns.update(field.columns(begin, end, where))
        for name in self._of_first_row:
            del columns[name]
        picked = (
            (lambda array: array[first:last].reshape(-1)) if where is None else (lambda array: array[new])
        )
        columns[START] = picked(kinds == FIRST)
        columns[MASK] = picked(real).astype(np.float32)
        self._rows[history : t + 1][new] = self._writer.append(STREAM, columns)
        return new, real

    def _counts(self, t: int, across_episodes: bool) -> np.ndarray:
        """Returns `[t + 1 - history, B]`: each row's number, from 1, in its episode (or since the start)."""
        history = self._history
        times = np.arange(history, t + 1)[:, None]
        if across_episodes:
            return times - self._origin + 1
        starts = np.where(self._kinds[history : t + 1] == FIRST, times, self._origin)
        origin = np.maximum.accumulate(np.maximum(starts, self._origin), axis=0)
        self._origin = origin[-1].copy()
        return times - origin + 1

    def _shift(self, by: int) -> None:
        history = self._history
        self._release(STREAM, self._rows[:by])
        self._rows[: history + 1] = self._rows[by : by + history + 1]
        self._rows[history + 1 :] = -1
        self._origin -= by

    def _forget(self) -> None:
        self._release(STREAM, self._rows)
        self._rows[:] = -1
        if self._padding is not None:
            self._release(STREAM, self._padding)
            self._padding = None
        self._origin[:] = self._history

    def _padding_row(self) -> int:
        """Returns the number of the one row that all padding of this adder refers to."""
        if self._padding is None:
            columns = {name: value[None] for name, value in self._padding_values().items()}
            columns[START] = np.zeros(1, np.bool_)
            columns[MASK] = np.zeros(1, np.float32)
            self._padding = self._writer.append(STREAM, columns)
        return int(self._padding[0])

    def _padding_values(self) -> dict[str, np.ndarray]:
        """Returns one row of padding, without start and mask."""
        return {name: np.zeros(shape, dtype) for name, shape, dtype in self._leaf_specs()}

    def _leaf_specs(self) -> list[tuple[str, tuple[int, ...], np.dtype]]:
        """Returns `(column, shape, dtype)` of one row's leaves, without start and mask."""
        return [
            (name, array.shape[2:], array.dtype)
            for field in (self._observation, self._action, self._reward, self._discount, self._extras)
            if field is not None
            for name, array in zip(field.names, field.arrays, strict=True)
            if name not in self._of_first_row
        ]

    def _slices(self, rows: np.ndarray, lengths: np.ndarray | None, first_rows: Any = None) -> Step:
        """Returns the trajectory of items of `rows` `[k, L]` and of `first_rows` `[k]` of `FIRST_ROWS`."""

        def leaf(name: str) -> Any:
            if name in self._of_first_row:
                return self._writer.slice(FIRST_ROWS, name, first_rows)
            return self._writer.slice(STREAM, name, rows, lengths)

        return self._step(leaf)

    def _step(self, leaf: Any) -> Step:
        """Returns a `Step` of `leaf(column)` for each leaf."""

        def field_nest(field: Any) -> Nest:
            return () if field is None else field.nest([leaf(name) for name in field.names])

        return Step(
            observation=field_nest(self._observation),
            action=field_nest(self._action),
            reward=field_nest(self._reward),
            discount=field_nest(self._discount),
            start_of_episode=leaf(START),
            extras=field_nest(self._extras),
            mask=leaf(MASK),
        )


class SequenceAdder(RowAdder):
    """Writes `Step` items: rows [k, k + L) when an episode has L rows, then every `period` rows.

    An episode of T steps has T + 1 rows. `EndOfEpisodeBehavior` says how the rows that do not fill a sequence
    are handled. `mask` tells transitions from the closing row and padding. Overlapping sequences of one
    episode share their rows, and padding takes no memory. An item without a transition is not written. An
    episode that is cut short by a FIRST step ends like a truncated one, with its last observation in the
    closing row.
    """

    def __init__(
        self,
        client: Any,
        sequence_length: int,
        period: int,
        end_of_episode_behavior: EndOfEpisodeBehavior | str = EndOfEpisodeBehavior.ZERO_PAD,
        *,
        extras_of_first_row: Collection[str] = (),
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_delay: float = 0.05,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          sequence_length: number of rows in an item, at least 1.
          period: number of rows from the start of one item to the start of the next, in
            [1, `sequence_length`].
          end_of_episode_behavior: an `EndOfEpisodeBehavior` or its name, upper or lower case.
          extras_of_first_row: keys of the extras that an item needs for its first row only, such as a
            recurrent state. In an item they have no time axis; those of other rows are not stored.
          priority_fns: `{table: fn or None}`; each item goes to each table. `fn` takes a `Step` of k items
            (leaves `[k, L, ...]`, shorter items padded with zeros) and returns k priorities. None means the
            largest priority so far.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too; None
            means 512.
          max_delay: seconds; see `BlockAdder`.
        """
        for name, value in (("sequence_length", sequence_length), ("period", period)):
            if value != int(value) or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1.")
        if period > sequence_length:
            raise ValueError(
                f"period: got {period} with sequence_length {sequence_length}, expected at most the sequence "
                "length. Rows between two sequences would be lost."
            )
        self._length = int(sequence_length)
        self._period = int(period)
        self._end = _as_behavior(end_of_episode_behavior)
        self._extras_of_first_row = frozenset(extras_of_first_row)
        super().__init__(
            client,
            self._length - 1,
            priority_fns,
            max_in_flight_items=max_in_flight_items,
            max_delay=max_delay,
        )

    @classmethod
    def signature(
        cls,
        environment_spec: Any,
        extras_spec: Nest = (),
        sequence_length: int | None = None,
        extras_of_first_row: Collection[str] = (),
    ) -> Step:
        """Returns the specs of one item, for `replay.Table(signature=...)`.

        Args:
          environment_spec: specs of the environment.
          extras_spec: specs of the extras; `()` if there are none.
          sequence_length: length of the time axis; None if items differ in length (`TRUNCATE`).
          extras_of_first_row: as in the constructor.
        """
        return step_signature(environment_spec, extras_spec, sequence_length, extras_of_first_row)

    def _declare(self, action: Nest, timestep: Any, extras: Nest) -> None:
        keys = self._extras_of_first_row
        if keys and not (isinstance(extras, Mapping) and keys <= extras.keys()):
            have = sorted(extras) if isinstance(extras, Mapping) else type(extras).__name__
            raise ValueError(
                f"extras_of_first_row: got {sorted(keys)} with extras {have}, expected keys of the extras. "
                "Return extras from the policy as a dict that has these keys."
            )
        super()._declare(action, timestep, extras)
        if keys:
            paths = [path for path, _ in tree.flatten_with_path(extras)]
            self._of_first_row = frozenset(column_name("extras", path) for path in paths if path[0] in keys)

    def _emit(self, t: int) -> None:
        history, length, period = self._history, self._length, self._period
        new, real = self._append_rows(t)
        counts = self._counts(t, across_episodes=self._end is EndOfEpisodeBehavior.CONTINUE)
        full = new & (counts >= length) & ((counts - length) % period == 0)
        size = np.where(full, length, 0)  # real and closing rows in the item that ends here; 0: no item
        closing = new & ~real
        if closing.any() and self._end is not EndOfEpisodeBehavior.CONTINUE:
            tails = closing & ~full
            if self._end is EndOfEpisodeBehavior.WRITE:
                self.num_dropped_episodes += int(np.count_nonzero(tails & (counts < length)))
                size[tails & (counts >= length)] = length
            else:
                # The write point that the episode did not reach; the item starts `length` rows before it.
                missing = np.where(counts < length, length - counts, -(counts - length) % period)
                size[tails] = (length - missing)[tails]
        steps, envs = np.nonzero(size)
        if not len(steps):
            return
        # Items are ordered as add() completed their rows, whatever the size of the blocks: a LAST row is
        # complete together with the row before it.
        early = self._kinds[steps + history, envs] == LAST
        if early.any():
            order = np.lexsort((steps, envs, steps - early))
            steps, envs = steps[order], envs[order]
        sizes = size[steps, envs]
        first = steps + history - sizes + 1
        times = first[:, None] + np.arange(length)
        padded = np.arange(length) >= sizes[:, None]
        times[padded] = 0
        kept = self._has_transition(times, padded, envs, t)
        if not kept.all():
            times, padded, envs, sizes = times[kept], padded[kept], envs[kept], sizes[kept]
        if len(envs):
            self._write(times * self._width + envs[:, None], padded, sizes)

    def _has_transition(self, times: np.ndarray, padded: np.ndarray, envs: np.ndarray, t: int) -> np.ndarray:
        """Returns bool `[items]`: which items have a row that is a transition."""
        kinds = self._kinds[: t + 1]
        all_real = np.zeros(kinds.shape, np.bool_)
        all_real[:-1] = (kinds[:-1] >= FIRST) & (kinds[:-1] < LAST) & (kinds[1:] > FIRST)
        return (all_real[times, envs[:, None]] & ~padded).any(axis=1)

    def _write(self, index: np.ndarray, padded: np.ndarray, sizes: np.ndarray) -> None:
        """Writes the items of the rows with flat indices `time * B + env`, `[items, L]`."""
        rows = self._rows.reshape(-1)[index]
        # All items of TRUNCATE are ragged, including those of full length.
        lengths = sizes if self._end is EndOfEpisodeBehavior.TRUNCATE else None
        if padded.any():
            # Rows beyond the length of a ragged item are never read, but must exist.
            rows = np.where(padded, rows[:, :1] if lengths is not None else self._padding_row(), rows)
        first_rows = self._append_first_rows(index[:, 0]) if self._of_first_row else None
        self._write_items(
            self._slices(rows, lengths, first_rows), len(rows), lambda: self._data(index, padded)
        )
        if first_rows is not None:
            self._release(FIRST_ROWS, first_rows)

    def _append_first_rows(self, index: np.ndarray) -> np.ndarray:
        """Appends the extras that items need of their first rows only; `index` `[k]` holds these rows."""
        assert self._extras is not None
        values = zip(self._extras.names, self._extras.arrays, strict=True)
        return self._writer.append(
            FIRST_ROWS,
            {
                name: array.reshape(-1, *array.shape[2:]).take(index, axis=0)
                for name, array in values
                if name in self._of_first_row
            },
        )

    def _data(self, index: np.ndarray, padded: np.ndarray) -> Step:
        """Returns the items' values, for priority functions."""
        kinds = self._kinds.reshape(-1)
        following = kinds[np.minimum(index + self._width, len(kinds) - 1)]
        newest = index // self._width == self._t
        real = (kinds[index] < LAST) & (following > FIRST) & ~newest & ~padded
        values = {START: (kinds[index] == FIRST) & ~padded, MASK: real.astype(np.float32)}
        for field in (self._observation, self._action, self._reward, self._discount, self._extras):
            if field is not None:
                # The environment ignored the action after a LAST step: the array holds it, the row does not.
                zero = padded if field is self._observation else ~real
                for name, value in zip(field.names, field.take(index), strict=True):
                    value[zero] = 0
                    values[name] = value[:, 0] if name in self._of_first_row else value
        return self._step(values.__getitem__)


def step_signature(
    environment_spec: Any, extras_spec: Nest, length: int | None, extras_of_first_row: Collection[str] = ()
) -> Step:
    """Returns the specs of `Step` items with a time axis of `length` rows; None means any length."""

    def array(shape: tuple[int, ...], dtype: Any, name: str | None) -> Any:
        if length is None:
            return OpenArray((None, *shape), np.dtype(dtype), name)
        return dm_specs.Array((length, *shape), dtype, name=name)

    def with_time(spec: Any, dtype: Any = None) -> Any:
        return array(spec.shape, dtype or spec.dtype, spec.name)

    def floats(spec: Any) -> Any:
        return with_time(spec, result_dtype(spec.dtype))

    def extra(path: tuple[Any, ...], spec: Any) -> Any:
        return spec if path and path[0] in extras_of_first_row else with_time(spec)

    return Step(
        observation=tree.map_structure(with_time, environment_spec.observations),
        action=tree.map_structure(with_time, environment_spec.actions),
        reward=tree.map_structure(floats, environment_spec.rewards),
        discount=tree.map_structure(floats, environment_spec.discounts),
        start_of_episode=array((), np.bool_, START),
        extras=() if is_absent(extras_spec) else tree.map_structure_with_path(extra, extras_spec),
        mask=array((), np.float32, MASK),
    )


def _as_behavior(value: EndOfEpisodeBehavior | str) -> EndOfEpisodeBehavior:
    if isinstance(value, EndOfEpisodeBehavior):
        return value
    try:
        return EndOfEpisodeBehavior[str(value).upper()]
    except KeyError:
        names = ", ".join(behavior.name for behavior in EndOfEpisodeBehavior)
        raise ValueError(f"end_of_episode_behavior: got {value!r}, expected one of {names}.") from None
