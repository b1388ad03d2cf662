"""Time steps of several envs in preallocated arrays, from which adders make items.

Appending a block of rows to replay takes hardly longer than appending one row, and computing a block of
windows with numpy takes hardly longer than computing one. An adder therefore copies each time step into
arrays `[time, env, ...]`, a `Block`, and its `ItemFormat` makes items of many steps at once.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework.adders.fields import Field, grown, is_absent
from framework.adders.frames import NO_ROW, Frames
from framework.environments.rows import TimeStepRows
from framework.replay.writer import BatchWriter
from framework.specs import path_name
from framework.types import FIRST, MID, Nest

# The step type of the last row of an episode that `end_episodes` ended.
ENDED = 3
NO_EXTRAS: Nest = ()
STEPS = "steps"  # the stream of `Block.rows`
_NOTHING = dm_env.TimeStep(*4 * [object()])

# A block has at most this many time steps, rows and bytes of observations.
_MAX_BLOCK_STEPS = 256
_MAX_BLOCK_ROWS = 2048
_MAX_BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(slots=True, eq=False)
class ItemBatch:
    """The items that a block gives; none by default.

    Attributes:
      count: the number k of items.
      trajectory: nest of `BatchWriter.slice(...)` of k items; readers get the same nest.
      data: returns the values of the items, leaves `[k, ...]`, for priority functions.
      num_dropped_episodes: number of episodes of which items are missing.
    """

    count: int = 0
    trajectory: Nest = None
    data: Callable[[], Nest] = tuple
    num_dropped_episodes: int = 0


class Block:
    """The staged time steps of B envs, and rows before them that items still need.

    Row `t` of env `b` holds the observation of the env at time `t`, its action, and the reward and discount
    that resulted from the action. Row `end` is open: it has an observation and no action yet. A row closes
    its episode if it is LAST or ENDED, or if the row after it is FIRST (an episode that was cut short). Every
    other row except the open one is a transition. The first `history` rows belong to earlier blocks.

    A single time step (a scalar `step_type`) is broadcast to a batch of one env.

    Attributes:
      writer: appends rows to replay.
      batch: shape of step types: `(B,)`, or `()` of single time steps.
      history: time index of the first new row.
      end: time index of the open row.
      limit: the time index `end` at which the block is full.
      next_history: number of rows before the open one that the next block keeps; `ItemFormat.emit` may set
        it.
      fields: `observation`; `action`, `reward`, `discount` and perhaps `extras` from the first action on.
      step_types: int8 `[time, B]`, FIRST, MID, LAST or ENDED; -1 where there is no row.
      rows: int64 `[time, B]`, numbers of the rows in the stream `steps` of replay; -1 if they are not there.
      frames: the frames of observations that are stacks; None if observations are stored whole.
      time_steps: the same arrays as rows of time steps, for an environment that writes into them.
    """

    def __init__(
        self,
        writer: BatchWriter,
        observation: Nest,
        batch: tuple[int, ...],
        *,
        history: int = 0,
        steps: int | None = None,
        max_rows: int | None = None,
        keeps_observations: bool = True,
        stacks: int | Mapping[str, int] | None = None,
    ):
        """Allocates the arrays of the observations.

        Args:
          writer: appends rows to replay.
          observation: the first one, leaves `[*batch, ...]`.
          batch: shape of step types.
          history: number of rows before the block that are kept at first.
          steps: number of time steps; None for as many as fit.
          max_rows: largest number of rows of all envs, if `steps` is None; at least one time step fits.
          keeps_observations: whether rows of the history have observations, which are the large leaves.
          stacks: the number k of frames in an observation `[k, ...]`, or in each of these columns of the
            observation. Each frame is stored once.

        Raises:
          ValueError: A leaf of the observation is not numeric, or not a stack of k frames.
        """
        self.writer, self.batch = writer, batch
        width = batch[0] if batch else 1
        if steps is None:
            step_bytes = max(1, sum(np.asarray(leaf).nbytes for leaf in tree.flatten(observation)))
            rows = min(_MAX_BLOCK_ROWS, max_rows or _MAX_BLOCK_ROWS)
            steps = max(1, min(_MAX_BLOCK_STEPS, rows // width, _MAX_BLOCK_BYTES // step_bytes))
        self._steps = steps
        self.history = self.next_history = self.end = history
        self.limit = history + steps
        shape = (history + steps + 1, width)
        self.step_types: np.ndarray = np.full(shape, NO_ROW, np.int8)
        self.rows: np.ndarray = np.full(shape, NO_ROW, np.int64)
        field = self._field("observation", observation, keeps_history=keeps_observations)
        self.fields = {"observation": field}
        self.frames = Frames(writer, field, stacks, shape) if stacks else None
        self.time_steps: TimeStepRows | None = None
        self._spent: list[tuple[str, np.ndarray]] = []

    @property
    def num_envs(self) -> int:
        """The number B of envs."""
        return self.rows.shape[1]

    # --- a format's part: from rows to items ---

    def transitions(self) -> np.ndarray:
        """Returns bool `[end, B]`: which rows before the open one are transitions."""
        return transitions(self.step_types[: self.end + 1])

    def values(self, field: str, index: np.ndarray) -> Nest:
        """Returns a copy of the rows with the flat indices `time * B + env`, leaves `[*index.shape, ...]`."""
        found = self.fields[field]
        return tree.unflatten_as(found.template, list(found.take(index).values()))

    def items(self, values: Nest, stream: str = "items") -> ItemBatch:
        """Stores `values`, leaves `[k, ...]`, and returns k items of them.

        Args:
          values: nest of arrays.
          stream: name of the rows in which they are stored.
        """
        columns = {path_name("", path): np.asarray(leaf) for path, leaf in tree.flatten_with_path(values)}
        rows = self.writer.append(stream, columns)
        self.release(stream, rows)
        slices = [self.writer.slice(stream, name, rows) for name in columns]
        return ItemBatch(len(rows), tree.unflatten_as(values, slices), lambda: values)

    def release(self, stream: str, rows: np.ndarray) -> None:
        """Releases `rows` of replay (-1: no row), to which only items of this block refer."""
        self._spent.append((stream, rows[rows >= 0]))

    # --- the adder's part: staging ---

    def declare(self, action: Nest, timestep: Any, extras: Nest) -> None:
        """Allocates the arrays of the other fields; sets them only if all of them are valid."""
        fields = {
            "action": self._field("action", action),
            "reward": self._field("reward", timestep.reward, to_float=True),
            "discount": self._field("discount", timestep.discount, to_float=True),
        }
        if not is_absent(extras):
            fields["extras"] = self._field("extras", extras)
        self.fields.update(fields)
        self._example = timestep

    def make_time_steps(self, lock: Any) -> None:
        """Makes `time_steps` of the arrays that there are now; `lock` is held while they move."""
        if not self.batch or len(self.fields) == 1 or self._steps == 1:
            return  # With one step in a block, the next would overwrite the last.
        observation = self.fields["observation"]
        held = {name: (self.fields[name].arrays, 1) for name in ("reward", "discount")}
        held["observation"] = (observation.arrays, observation.skip)
        last = len(self.rows) - 1 if observation.keeps_history else self.limit
        self.time_steps = TimeStepRows(self._example, observation.skip + 1, last, held, lock)
        self.time_steps.move(self.end + 1)

    def _field(self, name: str, example: Nest, **options: bool) -> Field:
        return Field(name, example, self.batch, self._steps + 1, self.history, **options)

    def open(self, observation: Nest) -> None:
        """Sets the open row to the first of an episode in every env."""
        self.fields["observation"].put(self.end, observation)
        self.step_types[self.end] = FIRST
        if self.time_steps is not None:
            self.time_steps.restart(self.end + 1)

    def put(self, action: Nest, timestep: Any, extras: Nest) -> None:
        """Copies an action and what resulted from it. The step is not taken before `end` grows.

        Raises:
          ValueError: The structure, a shape or dtype differs from the first step's, or the observations do
            not continue their stacks of frames.
        """
        t, fields = self.end, self.fields
        own = _NOTHING if self.time_steps is None else self.time_steps.rows[t + 1].timestep
        if timestep.observation is not own.observation:
            fields["observation"].put(t + 1, timestep.observation)
        fields["action"].put(t, action)
        if timestep.reward is not own.reward:
            fields["reward"].put(t, timestep.reward)
        if timestep.discount is not own.discount:
            fields["discount"].put(t, timestep.discount)
        if "extras" in fields:
            fields["extras"].put(t, extras)
        elif extras is not NO_EXTRAS and not is_absent(extras):
            raise ValueError(
                "extras: got some, expected none as in the first step. Pass them from the start."
            )
        if self.frames is not None:
            self.frames.check(t + 1, np.equal(timestep.step_type, FIRST))

    def advance(self, step_types: int | np.ndarray) -> None:
        """Takes the step of which the open row has got all."""
        self.end += 1
        self.step_types[self.end] = step_types
        if self.time_steps is not None:
            self.time_steps.at = self.end + 1

    def shift(self) -> None:
        """Moves the rows that the next block keeps to the front, and releases those that it does not keep."""
        t, history = self.end, self.next_history
        by, self.limit = t - history, history + self._steps
        self.history = self.end = history
        if by:
            self.release(STEPS, self.rows[:by])
            self.step_types[: history + 1] = self.step_types[by : t + 1]
            self.rows[: history + 1] = self.rows[by : t + 1]
            self.rows[history + 1 :] = NO_ROW
        skip = self.fields["observation"].skip
        for field in self.fields.values():
            field.shift(by, history)
        if self.fields["observation"].skip != skip:
            self._retire()
        if self.time_steps is not None:
            self.time_steps.move(self.end + 1)
        if self.limit >= len(self.rows):
            self._grow(2 * self.limit)
        self._free()
        if self.frames is not None:
            self.frames.shift(by, history)

    def clear(self) -> None:
        """Drops the staged rows and the history. Fails if the server is gone, but after that."""
        self.end = self.history
        self.release(STEPS, self.rows)
        self.step_types[:] = self.rows[:] = NO_ROW
        if self.time_steps is not None:
            self.time_steps.move(self.end + 1)
        self._free()
        if self.frames is not None:
            self.frames.clear()

    def count_episodes(self) -> int:
        """Returns the number of episodes that have a staged transition."""
        real = transitions(self.step_types[self.history : self.end + 1])
        return int(real[0].sum() + (real[1:] & ~real[:-1]).sum())

    def _free(self) -> None:
        spent, self._spent = self._spent, []
        for stream, rows in spent:
            if len(rows):
                self.writer.release(stream, rows)

    def _retire(self) -> None:
        """Ends `time_steps`: the arrays of its rows are others from now on."""
        if self.time_steps is not None:
            self.time_steps.retired = True
        self.time_steps = None

    def _grow(self, length: int) -> None:
        """Makes room for a longer history."""
        self._retire()
        self.step_types = grown(self.step_types, length, NO_ROW)
        self.rows = grown(self.rows, length, NO_ROW)
        for field in self.fields.values():
            field.grow(length if field.keeps_history else 0)
        if self.frames is not None:
            self.frames.rows = grown(self.frames.rows, length, NO_ROW)


class ItemFormat(abc.ABC):
    """How the rows of a block become items: the part in which adders differ."""

    # Examines the step to a time step of these types, `[B]`, before it is taken. Row `block.end + 1` has its
    # observation. Raises `ValueError` if the step is refused.
    check: Callable[[Block, np.ndarray], None] | None = None

    def begin(self, block: Block) -> None:
        """Prepares for rows that continue nothing: called before the first step, and after rows were dropped.

        Raises:
          ValueError: The format cannot make items of these fields. The first step is refused.
        """
        return

    @abc.abstractmethod
    def emit(self, block: Block, end: int) -> ItemBatch | Sequence[ItemBatch]:
        """Returns the items that rows `[block.history, end)`, and row `end` where it is LAST, complete.

        Items whose leaves are other columns, such as a goal that was an observation, are a batch of their
        own.
        """


def transitions(step_types: np.ndarray) -> np.ndarray:
    """Returns bool `[t, B]`: which rows but the last of `step_types` `[t + 1, B]` are transitions.

    An action was taken in row u if it exists and is neither LAST nor ENDED, and row u + 1 is not FIRST.
    """
    return (step_types[:-1] >= FIRST) & (step_types[:-1] <= MID) & (step_types[1:] > FIRST)
