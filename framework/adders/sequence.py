"""Items of rows of a fixed length, overlapping or not."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs

from framework import nest as nests
from framework.adders.block import BlockAdder, PriorityFns, transitions
from framework.adders.fields import is_absent, result_dtype
from framework.config_checks import whole_number
from framework.specs import frame_stack, leaves, path_name
from framework.types import FIRST, LAST, Nest, Step

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
    # Whether the rows of an episode are numbered on after the rows of the episode before.
    _continues = False
    # Whether items have their own lengths. Otherwise they are padded.
    _ragged = False
    # Whether items without a transition are written.
    _writes_empty = False
    # Largest number of rows in an item.
    _length: int

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
          sequence_length: length of the time axis; None if items differ in length (sequences with `TRUNCATE`,
            episodes without a `padding_fn`).
          extras_of_first_row: as in the constructor of `SequenceAdder`.
        """

        def with_time(spec: Any, dtype: Any = None) -> Any:
            shape, dtype = (sequence_length, *spec.shape), np.dtype(dtype or spec.dtype)
            kind: Any = OpenArray if sequence_length is None else dm_specs.Array
            return kind(shape, dtype, name=spec.name)

        def floats(spec: Any) -> Any:
            return with_time(spec, result_dtype(spec.dtype))

        def extra(path: tuple[Any, ...], spec: Any) -> Any:
            return spec if path and path[0] in extras_of_first_row else with_time(spec)

        return Step(
            observation=tree.map_structure(with_time, environment_spec.observations),
            action=tree.map_structure(with_time, environment_spec.actions),
            reward=tree.map_structure(floats, environment_spec.rewards),
            discount=tree.map_structure(floats, environment_spec.discounts),
            start_of_episode=with_time(dm_specs.Array((), np.bool_, START)),
            extras=() if is_absent(extras_spec) else tree.map_structure_with_path(extra, extras_spec),
            mask=with_time(dm_specs.Array((), np.float32, MASK)),
        )

    def _allocate(self, observation: Nest) -> None:
        super()._allocate(observation)
        # When each env's current count began: the row at `t` has the number t + _num_shifted - origin + 1.
        self._origin = np.full(self._width, self._t + self._num_shifted, np.int64)
        self._padding: np.ndarray | None = None

    def _declare(self, action: Nest, timestep: Any, extras: Nest) -> None:
        super()._declare(action, timestep, extras)
        self._names = [name for field in self._fields[:4] for name in field.names]
        self._names += [START, *(self._extras.names if self._extras is not None else ()), MASK]
        observation, reward, discount = self._observation.template, timestep.reward, timestep.discount
        present = () if self._extras is None else extras
        self._pack = nests.unflattener(Step(observation, action, reward, discount, None, present, None))

    def _new_rows(self, t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what is known of the rows before they are appended.

        Returns:
          Three arrays `[t + 1, B]`: whether this block appends the row, whether the row is a transition, and
          the number, from 1, of each new row in its episode (since the start, if `_continues`).
        """
        history = self._history
        kinds = self._kinds[: t + 1]
        new = np.zeros(kinds.shape, np.bool_)
        new[history:t] = True
        # Row t is open unless it is LAST; a first row that is LAST was written with the block before.
        new[history] &= kinds[history] != LAST
        new[t] = kinds[t] == LAST
        real = np.zeros(kinds.shape, np.bool_)
        real[:-1] = transitions(kinds)
        counts = self._count(t)
        self._origin = t + self._num_shifted + 1 - counts[t]
        return new, real, counts

    def _append_rows(self, t: int, new: np.ndarray, real: np.ndarray) -> None:
        """Appends the complete rows; see `_new_rows`."""
        history, width, kinds = self._history, self._width, self._kinds[: t + 1]
        # A LAST row of an earlier block may have got the action that the environment ignored since.
        closing = (new & ~real) | (kinds == LAST)
        if closing.any():
            for field in self._fields[1:]:
                field.clear(np.flatnonzero(closing))
        # Most blocks are whole time steps: then no selection of rows is needed.
        first = history + int(not new[history].any())
        last = t + int(new[t].any())
        whole = new[first:last].all()
        index = slice(first * width, last * width) if whole else np.flatnonzero(new)
        columns: dict[str, np.ndarray] = {}
        for field in self._fields:
            columns.update(field.take(index))
        for name in self._stored_elsewhere:
            del columns[name]
        columns[START] = kinds.reshape(-1)[index] == FIRST
        columns[MASK] = real.reshape(-1)[index].astype(np.float32)
        self._rows.reshape(-1)[index] = self._writer.append(self._stream, columns)

    def _count(self, t: int) -> np.ndarray:
        """Returns `[t + 1, B]`, the number of each row from `history` on in its episode."""
        times = np.arange(t + 1)[:, None] + self._num_shifted
        if self._continues:
            return times - self._origin + 1
        begins = self._kinds[: t + 1] == FIRST
        begins[: self._history] = False
        return times - np.maximum.accumulate(np.where(begins, times, self._origin), axis=0) + 1

    def _forget(self) -> None:
        super()._forget()
        if self._padding is not None:
            self._release(self._stream, self._padding)
            self._padding = None
        self._origin[:] = self._t + self._num_shifted

    @property
    def _stored_elsewhere(self) -> set[str]:
        """The columns that are not in the stream of whole rows."""
        return {*self._of_first_row, *(() if self._frames is None else self._frames.names)}

    def _padding_values(self) -> dict[str, np.ndarray]:
        """Returns one row of padding."""
        values = {
            name: np.zeros(array.shape[2:], array.dtype)
            for field in self._fields
            for name, array in zip(field.names, field.arrays, strict=True)
            if name not in self._of_first_row
        }
        return {**values, START: np.zeros((), np.bool_), MASK: np.zeros((), np.float32)}

    def _write(self, last: np.ndarray, envs: np.ndarray, sizes: np.ndarray, real: np.ndarray) -> None:
        """Writes the items that have a transition, or all of them with `_writes_empty`.

        Args:
          last: int64 `[k]`, the time index of each item's last row.
          envs: int64 `[k]`, the env of each item.
          sizes: int64 `[k]`, the number of rows of each item, without padding.
          real: bool `[time, B]`, which rows are transitions.
        """
        times = (last - sizes + 1)[:, None] + np.arange(self._length)
        padded = np.arange(self._length) >= sizes[:, None]
        times[padded] = 0
        index = times * self._width + envs[:, None]
        is_real = real.reshape(-1)[index] & ~padded
        kept = is_real.any(axis=1) | self._writes_empty
        if not kept.any():
            return
        index, padded, is_real, sizes = index[kept], padded[kept], is_real[kept], sizes[kept]
        rows = self._rows.reshape(-1)[index]
        if padded.any():
            # Rows beyond the length of a ragged item are never read, but must exist.
            rows = np.where(padded, rows[:, :1] if self._ragged else self._padding_row(), rows)
        lengths = sizes if self._ragged else None
        first_rows = None
        if self._extras is not None and self._of_first_row:
            values = self._extras.take(index[:, 0])
            values = {name: value for name, value in values.items() if name in self._of_first_row}
            first_rows = self._writer.append(FIRST_ROWS, values)
        slices = dict.fromkeys(self._names, (self._stream, rows, lengths))
        slices.update(dict.fromkeys(self._of_first_row, (FIRST_ROWS, first_rows, None)))
        if self._frames is not None:
            frames = self._frame_rows.reshape(-1, self._frame_rows.shape[-1])[index].reshape(len(rows), -1)
            slices.update(dict.fromkeys(self._frames.names, (self._frames.stream, frames, None)))
        columns = [self._writer.slice(stream, name, *where) for name, (stream, *where) in slices.items()]

        def data() -> Nest:
            padding = self._padding_values()
            values = {START: self._kinds.reshape(-1)[index] == FIRST, MASK: is_real.astype(np.float32)}
            for field in self._fields if self._shows_observations else self._fields[1:]:
                values.update(field.take(index))
            for name in padding.keys() & values.keys():
                values[name][padded] = padding[name]
            for name in self._of_first_row:
                values[name] = values[name][:, 0]
            return self._pack([values.get(name) for name in self._names])

        try:
            self._write_items(self._pack(columns), len(rows), data)
        finally:  # A priority function may fail.
            if first_rows is not None:
                self._release(FIRST_ROWS, first_rows)

    def _padding_row(self) -> int:
        """Returns the number of the one row that all padding of this adder refers to."""
        if self._padding is None:
            columns = {name: value[None] for name, value in self._padding_values().items()}
            self._padding = self._writer.append(self._stream, columns)
        return int(self._padding[0])


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
        observation_spec: Nest | None = None,
        priorities_see_observations: bool = True,
    ):
        """Creates an adder for one batched environment.

        Args:
          client: any client of `framework.replay`.
          sequence_length: number of rows in an item, at least 1.
          period: number of rows from the start of one item to the start of the next, in
            [1, `sequence_length`].
          end_of_episode_behavior: an `EndOfEpisodeBehavior` or its name, upper or lower case.
          extras_of_first_row: keys of the extras that an item needs for its first row only, such as a
            recurrent state. In an item they have no time axis; other rows' are not stored.
          priority_fns: `{table: fn or None}`; each item goes to each table. `fn` takes a `Step` of k items
            (leaves `[k, L, ...]`, shorter items padded with zeros) and returns k priorities. None means the
            largest priority so far.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too; None
            means 512.
          max_delay: seconds; see `BlockAdder`.
          observation_spec: nest of the specs of one env's observations. Each frame of a leaf with a spec of
            `specs.frame_stack` is stored once, instead of k times. In an item, such a leaf is `[L * k, ...]`,
            the k frames of each of the L rows; `restacked` makes `[L, k, ...]` of it. Only with CONTINUE.
            None stores observations as they are.
          priorities_see_observations: whether the items that `priority_fns` get have observations. Without
            them these are None, and copies of images are saved.
        """
        self._length = whole_number("sequence_length", sequence_length, 1)
        self._period = whole_number("period", period, 1)
        if period > sequence_length:
            raise ValueError(
                f"period: got {period} with sequence_length {sequence_length}, expected at most the sequence "
                "length. Rows between two sequences would be lost."
            )
        self._end = _as_behavior(end_of_episode_behavior)
        self._continues = self._end is EndOfEpisodeBehavior.CONTINUE
        self._ragged = self._end is EndOfEpisodeBehavior.TRUNCATE  # including items of full length
        self._extras_of_first_row = frozenset(extras_of_first_row)
        self._stacks: dict[str, int] = {}  # the number of frames of each column that is a stack
        if observation_spec is not None and self._continues:
            for path, leaf in leaves(observation_spec):
                if (k := frame_stack(leaf)) is not None:
                    self._stacks[path_name("observation", path)] = k
        if len(set(self._stacks.values())) > 1:
            self._stacks = {}  # rows of different numbers of frames
        super().__init__(client, self._length - 1, priority_fns, max_in_flight_items, max_delay)
        self._shows_observations &= priorities_see_observations

    def end_episodes(self) -> None:
        if not self._continues:
            super().end_episodes()

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
            self._of_first_row = frozenset(path_name("extras", path) for path in paths if path[0] in keys)

    def _allocate(self, observation: Nest) -> None:
        super()._allocate(observation)
        if self._stacks:
            self._store_frames(self._stacks, next(iter(self._stacks.values())))

    def _emit(self, t: int) -> None:
        self._append_frames(t)
        length, period = self._length, self._period
        new, real, counts = self._new_rows(t)
        self._append_rows(t, new, real)
        full = new & (counts >= length) & ((counts - length) % period == 0)
        size = np.where(full, length, 0)  # real and closing rows in the item that ends here; 0: no item
        tails = new & ~real & ~full
        if not self._continues and tails.any():
            if self._end is EndOfEpisodeBehavior.WRITE:
                self.num_dropped_episodes += int(np.count_nonzero(tails & (counts > 1) & (counts < length)))
                size[tails & (counts >= length)] = length
            else:
                # The write point that the episode did not reach; the item starts `length` rows before it.
                missing = np.where(counts < length, length - counts, -(counts - length) % period)
                size[tails] = (length - missing)[tails]
        steps, envs = np.nonzero(size)
        # Items are ordered as add() completed their rows, whatever the size of the blocks: a LAST row is
        # complete together with the row before it.
        order = np.lexsort((steps, envs, steps - (self._kinds[steps, envs] == LAST)))
        steps, envs = steps[order], envs[order]
        self._write(steps, envs, size[steps, envs], real)


def _as_behavior(value: EndOfEpisodeBehavior | str) -> EndOfEpisodeBehavior:
    if isinstance(value, EndOfEpisodeBehavior):
        return value
    try:
        return EndOfEpisodeBehavior[str(value).upper()]
    except KeyError:
        names = ", ".join(behavior.name for behavior in EndOfEpisodeBehavior)
        raise ValueError(f"end_of_episode_behavior: got {value!r}, expected one of {names}.") from None
