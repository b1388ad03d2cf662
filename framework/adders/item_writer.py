"""The way of items into their tables: priorities, and waiting for room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from framework.adders.base import REPLAY_TABLE
from framework.adders.block import ItemBatch
from framework.replay.errors import DeadlineExceededError, WouldBlockError
from framework.replay.writer import DEFAULT_MAX_IN_FLIGHT_ITEMS, BatchWriter
from framework.replay.writers import push_all
from framework.types import Nest

# Computes a table's priorities: takes batched items (leaves [k, ...]) and returns k priorities. In
# PriorityFns, None means the largest priority so far.
PriorityFn = Callable[[Nest], Any]
PriorityFns = Mapping[str, "PriorityFn | None"]


def sees_items(priority_fns: PriorityFns | None) -> bool:
    """Returns whether a priority function looks at items."""
    return any(fn is not None for fn in (priority_fns or {}).values())


class ItemWriter:
    """Creates the items of one adder in each of its tables.

    Creating items does not wait: those without room are in the writer's queue, until `wait`.

    Attributes:
      writer: the `BatchWriter`.
      concurrent: whether another thread or process can make room.
    """

    def __init__(
        self,
        client: Any,
        priority_fns: PriorityFns | None,
        max_in_flight_items: int | None,
        max_in_flight_batches: int | None = None,
    ):
        """Creates the writer.

        Args:
          client: any client of `framework.replay`.
          priority_fns: `{table: fn or None}`; see `PriorityFn`.
          max_in_flight_items: number of items that may wait for room in a table; None means 512.
          max_in_flight_batches: the same as a number of `ItemBatch`es of equal size. Has no effect with a
            client that is not concurrent.
        """
        if priority_fns is None:
            priority_fns = {REPLAY_TABLE: None}
        if not priority_fns:
            raise ValueError("priority_fns: got no table, expected at least one, as in {'replay': None}.")
        self._priority_fns = dict(priority_fns)
        self.writer: BatchWriter = client.batch_writer(max_in_flight_items=max_in_flight_items)
        self.writer.holds_back = False  # What is written at once is a block.
        self.concurrent = bool(client.concurrent)
        self._max_in_flight = max_in_flight_items or DEFAULT_MAX_IN_FLIGHT_ITEMS
        self._max_batches = max_in_flight_batches if self.concurrent else None

    def write(self, items: ItemBatch) -> None:
        """Creates the items in every table. The caller has the writer's lock."""
        data: Nest = None
        for table, fn in self._priority_fns.items():
            priorities = None
            if fn is not None:
                data = items.data() if data is None else data
                try:
                    self.writer.busy = True  # The function may read, and so may another adder's.
                    priorities = _as_priorities(fn(data), items.count, table)
                finally:
                    self.writer.busy = False
            with contextlib.suppress(DeadlineExceededError):
                self.writer.create_items(table, items.trajectory, priorities, timeout=0)
        if self._max_batches is not None:
            self._max_in_flight = self._max_batches * items.count

    def wait(self) -> None:
        """Waits while more items than may be in flight wait for room."""
        if self.concurrent and self.writer.num_pending > self._max_in_flight:
            push_all()
            self.writer.flush(keep=self._max_in_flight)

    def make_room(self, full: bool) -> None:
        """Raises `WouldBlockError` if a step, which fills its block if `full`, would leave too many waiting.

        Has an effect with a client that is not concurrent.
        """
        if not self.concurrent and (full or self.writer.num_pending > self._max_in_flight):
            self.flush(None)

    def ready(self) -> bool:
        """Returns whether no item waits for room and every table can take at least one more."""
        return all(map(self.writer.can_insert, self._priority_fns)) and not self.writer.num_pending

    def flush(self, timeout: float | None) -> None:
        """Waits until the tables have all items."""
        try:
            self.writer.flush(timeout)
        except WouldBlockError as error:
            raise WouldBlockError(
                f"{error}. Call ready() before each add(), and sample while it returns False."
            ) from None


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
