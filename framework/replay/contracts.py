"""What replay's writers promise, wherever their tables are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from framework.replay.rows.layout import Slice
from framework.replay.types import PaddedSample, ReplaySample, TableInfo
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
    out. Every call raises `ServerLost` after the writer's server is lost: the caller makes a new writer.
    """

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """Copies `{column: array [n, ...]}` into n new rows, which the writer holds until `release`.

        Args:
          stream: name of the row space. It is this writer's own: other writers may use the name for other
            columns.
          columns: the first array of a column fixes its dtype and shape.
          rows: int64 `[n]` rows of this writer whose further columns are filled; None for new rows.

        Returns:
          int64 `[n]` rows.

        Raises:
          ValueError: a dtype or shape differs from the first append, or the arrays differ in n. Nothing is
            written.
          StoreFullError: there is no room. Nothing is written.
        """
        ...

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """A leaf of k items: `column` at `rows` int64 `[k]`, or `[k, L]` with a time axis.

        `lengths` `[k]`, if given, says how many of the L rows of each item count.
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

        Waits while more than `max_in_flight_items` items wait for room. Never waits if the client is not
        `concurrent`: there, no other thread could make room.

        Args:
          table: name.
          trajectory: nest of `slice(...)`; readers get the same nest.
          priorities: float64 `[k]`; None for the largest priority so far, 1.0 at first.
          episodes: uint64 `[k]` ids that `num_episodes` of `server_info` counts; may be None.
          timeout: seconds to wait; None waits without limit.

        Returns:
          uint64 `[k]`, the items' keys.

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
        """No later item of this writer refers to `rows`; ValueError if the writer does not hold them."""
        ...

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        """Waits until at most `keep` items are pending.

        Raises:
          DeadlineExceededError: after `timeout` seconds. The items stay in the queue.
        """
        ...

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        """Calls a bound method once, after `delay` seconds, in the writer's late-flush thread.

        The writer's next call raises the error of a method that fails. The method's object is not kept alive.
        """
        ...

    def before_read(self, function: Callable[[], object]) -> None:
        """Registers the function that runs before a reader looks at a table through the same client.

        It hands over what the caller has staged. It may run in any thread and must not wait. The writer has
        one such function, and keeps it until `close`.
        """
        ...

    def close(self, timeout: float | None = None) -> int:
        """Flushes for up to `timeout` seconds, releases all rows and ends the writer.

        Returns:
          How many items were dropped because they did not get into their tables.
        """
        ...


class Source(Protocol):
    """What a `Dataset` draws from. One thread draws; another may release, interrupt and ask.

    Samples count when they are drawn. What was drawn is released when it has been used, or given back when it
    has not, as if it had never been drawn.
    """

    def draw(
        self, table: str, n: int, timeout: float | None, out: list[Any] | None, pad: bool
    ) -> tuple[ReplaySample | PaddedSample, Any]:
        """Draws and gathers `n` samples of a table.

        Args:
          table: name.
          n: at least 1.
          timeout: seconds to wait for them; None waits without limit.
          out: arrays `[n, ...]` to gather into, one for each leaf of the flattened nest; None for new ones.
          pad: items of different lengths become a `PaddedSample`; without it they are a ValueError.

        Returns:
          The samples, and what `release` or `give_back` is called with.

        Raises:
          DeadlineExceededError: the timeout is over. Nothing was drawn.
          ServerClosed: the server was stopped, or the source interrupted.
        """
        ...

    def release(self, drawn: Any) -> None:
        """The samples were used: their rows may be used again, and items without a turn left are gone."""
        ...

    def give_back(self, drawn: Any) -> None:
        """The samples were not used: as if they had never been drawn. No thread may be in `draw`."""
        ...

    def can_sample(self, table: str, n: int) -> bool:
        """Whether a draw would not wait."""
        ...

    def interrupt(self) -> None:
        """Ends a draw that waits, and every later one that would."""
        ...

    def close(self) -> None:
        """Ends the source. No thread may be in `draw`."""
        ...


class Client(Protocol):
    """The way to the tables of a server, or of several. Any thread may call."""

    #: Whether other threads or processes use the tables; if not, a call that would wait is an error.
    concurrent: bool

    def batch_writer(self, max_in_flight_items: int | None = None) -> Writer:
        """A writer for B envs.

        Args:
          max_in_flight_items: items that may wait for room before `create_items` waits too; None for 512.
        """
        ...

    def source(self) -> Source:
        """What a `Dataset` draws from."""
        ...

    def sample_batch(
        self,
        table: str,
        batch_size: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
    ) -> ReplaySample | PaddedSample:
        """Draws `batch_size` samples: `SampleInfo` of arrays `[N]`, and the data, leaves `[N, ...]`.

        Args:
          table: name.
          batch_size: N.
          timeout: seconds to wait; None waits without limit, 0 not at all.
          out: arrays for the leaves, in the order of the flattened nest; None for new ones.
          pad: items of different lengths become a `PaddedSample`; without it they are a ValueError.

        Raises:
          DeadlineExceededError: the timeout is over. Nothing was drawn.
          ServerClosed: the server was stopped, or the client interrupted.
        """
        ...

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets priorities float64 `[N]` of the items `keys` uint64 `[N]`; keys that are gone are ignored."""
        ...

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float] | None = None, deletes: Sequence[int] | None = None
    ) -> None:
        """Deletes items, then sets priorities."""
        ...

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Whether `n` samples can be had now without waiting."""
        ...

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether `n` items can be inserted now without waiting."""
        ...

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""
        ...

    def server_info(self, timeout: float | None = None) -> Mapping[str, TableInfo]:
        """Describes each table; DeadlineExceededError after `timeout` seconds without an answer."""
        ...

    def interrupt(self) -> None:
        """Ends every call of this client that waits, and every later one that would, with `ServerClosed`."""
        ...

    def close(self) -> None:
        """Ends this client and its writers, without waiting for room."""
        ...
