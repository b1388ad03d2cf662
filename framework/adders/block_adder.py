"""The adder in front of a client: order of calls, staging, visibility, room and end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from framework.adders.base import Adder
from framework.adders.block import ENDED, NO_EXTRAS, Block, ItemBatch, ItemFormat
from framework.adders.item_writer import ItemWriter, PriorityFns
from framework.environments.rows import TimeStepRows
from framework.replay.errors import ServerClosed
from framework.types import FIRST, LAST, MID, Nest


class BlockAdder(Adder):
    """Stages time steps in a `Block`, and writes the items that an `ItemFormat` makes of it.

    A block is written when it is full, when a reader of this process reads, by `ready` and `flush`, and by
    the first `add` or `flush_pending(late=True)` that comes `max_delay` seconds after the first step of the
    block. With a `max_delay` of None it is written when it is full, and only then.
    """

    def __init__(
        self,
        client: Any,
        item_format: ItemFormat,
        *,
        new_block: Callable[..., Block] = Block,
        priority_fns: PriorityFns | None = None,
        max_in_flight_items: int | None = None,
        max_in_flight_blocks: int | None = None,
        max_delay: float | None = 0.05,
        continues: bool = False,
    ):
        """Creates the writer. The arrays are allocated at the first time step, which has their shapes.

        Args:
          client: any client of `framework.replay`.
          item_format: makes items of blocks; belongs to this adder alone.
          new_block: `Block`, or a `functools.partial` of it with some of its keyword arguments, such as the
            history and the steps.
          priority_fns: `{table: fn or None}`; see `PriorityFn`.
          max_in_flight_items: number of items that may wait for room in a table before `add` waits too; None
            means 512.
          max_in_flight_blocks: the same as a number of blocks. Has no effect with a client that is not
            concurrent.
          max_delay: seconds after which the next call writes staged time steps. Has no effect with a client
            that is not concurrent: there, a read writes them. None writes blocks when they are full, and only
            then.
          continues: whether items continue into the next episode, so that `end_episodes` has no effect.
        """
        self._format, self._new_block = item_format, new_block
        self._out = ItemWriter(client, priority_fns, max_in_flight_items, max_in_flight_blocks)
        self._max_delay = max_delay
        self._continues = continues
        self._block: Block | None = None
        self._due = math.inf  # when the staged steps are to be written
        self._closed = False
        self._open = False  # whether there is an open row, and no block is being written
        # Episodes that were not written completely: see reset(), _drop() and each format.
        self.num_dropped_episodes = 0
        if max_delay is not None:
            self._out.writer.before_read(self._write)

    # --- calls of the environment loop ---

    def add_first(self, timestep: Any) -> None:
        with self._out.writer.lock:
            self._check_usable()
            step_types = np.asarray(timestep.step_type)
            self._check_batch(step_types)
            if np.any(step_types != FIRST):
                raise ValueError(
                    f"add_first: got step types {step_types.tolist()}, expected FIRST in every env. Pass "
                    "what environment.reset() returned, and later time steps to add()."
                )
            if self._block is None:
                self._block = self._new_block(self._out.writer, timestep.observation, step_types.shape)
            self._start(self._block, timestep.observation)
        self._out.wait()

    def add(self, action: Nest, next_timestep: Any, extras: Nest = NO_EXTRAS) -> None:
        with self._out.writer.lock:
            block = self._block
            if block is None or not self._open:
                self._check_usable()
                raise ValueError("add: there is no open episode. Call add_first(timestep) after a reset.")
            step_types = np.asarray(next_timestep.step_type)
            if step_types.shape != block.batch:
                self._check_batch(step_types)
            # count_nonzero() is many times faster than any() and all(), and FIRST is 0.
            ended = block.step_types[block.end] == LAST
            if np.count_nonzero(ended) and (over := ended & (step_types != FIRST)).any():
                raise ValueError(
                    f"add: got step types {step_types.reshape(-1)[over].tolist()} in envs "
                    f"{np.flatnonzero(over).tolist()} after the end of the episode, expected FIRST. Call "
                    "add_first(timestep) after a reset."
                )
            begins = not np.count_nonzero(step_types)
            # In whole blocks, a step that is a reset in all envs is a row, too, though it has no action.
            if len(block.fields) == 1 and not (
                begins and (self._max_delay is not None or next_timestep.reward is None)
            ):
                self._declare(block, action, next_timestep, extras)
            if begins:
                self._start(block, next_timestep.observation)
            else:
                # It is not taken before _advance(): the next call overwrites the values of a failed call.
                block.put(action, next_timestep, extras)
                if self._format.check is not None:
                    self._format.check(block, step_types)
                self._advance(block, step_types)
        self._out.wait()

    def time_step_rows(self) -> TimeStepRows | None:
        with self._out.writer.lock:
            block = self._block
            if block is not None and block.time_steps is None:
                block.make_time_steps(self._out.writer.lock)
            return None if block is None else block.time_steps

    def end_episodes(self) -> None:
        with self._out.writer.lock:
            self._check_usable()
            block = self._block
            if block is None or not self._open or self._continues:
                return
            step_types = block.step_types[block.end]
            if np.count_nonzero(running := step_types == MID):
                # They end as if they were cut short. The open row cannot be LAST: items may lead up to it.
                self.make_room()
                step_types[running] = ENDED
                block.fields["observation"].repeat(block.end)
                self._advance(block, FIRST)
        self._out.wait()

    def reset(self) -> None:
        with self._out.writer.lock:
            self._check_usable()
            self._write()
            if (block := self._block) is not None and self._open:
                self.num_dropped_episodes += int(np.count_nonzero(block.step_types[block.end] == MID))
                self._drop(block)
        self._out.wait()

    # --- visibility, room and end ---

    def flush_pending(self, late: bool = False) -> None:
        if late and time.monotonic() < self._due:
            return
        with self._out.writer.lock:
            self._check_usable()
            self._write()

    def ready(self) -> bool:
        with self._out.writer.lock:
            if self._closed:
                return False
            self._write()
            if self._max_delay is None and self._open and not self._is_last_step():
                return True  # only the last step of a block makes items
        # This is a read: it may wait for another adder, whose `ready` may wait for this one's lock.
        return self._out.ready()

    def room(self) -> int:
        with self._out.writer.lock:
            if self._max_delay is not None or self._block is None or not self._open:
                return 1
            left = self._block.limit - self._block.end
        return left if left == 1 or self._out.ready() else left - 1  # The last step makes the items.

    def make_room(self) -> None:
        self._out.make_room(self._is_last_step())

    def flush(self, timeout: float | None = None) -> None:
        with self._out.writer.lock:
            self._check_usable()
            self._write()
        self._out.flush(timeout)

    def close(self, timeout: float | None = None) -> int:
        failed: BaseException | None = None
        with self._out.writer.lock:
            if self._closed:
                return 0
            try:
                self._check_usable()
                self._write()
            except ServerClosed:
                pass  # the writer counts the dropped items
            except BaseException as error:  # of a read, perhaps: no call came after it
                failed = error
            self._closed, self._open = True, False
        dropped = self._out.writer.close(timeout if failed is None else 0)
        if failed is not None:
            raise failed
        return dropped

    # --- staging ---

    def _is_last_step(self) -> bool:
        """Returns whether the next step fills the block."""
        return self._block is not None and self._block.end + 1 == self._block.limit

    def _check_usable(self) -> None:
        if self._closed:
            raise ValueError(f"This {type(self).__name__} is closed. Create a new one.")
        self._out.writer.check()

    def _check_batch(self, step_types: np.ndarray) -> None:
        """Checks the number of envs: step types are `[B]`, or `[]` of a single time step."""
        if self._block is not None and step_types.shape != self._block.batch:
            raise ValueError(
                f"step_type: got shape {step_types.shape}, expected {self._block.batch} as in the first time "
                "step. Use one adder for each batch of environments."
            )
        if step_types.ndim > 1 or step_types.size == 0:
            raise ValueError(f"step_type: got shape {step_types.shape}, expected [envs] or a single one.")

    def _declare(self, block: Block, action: Nest, timestep: Any, extras: Nest) -> None:
        before = dict(block.fields)
        try:
            block.declare(action, timestep, extras)
            self._format.begin(block)
        except BaseException:  # The next step may be the first again.
            block.fields = before
            raise

    def _start(self, block: Block, observation: Nest) -> None:
        """Opens an episode in every env with rows of type FIRST. Open episodes end there."""
        # There is no transition to keep before the first action: the open row is replaced.
        if self._open and len(block.fields) > 1:
            block.fields["observation"].put(block.end + 1, observation)
            self._advance(block, FIRST)
        else:
            block.open(observation)
            self._open = True

    def _advance(self, block: Block, step_types: int | np.ndarray) -> None:
        """Takes the step, and writes the block if it is full or late."""
        if full := block.end + 1 == block.limit:
            self._out.make_room(True)  # More would wait with each block.
        block.advance(step_types)
        if self._out.concurrent and self._max_delay is not None:
            now = time.monotonic()
            if block.end == block.history + 1:
                self._due = now + self._max_delay
            full |= now >= self._due
        if full:
            self._write()

    def _write(self) -> None:
        """Writes the items of all complete rows without waiting, unless whole blocks are written only."""
        block = self._block
        # A priority function that reads replay asks for the block that is being written.
        if block is None or not self._open or block.end == block.history:
            return
        if self._max_delay is None and block.end < block.limit:
            return
        self._open, self._due = False, math.inf
        rows = block.time_steps
        if rows is not None and rows.fault is not None:  # The fault was raised where it was found.
            self.num_dropped_episodes += block.count_episodes()
            self._drop(block)
            return
        try:
            if rows is not None:
                rows.check()
            if block.frames is not None:
                block.frames.append(block.history, block.end, block.step_types)
            emitted = self._format.emit(block, block.end)
            for items in (emitted,) if isinstance(emitted, ItemBatch) else emitted:
                self.num_dropped_episodes += items.num_dropped_episodes
                if items.count:
                    self._out.write(items)
            block.shift()
        except BaseException:
            # Items of later blocks would refer to rows of this one: its episodes end here.
            self.num_dropped_episodes += block.count_episodes()
            self._drop(block)
            raise
        self._open = True

    def _drop(self, block: Block) -> None:
        """Drops the staged rows. `add_first` comes next."""
        self._open = False
        if len(block.fields) > 1:
            self._format.begin(block)
        block.clear()  # Last: it fails if the server is gone.
