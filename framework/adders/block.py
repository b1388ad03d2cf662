"""Staging of time steps in preallocated arrays, so that items are computed and written in blocks.

Appending a block of rows to replay takes hardly longer than appending one row, and computing a block of
windows with numpy takes hardly longer than computing one. An adder therefore copies each time step into
arrays `[time, env, ...]`. It makes items of them only when the arrays are full, when a reader of this process
samples, or after `max_delay` seconds.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tree

from framework.adders.base import REPLAY_TABLE, Adder
from framework.adders.fields import Field, grown, is_absent
from framework.adders.frames import Frames
from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.writer import DEFAULT_MAX_IN_FLIGHT_ITEMS, BatchWriter
from framework.replay.writers import hurry
from framework.types import FIRST, LAST, MID, Nest

NO_ROW = -1
NO_EXTRAS: Nest = ()

# Computes a table's priorities: takes batched items (leaves [k, ...]) and returns k priorities. In
# PriorityFns, None means the largest priority so far.
PriorityFn = Callable[[Nest], Any]
PriorityFns = Mapping[str, "PriorityFn | None"]

# A block has at most this many time steps and bytes of observations.
_MAX_BLOCK_STEPS = 256
_MAX_BLOCK_BYTES = 4 << 20


class BlockAdder(Adder):
    """The base of all adders: envs, checks, staging, visibility and closing.

    Row `t` of env `b` holds the observation of the env at time `t`, its action, and the reward and discount
    that resulted from the action. After `add`, row `_t` is open: it has an observation and no action yet.
    `_kinds[t, b]` is the step type of the row's time step. A row closes its episode if it is LAST, or if the
    row after it is FIRST (an episode that was cut short). Every other row except the open one is a
    transition. The first `_history` rows of the arrays belong to earlier blocks; windows reach back to them.
    A single time step (a scalar `step_type`) is broadcast to a batch of one env.

    A subclass defines how a block becomes items in `_emit`. It may check a step in `_check`, before the step
    is taken.
    """

    # Whether staged rows may become items before the block is full: on a read, or after max_delay.
    _writes_early = True
    # Whether `_check` examines each step.
    _checks_steps = False
    # Least number of time steps in a block. `add` of a subclass may advance this many times.
    _min_steps = 1
    # Largest number of rows (time steps x envs) in a block of more time steps than those.
    _max_rows = 2048
    # The stream of `_rows`.
    _stream = "steps"
    # Stacks of k frames have an int64 [time, B, k], like `_rows`: the row of each frame.
    _frames: Frames | None = None
    _frame_rows: np.ndarray = np.zeros((0, 1, 1), np.int64)

    _observation: Field
    _action: Field
    _reward: Field
    _discount: Field
    _extras: Field | None

    def __init__(
        self,
        client: Any,
        history: int,
        priority_fns: PriorityFns | None,
        max_in_flight_items: int | None,
        max_delay: float,
        max_staged: int | None = None,
    ):
        """Creates the writer. The arrays are allocated at the first time step, which has their shapes.

        Args:
          client: any client of `framework.replay`.
          history: number of rows before the block that a window may reach back to.
          priority_fns: `{table: fn or None}`; see `PriorityFn`.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too.
          max_delay: seconds after which the writer's late thread writes staged time steps at the latest. Has
            no effect with a client that is not concurrent: there, a read writes them.
          max_staged: number of rows of all envs that may be staged, at least one time step; None stages up to
            4 MiB of observations.
        """
        if priority_fns is None:
            priority_fns = {REPLAY_TABLE: None}
        if not priority_fns:
            raise ValueError("priority_fns: got no table, expected at least one, as in {'replay': None}.")
        self._priority_fns = dict(priority_fns)
        self._writer: BatchWriter = client.batch_writer(max_in_flight_items=max_in_flight_items)
        self._max_in_flight = max_in_flight_items or DEFAULT_MAX_IN_FLIGHT_ITEMS
        self._concurrent = bool(client.concurrent)
        self._history = history
        self._next_history = history  # of the next block
        self._max_delay = max_delay
        self._max_staged = max_staged
        # Whether items were created without waiting: more than `_max_in_flight` may wait for room.
        self._is_ahead = False
        # Held while arrays change: a reader in another thread of this process may ask for staged items.
        self._lock = threading.RLock()
        self._error: BaseException | None = None  # raised on the late thread
        self._closed = False
        self._open = False  # whether row _t exists
        self._t = history
        self._num_shifted = 0  # time steps that have left the arrays
        self._steps = 0  # the greatest number of time steps in a block
        self._batch: tuple[int, ...] | None = None  # the shape of step types; () for single time steps
        self._width = 1  # envs
        self._kinds: np.ndarray = np.zeros((0, 1), np.int8)
        # Numbers of the rows in replay, in the stream `_stream`; -1: not in replay.
        self._rows: np.ndarray = np.zeros((0, 1), np.int64)
        # The observation, from the first time step on; the other fields, from the first action on.
        self._fields: list[Field] = []
        # Whether priority functions get observations, also of earlier blocks.
        self._shows_observations = any(fn is not None for fn in self._priority_fns.values())
        # Seconds for which creating items may wait; 0 leaves items without room in the writer's queue.
        self._timeout: float | None = None
        self._writing = False
        # Episodes that were not written completely: see reset(), _drop() and each adder.
        self.num_dropped_episodes = 0
        self._writer.before_read(self.flush_pending)

    # --- calls of the environment loop ---

    def add_first(self, timestep: Any) -> None:
        with self._lock:
            self._check_usable()
            kinds = np.asarray(timestep.step_type)
            if kinds.shape != self._batch:
                self._set_batch(kinds)
            if np.any(kinds != FIRST):
                raise ValueError(
                    f"add_first: got step types {kinds.tolist()}, expected FIRST in every env. Pass what "
                    "environment.reset() returned, and later time steps to add()."
                )
            self._start(timestep.observation)

    def add(self, action: Nest, next_timestep: Any, extras: Nest = NO_EXTRAS) -> None:
        with self._lock:
            if not self._open or self._closed or self._error is not None:
                self._check_usable()
                raise ValueError("add: there is no open episode. Call add_first(timestep) after a reset.")
            kinds = np.asarray(next_timestep.step_type)
            if kinds.shape != self._batch:
                self._set_batch(kinds)
            t = self._t
            # count_nonzero() is many times faster than any() and all(), and FIRST is 0.
            ended = self._kinds[t] == LAST
            if np.count_nonzero(ended) and (over := ended & (kinds != FIRST)).any():
                raise ValueError(
                    f"add: got step types {kinds.reshape(-1)[over].tolist()} in envs "
                    f"{np.flatnonzero(over).tolist()} after the end of the episode, expected FIRST. Call "
                    "add_first(timestep) after a reset."
                )
            if not np.count_nonzero(kinds):
                self._start(next_timestep.observation)
                return
            if len(self._fields) == 1:
                self._declare(action, next_timestep, extras)
            # The step is not taken before _advance(): the next call overwrites the values of a failed call.
            self._observation.put(t + 1, next_timestep.observation)
            self._action.put(t, action)
            self._reward.put(t, next_timestep.reward)
            self._discount.put(t, next_timestep.discount)
            if self._extras is not None:
                self._extras.put(t, extras)
            elif extras is not NO_EXTRAS and not is_absent(extras):
                raise ValueError(
                    "extras: got some, expected none as in the first step. Pass them from the start."
                )
            if self._checks_steps:
                self._check(kinds)
            self._advance(kinds)

    def end_episodes(self) -> None:
        with self._lock:
            self._check_usable()
            if self._open and np.count_nonzero(self._kinds[self._t] == MID):
                # As an episode that is cut short. The open row cannot become LAST: items may lead up to it.
                self._observation.repeat(self._t)
                self._advance(FIRST)

    def reset(self) -> None:
        with self._lock:
            self._check_usable()
            if not self._open:
                return
            self._write_block()
            has_steps = self._kinds[self._history] == MID
            self.num_dropped_episodes += int(np.count_nonzero(has_steps))
            self._drop()

    # --- visibility, room and end ---

    def flush_pending(self, wait: bool = False) -> None:
        """Hands staged time steps to the writer without waiting. Replay calls it before it reads a table.

        A reader must not wait for room that only its own read makes. The call therefore does nothing while
        another thread waits for room in this adder, unless `wait` is set.
        """
        if self._writes_early and (self._lock.acquire() if wait else self._writer.enter_to_read(self._lock)):
            try:
                if not self._closed:
                    self._write_block(timeout=0)
            except Exception as error:  # raised by this adder's next call, not by the reader
                self._error = error
            finally:
                self._lock.release()

    def ready(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._writes_early:
                self._write_block(timeout=0)
        # This is a read: it may wait for another adder, whose `ready` may wait for this one's lock.
        return (
            all(self._writer.can_insert(table) for table in self._priority_fns)
            and not self._writer.num_pending
        )

    def make_room(self) -> None:
        full = self._t + 1 == self._history + self._steps
        if not self._concurrent and (full or self._writer.num_pending > self._max_in_flight):
            self._flush_writer(None)

    def flush(self, timeout: float | None = None) -> None:
        with self._lock:
            self._check_usable()
            self._write_block(timeout=0)
        self._flush_writer(timeout)

    def close(self, timeout: float | None = None) -> int:
        with self._lock:
            if self._closed:
                return 0
            error, self._error = self._error, None
            self._closed = True
            try:
                self._write_block(timeout=0)
            except ServerClosed:
                pass  # the writer counts the dropped items
            except BaseException:
                self._writer.close(0)
                raise
            finally:
                self._open = False
        dropped = self._writer.close(timeout)
        if error is not None and not isinstance(error, ServerClosed):
            raise error  # of the late thread: no call came after it
        return dropped

    # --- a subclass's part: from a block to items ---

    @abc.abstractmethod
    def _emit(self, t: int) -> None:
        """Writes the items of rows `[history, t)` and of envs whose row `t` is LAST."""

    def _check(self, kinds: np.ndarray) -> None:
        """Raises `ValueError` if the step to a time step of `kinds` is refused; row `_t + 1` is unused."""
        if self._frames is not None:
            self._frames.check(self._t + 1, kinds == FIRST)

    def _allocate(self, observation: Nest) -> None:
        """Allocates the arrays of the observations, which fix the size of a block."""
        step_bytes = max(1, sum(np.asarray(leaf).nbytes for leaf in tree.flatten(observation)))
        steps = min(_MAX_BLOCK_STEPS, self._max_rows // self._width, _MAX_BLOCK_BYTES // step_bytes)
        if self._max_staged is not None:
            steps = min(steps, self._max_staged // self._width)
        self._steps = max(self._min_steps, steps)
        # Observations are the large leaves: rows of earlier blocks are kept for priority functions only.
        self._fields = [self._field("observation", observation, keeps_history=self._shows_observations)]
        self._observation = self._fields[0]
        shape = (self._history + self._steps + 1, self._width)
        self._kinds = np.full(shape, NO_ROW, np.int8)
        self._rows = np.full(shape, NO_ROW, np.int64)

    def _store_frames(self, names: Collection[str], k: int) -> None:
        """Stores each frame of these columns of the observation, which are stacks `[k, ...]`, once."""
        self._frames = Frames(self._writer, self._observation, names)
        self._frame_rows = np.full((*self._kinds.shape, k), NO_ROW, np.int64)
        self._checks_steps = True

    def _append_frames(self, t: int) -> None:
        """Appends the new frames up to row `t`, which is open, but has its observation."""
        if self._frames is not None:
            history, rows = self._history, self._frame_rows
            self._frames.append(rows[: t + 1], history + int(rows[history].flat[-1] >= 0), self._kinds)

    def _declare(self, action: Nest, timestep: Any, extras: Nest) -> None:
        """Allocates the arrays of the other fields; sets them only if all of them are valid."""
        fields = [
            self._field("action", action),
            self._field("reward", timestep.reward, to_float=True),
            self._field("discount", timestep.discount, to_float=True),
        ]
        extra = None if is_absent(extras) else self._field("extras", extras)
        self._action, self._reward, self._discount = fields
        self._extras = extra
        self._fields += fields if extra is None else [*fields, extra]

    def _field(self, name: str, example: Nest, **options: bool) -> Field:
        return Field(name, example, self._batch or (), self._steps + 1, self._history, **options)

    def _forget(self) -> None:
        """Releases the rows that the adder keeps for the history and for open episodes."""
        self._release(self._stream, self._rows)
        self._rows[:] = self._frame_rows[:] = NO_ROW
        if self._frames is not None:
            self._frames.release_except(self._frame_rows)

    # --- staging ---

    def _check_usable(self) -> None:
        if self._closed:
            raise ValueError(f"This {type(self).__name__} is closed. Create a new one.")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _set_batch(self, kinds: np.ndarray) -> None:
        """Takes the number of envs from the first step types, `[B]`, or `[]` of a single time step."""
        if self._fields:
            raise ValueError(
                f"step_type: got shape {kinds.shape}, expected {self._batch} as in the first time step. "
                "Use one adder for each batch of environments."
            )
        if kinds.ndim > 1 or kinds.size == 0:
            raise ValueError(f"step_type: got shape {kinds.shape}, expected [envs] or a single one.")
        self._batch, self._width = kinds.shape, kinds.size

    def _start(self, observation: Nest) -> None:
        """Opens an episode in every env with rows of kind FIRST. Open episodes end there."""
        if not self._fields:
            self._allocate(observation)
        # Before the first action there is no transition to keep: the open row is replaced.
        if self._open and len(self._fields) > 1:
            self._observation.put(self._t + 1, observation)
            self._advance(FIRST)
        else:
            self._observation.put(self._t, observation)
            self._kinds[self._t] = FIRST
            self._open = True

    def _advance(self, kinds: int | np.ndarray) -> None:
        """Takes the step: row `_t` gets its action, and the next row is open."""
        t, history = self._t + 1, self._history
        full = t == history + self._steps
        if self._is_ahead and self._concurrent:
            self._is_ahead = False
            self._writer.flush(keep=self._max_in_flight)
        elif full and not self._concurrent:
            self._flush_writer(None)  # more would wait with each block
        self._t = t
        self._kinds[t] = kinds
        if full:
            self._write_block()
        elif t == history + 1 and self._concurrent and self._writes_early:
            # The delay starts with the first staged step.
            self._writer.late.call_later(self.flush_pending, self._max_delay, True)

    def _write_block(self, timeout: float | None = None) -> None:
        """Writes the items of all complete rows.

        With a `timeout` of 0, items without room stay in the writer's queue and the call returns.
        """
        t = self._t
        # A priority function that reads replay asks for the block that is being written.
        if not self._open or t == self._history or self._writing:
            return
        self._writing = True
        self._timeout = timeout
        self._is_ahead |= timeout == 0
        try:
            self._emit(t)
        except BaseException:
            # Items of later blocks would refer to rows of this one: its episodes end here.
            real = transitions(self._kinds[self._history : t + 1])
            begins = real[0].sum() + (real[1:] & ~real[:-1]).sum()
            self.num_dropped_episodes += int(begins)
            self._drop()
            raise
        finally:
            self._writing = False
        self._t = history = self._history = self._next_history
        by, length = t - history, history + self._steps + 1
        self._num_shifted += by
        left = self._rows[:by].copy()
        if by:
            self._kinds[: history + 1] = self._kinds[by : t + 1]
            for rows in (self._rows, self._frame_rows):
                rows[: history + 1] = rows[by : t + 1]
                rows[history + 1 :] = NO_ROW
        for field in self._fields:
            field.shift(by, history)
        if length > len(self._kinds):
            self._grow(2 * length)
        self._release(self._stream, left)
        if self._frames is not None:
            self._frames.release_except(self._frame_rows)

    def _drop(self) -> None:
        """Drops the staged rows. `add_first` comes next."""
        self._num_shifted += self._t - self._history
        self._t = self._history
        self._kinds[:] = NO_ROW
        self._open = False
        self._forget()  # Last: it fails if the server is gone.

    def _grow(self, length: int) -> None:
        """Makes room for a longer history."""
        self._kinds = grown(self._kinds, length, NO_ROW)
        self._rows = grown(self._rows, length, NO_ROW)
        for field in self._fields:
            field.grow(length if field.keeps_history else 0)

    def _write_items(self, trajectory: Nest, count: int, data: Callable[[], Nest]) -> None:
        """Creates `count` items in every table. Priority functions get `data()`, the items."""
        batch: Nest = None
        for table, fn in self._priority_fns.items():
            priorities = None
            if fn is not None:
                batch = data() if batch is None else batch
                before, hurry.on = hurry.on, True  # This writer may read, and so may another adder's.
                try:
                    priorities = _as_priorities(fn(batch), count, table)
                finally:
                    hurry.on = before
            try:
                self._writer.create_items(table, trajectory, priorities, timeout=self._timeout)
            except DeadlineExceededError:
                if self._timeout != 0:
                    raise

    def _release(self, stream: str, rows: np.ndarray) -> None:
        """Tells the writer that no later item refers to `rows` (-1: no row)."""
        rows = rows[rows >= 0]
        if len(rows):
            self._writer.release(stream, rows)

    def _flush_writer(self, timeout: float | None) -> None:
        try:
            self._writer.flush(timeout)
        except WouldBlockError as error:
            raise WouldBlockError(
                f"{error}. Call ready() before each add(), and sample while it returns False."
            ) from None


def transitions(kinds: np.ndarray) -> np.ndarray:
    """Which rows but the last of `kinds` `[t + 1, B]` are transitions.

    An action was taken in row u if it exists and is not LAST, and row u + 1 is not FIRST.
    """
    return (kinds[:-1] >= FIRST) & (kinds[:-1] < LAST) & (kinds[1:] > FIRST)


def _as_priorities(value: Any, count: int, table: str) -> np.ndarray:
    """Returns a priority function's result as float64 `[count]`; a plain number applies to all items."""
    if type(value) in (int, float):
        return np.full(count, value, np.float64)
    priorities = np.asarray(value, np.float64)
    if priorities.shape != (count,):
        raise ValueError(
            f"priority_fns[{table!r}]: got priorities of shape {priorities.shape} for {count} items, "
            f"expected ({count},). The function takes a batch of items, leaves [items, ...]; reduce over the "
            "other axes."
        )
    return priorities
