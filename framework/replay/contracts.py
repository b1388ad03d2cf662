"""The interfaces of replay: writers, sources and clients, independent of where the tables are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from framework.replay.rows.layout import Slice
from framework.replay.types import PaddedSample, ReplaySample, TableInfo
from framework.types import Nest

# Default number of items that may wait for room in their tables.
DEFAULT_MAX_IN_FLIGHT_ITEMS = 512


class Writer(Protocol):
    """Appends rows of B envs and creates items that refer to them. One thread writes.

    ```python
    rows = writer.append("steps", {"x": x[256, 4]})                 # copies
    keys = writer.create_items("replay", {"x": writer.slice("steps", "x", rows)}, priorities)
    writer.release("steps", rows)                                   # no later item refers to them
    writer.close()
    ```

    The writer owns the one queue of items that wait for room in their tables. It inserts them first in, first
    out. After the server is lost, every call raises `ServerLost`, and the caller creates a new writer.
    """

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """Copies `{column: array [n, ...]}` into n new rows, which the writer holds until `release`.

        Args:
          stream: name of the row space. It is private to this writer: other writers may use the name for
            other columns.
          columns: arrays by column; the first array of a column fixes its dtype and shape.
          rows: int64 `[n]`, rows of this writer whose other columns are filled; None for new rows.

        Returns:
          int64 `[n]` rows.

        Raises:
          ValueError: A dtype or shape differs from the first append, or the arrays differ in n. Nothing is
            written.
          StoreFullError: There is no room. Nothing is written.
        """
        ...

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """Returns a leaf of k items: `column` at `rows`.

        Args:
          stream: name of the row space.
          column: name of the column.
          rows: int64 `[k]`, or `[k, L]` with a time axis.
          lengths: int64 `[k]`, how many of the L rows belong to each item; None for all.
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
        `concurrent`, because no other thread could make room.

        Args:
          table: name of the table.
          trajectory: nest of `slice(...)`; readers get the same nest.
          priorities: float64 `[k]`; None for the largest priority so far, 1.0 at first.
          episodes: uint64 `[k]`, ids of the episodes, which `num_episodes` of `server_info` counts; may be
            None.
          timeout: seconds to wait; None waits without a limit.

        Returns:
          uint64 `[k]`, the items' keys.

        Raises:
          ValueError: The priorities, rows or nest are invalid. Nothing is queued.
          DeadlineExceededError: The timeout is over. The items stay in the queue.
        """
        ...

    @property
    def num_pending(self) -> int:
        """Number of created items that are not known to be in their tables."""
        ...

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Returns whether the table takes n more items now."""
        ...

    def release(self, stream: str, rows: Any) -> None:
        """Releases `rows`, to which no later item of this writer refers.

        Raises:
          ValueError: The writer does not hold the rows.
        """
        ...

    def flush(self, timeout: float | None = None, keep: int = 0) -> None:
        """Waits until at most `keep` items are pending.

        Raises:
          DeadlineExceededError: More items are pending after `timeout` seconds. They stay in the queue.
        """
        ...

    def call_later(self, method: Callable[[], object], delay: float) -> None:
        """Calls a bound method once, after `delay` seconds, in the writer's late-flush thread.

        If the method fails, the writer's next call raises its error. The method's object is not kept alive.
        """
        ...

    def before_read(self, function: Callable[[], object]) -> None:
        """Registers the function that runs before a reader reads a table through the same client.

        The function writes the caller's staged rows. It may run in any thread and must not wait. The writer
        has one such function and keeps it until `close`.
        """
        ...

    def close(self, timeout: float | None = None) -> int:
        """Flushes for up to `timeout` seconds, releases all rows and closes the writer.

        Returns:
          The number of items that were dropped because their tables had no room.
        """
        ...


class Source(Protocol):
    """Draws the samples of a `Dataset`. One thread draws; others may call the other methods.

    Samples count when they are drawn. The caller releases them after use, or gives unused samples back as if
    they had never been drawn.
    """

    def draw(
        self, table: str, n: int, timeout: float | None, out: list[Any] | None, pad: bool
    ) -> tuple[ReplaySample | PaddedSample, Any]:
        """Draws and gathers `n` samples of a table.

        Args:
          table: name of the table.
          n: number of samples, at least 1.
          timeout: seconds to wait for them; None waits without a limit.
          out: arrays `[n, ...]` to gather into, one for each leaf of the flattened nest; None allocates them.
          pad: whether items of different lengths become a `PaddedSample`; if not, they raise `ValueError`.

        Returns:
          The samples, and the argument for `release` or `give_back`.

        Raises:
          DeadlineExceededError: The timeout is over. Nothing was drawn.
          ServerClosed: The server was stopped or the source interrupted.
        """
        ...

    def release(self, drawn: Any) -> None:
        """Unpins the rows of used samples and removes items that reached `max_times_sampled`."""
        ...

    def give_back(self, drawn: Any) -> None:
        """Undoes a draw: unused samples do not count. No thread may be in `draw`."""
        ...

    def can_sample(self, table: str, n: int) -> bool:
        """Returns whether a draw of `n` samples would not wait."""
        ...

    def interrupt(self) -> None:
        """Ends a waiting draw, and every later draw that would wait, with `ServerClosed`."""
        ...

    def close(self) -> None:
        """Closes the source. No thread may be in `draw`."""
        ...


class Client(Protocol):
    """Reads and writes the tables of one or several servers. All methods may be called from any thread."""

    #: Whether other threads or processes use the tables. If not, a call that would wait raises an error.
    concurrent: bool

    def batch_writer(self, max_in_flight_items: int | None = None) -> Writer:
        """Returns a writer for B envs.

        Args:
          max_in_flight_items: number of items that may wait for room before `create_items` waits too; None
            means 512.
        """
        ...

    def source(self) -> Source:
        """Returns the source that a `Dataset` draws from."""
        ...

    def sample_batch(
        self,
        table: str,
        batch_size: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
    ) -> ReplaySample | PaddedSample:
        """Draws a batch of samples.

        Args:
          table: name of the table.
          batch_size: number of samples N.
          timeout: seconds to wait; None waits without a limit, 0 does not wait.
          out: arrays for the leaves, in the order of the flattened nest; None allocates them.
          pad: whether items of different lengths become a `PaddedSample`; if not, they raise `ValueError`.

        Returns:
          The samples: a `SampleInfo` of arrays `[N]`, and the data with leaves `[N, ...]`.

        Raises:
          DeadlineExceededError: The timeout is over. Nothing was drawn.
          ServerClosed: The server was stopped or the client interrupted.
        """
        ...

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets priorities float64 `[N]` of the items `keys` uint64 `[N]`; unknown keys are ignored."""
        ...

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float] | None = None, deletes: Sequence[int] | None = None
    ) -> None:
        """Deletes items, then sets priorities."""
        ...

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Returns whether `n` samples can be drawn now without waiting."""
        ...

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Returns whether `n` items can be inserted now without waiting."""
        ...

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""
        ...

    def server_info(self, timeout: float | None = None) -> Mapping[str, TableInfo]:
        """Returns a description of each table.

        Raises:
          DeadlineExceededError: The server does not answer within `timeout` seconds.
        """
        ...

    def interrupt(self) -> None:
        """Ends every waiting call, and every later call that would wait, with `ServerClosed`."""
        ...

    def close(self) -> None:
        """Closes this client and its writers without waiting for room."""
        ...
