"""What replay's writers promise, wherever their tables are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from framework.replay.rows.layout import Slice
from framework.types import Nest

# Items that may wait for room in their tables unless a writer is told otherwise.
DEFAULT_MAX_IN_FLIGHT_ITEMS = 512


class Writer(Protocol):
    """Appends rows of B envs and creates items that refer to them. One thread writes.

    ::

        rows = writer.append("steps", {"x": x[256, 4]})                 # copies
        keys = writer.create_items("replay", {"x": writer.slice("steps", "x", rows)}, priorities)
        writer.release("steps", rows)                                   # no later item refers to them
        writer.close()

    The writer owns the one queue of items that wait for room in their tables. Items go in first in, first
    out. Every call raises ``ServerLost`` after the writer's server is lost: the caller makes a new writer.
    """

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """Copies ``{column: array [n, ...]}`` into n new rows, which the writer holds until ``release``.

        Args:
          stream: name of the row space. It is this writer's own: other writers may use the name for other
            columns.
          columns: the first array of a column fixes its dtype and shape.
          rows: int64 ``[n]`` rows of this writer whose further columns are filled; None for new rows.

        Returns:
          int64 ``[n]`` rows.

        Raises:
          ValueError: a dtype or shape differs from the first append, or the arrays differ in n. Nothing is
            written.
          StoreFullError: there is no room. Nothing is written.
        """
        ...

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """A leaf of k items: ``column`` at ``rows`` int64 ``[k]``, or ``[k, L]`` with a time axis.

        ``lengths`` ``[k]``, if given, says how many of the L rows of each item count.
        """
        ...

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        """Queues k items and inserts as many as the rate limiters allow.

        Waits while more than ``max_in_flight_items`` items wait for room. Never waits if the client is not
        ``concurrent``: there, no other thread could make room.

        Args:
          table: name.
          trajectory: nest of ``slice(...)``; readers get the same nest.
          priorities: float64 ``[k]``; None for the largest priority so far, 1.0 at first.
          episodes: uint64 ``[k]`` ids that ``num_episodes`` of ``server_info`` counts; may be None.
          timeout: seconds to wait; None waits without limit.

        Returns:
          uint64 ``[k]``, the items' keys.

        Raises:
          ValueError: wrong priorities, rows or nest. Nothing is queued.
          DeadlineExceededError: the timeout is over. The items stay in the queue.
        """
        ...

    @property
    def num_pending(self) -> int:
        """Items that were created and are not known to be in their tables."""
        ...

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether n more items would go into the table now."""
        ...

    def release(self, stream: str, rows: Any) -> None:
        """No later item of this writer refers to ``rows``; ValueError if the writer does not hold them."""
        ...

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        """Waits until at most ``keep`` items are pending.

        Raises:
          DeadlineExceededError: after ``timeout`` seconds. The items stay in the queue.
        """
        ...

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        """Calls a bound method once, after ``delay`` seconds, in the writer's late-flush thread.

        The writer's next call raises the error of a method that fails. The method's object is not kept alive.
        """
        ...

    def before_read(self, function: Callable[[], object]) -> None:
        """Registers the function that runs before a reader looks at a table through the same client.

        It hands over what the caller has staged. It may run in any thread and must not wait. The writer has
        one such function, and keeps it until ``close``.
        """
        ...

    def close(self, timeout: float | None = None) -> int:
        """Flushes for up to ``timeout`` seconds, releases all rows and ends the writer.

        Returns:
          How many items were dropped because they did not get into their tables.
        """
        ...
