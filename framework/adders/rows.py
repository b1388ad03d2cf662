"""Whole rows of steps in one stream of replay, and the items that are windows over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs

from framework import nest as nests
from framework.adders.block import STEPS, Block, ItemBatch, ItemFormat
from framework.adders.fields import is_absent, result_dtype
from framework.adders.frames import FRAMES
from framework.specs import path_name
from framework.types import FIRST, LAST, Nest, Step

FIRST_ROWS = "first_rows"
START, MASK = "start_of_episode", "mask"

PaddingFn = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclasses.dataclass(frozen=True)
class OpenArray:
    """A spec whose sizes may be None, which means any size; `dm_env.specs.Array` has fixed sizes only."""

    shape: tuple[int | None, ...]
    dtype: np.dtype
    name: str | None = None


def step_signature(
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


class StepRows:
    """Whole rows, stored once, in one stream; items are windows of up to `length` rows.

    A row is an observation, its action, the reward and discount that resulted from the action, whether the
    observation is the first of its episode, the extras, and the mask. The mask is 1 if the row is a
    transition, 0 if it is the closing row (the last observation, with zeros for the rest) or padding.

    Attributes:
      length: largest number of rows in an item.
      before: int64 `[B]`, number of rows of the open episode of each env that are not in the block.
    """

    def __init__(
        self,
        length: int,
        extras_of_first_row: Collection[str] = (),
        *,
        ragged: bool = False,
        writes_empty: bool = False,
        continues: bool = False,
        padding_fn: PaddingFn | None = None,
    ):
        """Prepares for rows of any shapes.

        Args:
          length: largest number of rows in an item.
          extras_of_first_row: keys of the extras that an item stores for its first row only.
          ragged: whether items have their own lengths. Otherwise they are padded.
          writes_empty: whether items without a transition are written.
          continues: whether the rows of an episode are numbered on after the rows of the episode before.
          padding_fn: see `EpisodeAdder`; None pads with zeros.
        """
        self.length = length
        self._keys = frozenset(extras_of_first_row)
        self._ragged, self._writes_empty, self._padding_fn = ragged, writes_empty, padding_fn
        self._continues = continues
        self._padding: np.ndarray | None = None  # the one row that all padding refers to

    def begin(self, block: Block) -> None:
        """Takes the fields of a block; see `ItemFormat.begin`."""
        if self._padding is not None:
            block.release(STEPS, self._padding)
            self._padding = None
        fields = block.fields
        self.before = np.zeros(block.num_envs, np.int64)
        extras = fields["extras"].template if "extras" in fields else ()
        if self._keys and not (isinstance(extras, Mapping) and self._keys <= extras.keys()):
            have = sorted(extras) if isinstance(extras, Mapping) else type(extras).__name__
            raise ValueError(
                f"extras_of_first_row: got {sorted(self._keys)} with extras {have}, expected keys of the "
                "extras. Return extras from the policy as a dict that has these keys."
            )
        paths = [path for path, _ in tree.flatten_with_path(extras)] if self._keys else []
        # Columns of extras in the stream FIRST_ROWS.
        self._of_first_row = frozenset(path_name("extras", path) for path in paths if path[0] in self._keys)
        parts = [fields[name] for name in ("observation", "action", "reward", "discount")]
        self._names = [name for field in parts for name in field.names]
        self._names += [START, *(fields["extras"].names if "extras" in fields else ()), MASK]
        observation, action, reward, discount = (field.template for field in parts)
        self._pack = nests.unflattener(Step(observation, action, reward, discount, None, extras, None))

    def new_rows(self, block: Block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what is known of the rows before they are appended; called once for each block.

        Row `end` is open unless it is LAST. Then it is complete, and is not new in the next block.

        Returns:
          Three arrays `[end + 1, B]`: whether the block completes the row, whether the row is a transition,
          and its number in its episode.
        """
        history, step_types = block.history, block.step_types[: block.end + 1]
        new = np.zeros(step_types.shape, np.bool_)
        new[history:-1] = True
        new[history] &= step_types[history] != LAST
        new[-1] = step_types[-1] == LAST
        real = np.zeros(step_types.shape, np.bool_)
        real[:-1] = block.transitions()
        numbers = self.numbers(block)
        self.before = numbers[-1] - 1
        return new, real, numbers

    def numbers(self, block: Block) -> np.ndarray:
        """Returns int64 `[end + 1, B]`, the number, from 1, of each row from `history` on in its episode."""
        times = np.arange(block.end + 1)[:, None]
        origin = block.history - self.before
        if not self._continues:
            begins = block.step_types[: block.end + 1] == FIRST
            begins[: block.history] = False
            origin = np.maximum.accumulate(np.where(begins, times, origin), axis=0)
        return times - origin + 1

    def append(self, block: Block, new: np.ndarray, real: np.ndarray) -> None:
        """Appends rows.

        Args:
          block: holds the rows.
          new: bool `[end + 1, B]`, which rows are appended.
          real: bool `[end + 1, B]`, which rows are transitions.
        """
        history, width, step_types = block.history, block.num_envs, block.step_types[: len(new)]
        observation, *others = block.fields.values()
        # A LAST row of an earlier block may have got the action that the environment ignored since.
        closing = (new & ~real) | (step_types == LAST)
        if closing.any():
            for field in others:
                field.clear(np.flatnonzero(closing))
        # Most blocks are whole time steps: then no selection of rows is needed.
        first = history + int(not new[history].any())
        last = len(new) - int(not new[-1].any())
        index = slice(first * width, last * width) if new[first:last].all() else np.flatnonzero(new)
        columns = observation.take(index)
        for field in others:
            columns.update(field.take(index))
        for name in (*self._of_first_row, *(() if block.frames is None else block.frames.names)):
            del columns[name]
        columns[START] = step_types.reshape(-1)[index] == FIRST
        columns[MASK] = real.reshape(-1)[index].astype(np.float32)
        block.rows.reshape(-1)[index] = block.writer.append(STEPS, columns)

    def items(
        self, block: Block, last: np.ndarray, envs: np.ndarray, sizes: np.ndarray, real: np.ndarray
    ) -> ItemBatch:
        """Returns the items that have a transition, or all of them with `writes_empty`.

        Args:
          block: holds the rows, which are appended.
          last: int64 `[k]`, the time index of each item's last row.
          envs: int64 `[k]`, the env of each item.
          sizes: int64 `[k]`, the number of rows of each item, without padding.
          real: bool `[time, B]`, which rows are transitions.
        """
        writer, fields = block.writer, block.fields
        times = (last - sizes + 1)[:, None] + np.arange(self.length)
        padded = np.arange(self.length) >= sizes[:, None]
        times[padded] = 0
        index = times * block.num_envs + envs[:, None]
        is_real = real.reshape(-1)[index] & ~padded
        kept = is_real.any(axis=1) | self._writes_empty
        if not kept.any():
            return ItemBatch()
        index, padded, is_real, sizes = index[kept], padded[kept], is_real[kept], sizes[kept]
        rows = block.rows.reshape(-1)[index]
        if padded.any():
            # Rows beyond the length of a ragged item are never read, but must exist.
            rows = np.where(padded, rows[:, :1] if self._ragged else self._padding_row(block), rows)
        slices: dict[str, Any] = dict.fromkeys(self._names, (STEPS, rows, sizes if self._ragged else None))
        if self._of_first_row:
            values = fields["extras"].take(index[:, 0])
            values = {name: value for name, value in values.items() if name in self._of_first_row}
            first_rows = writer.append(FIRST_ROWS, values)
            block.release(FIRST_ROWS, first_rows)
            slices.update(dict.fromkeys(self._of_first_row, (FIRST_ROWS, first_rows, None)))
        if block.frames is not None:
            frames = block.frames.rows.reshape(-1, block.frames.rows.shape[-1])[index]
            if padded.any():
                frames[padded] = block.frames.padding()
            frames = frames.reshape(len(rows), -1)
            slices.update(dict.fromkeys(block.frames.names, (FRAMES, frames, None)))
        columns = [writer.slice(stream, name, *where) for name, (stream, *where) in slices.items()]
        starts = block.step_types.reshape(-1)[index] == FIRST

        def data() -> Nest:
            padding = self._padding_values(block)
            values = {START: starts, MASK: is_real.astype(np.float32)}
            for name, field in fields.items():
                if name != "observation" or field.keeps_history:
                    values.update(field.take(index))
            for name in padding.keys() & values.keys():
                values[name][padded] = padding[name]
            for name in self._of_first_row:
                values[name] = values[name][:, 0]
            return self._pack([values.get(name) for name in self._names])

        return ItemBatch(len(rows), self._pack(columns), data)

    def _padding_row(self, block: Block) -> int:
        if self._padding is None:
            frames = () if block.frames is None else block.frames.names
            values = self._padding_values(block).items()
            columns = {name: value[None] for name, value in values if name not in frames}
            self._padding = block.writer.append(STEPS, columns)
        return int(self._padding[0])

    def _padding_values(self, block: Block) -> dict[str, np.ndarray]:
        """Returns one row of padding."""
        values = {START: np.zeros((), np.bool_), MASK: np.zeros((), np.float32)}
        for field in block.fields.values():
            for name, array in zip(field.names, field.arrays, strict=True):
                if name not in self._of_first_row:
                    values[name] = self._padded(name, np.zeros(array.shape[2:], array.dtype))
        return values

    def _padded(self, name: str, zero: np.ndarray) -> np.ndarray:
        if self._padding_fn is None:
            return zero
        value = np.asarray(self._padding_fn(zero.shape, zero.dtype))
        if value.shape != zero.shape:
            raise ValueError(
                f"padding_fn: got shape {value.shape} for column {name!r}, expected {zero.shape}: the "
                "value of one row, as numpy.zeros(shape, dtype) makes it."
            )
        return value.astype(zero.dtype, copy=False)


@dataclasses.dataclass(eq=False)
class RowFormat(ItemFormat):
    """The base of the formats whose items are windows over `rows`."""

    rows: StepRows

    def begin(self, block: Block) -> None:
        self.rows.begin(block)
