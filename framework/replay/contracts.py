"""What replay promises, independent of where the tables are: `ReplayClient`, `Batches`, and `Source`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from framework.replay.types import Drawn, Out, Sample, TableInfo
from framework.replay.writer import BatchWriter


class Source(Protocol):
    """Draws the samples of a `Dataset`. One thread draws; others may call the other methods.

    Samples count when they are drawn. The caller releases them after use, in the order of the draws, or gives
    unused samples back, those drawn last first, as if they had never been drawn.

    Attributes:
      spare: number of samples that the source may have drawn beyond the next draw, which the caller
        sets; `close` gives them back. None if it may have none, nor use what it knows from earlier draws.
      keeps: whether it draws that number.
    """

    spare: int | None

    @property
    def keeps(self) -> bool: ...

    def draw(self, table: str, n: int, timeout: float | None, out: Out, pad: bool) -> Drawn:
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
          DeadlineExceededError: The timeout expired. Nothing was drawn.
          ServerClosed: The server was stopped or the source interrupted.
        """

    def ask(self, table: str, n: int, timeout: float | None, pad: bool, least: int | None = None) -> Any:
        """Begins a draw, so that several sources draw at the same time.

        Args:
          table, n, timeout, pad: see `draw`.
          least: number of samples to wait for. More come, up to `n`, if they need no wait. None for `n`.

        Returns:
          The first argument of `answer` or `drop`, one of which must follow.
        """

    def answer(self, asked: Any, out: Out) -> tuple[list[Any], Any]:
        """Ends a draw that was begun; see `draw`. The samples come in pieces, for `batches.join`."""

    def drop(self, asked: Any) -> None:
        """Ends a draw that was begun, and gives its samples back."""

    def release(self, drawn: Any) -> None:
        """Unpins the rows of used samples and removes items that reached `max_times_sampled`."""

    def give_back(self, drawn: Any) -> None:
        """Undoes a draw: unused samples do not count. No thread may be in `draw`."""

    def can_sample(self, table: str, n: int) -> bool:
        """Returns whether a draw of `n` samples would not wait."""

    def interrupt(self) -> None:
        """Ends a waiting draw, and every later draw that would wait, with `ServerClosed`."""

    def close(self) -> None:
        """Closes the source. No thread may be in `draw`."""


class Batches(Protocol):
    """What a `Dataset` draws from: replay, here or elsewhere, several of them, or anything else."""

    #: Whether other threads or processes use the tables. If not, a call that would wait raises an error.
    concurrent: bool

    def source(self) -> Source:
        """Returns the source that a `Dataset` draws from."""

    def update_priorities(self, table: str, keys: Any, priorities: Any) -> None:
        """Sets priorities float64 `[N]` of the items `keys` uint64 `[N]`; unknown keys are ignored.

        Raises:
          ValueError: A priority is negative or not finite, or a shape is not `[N]`. Nothing is changed.
          TypeError: Keys are not integers. Nothing is changed.
        """

    def refusals(self, timeout: float | None = None) -> list[str]:
        """What would have to wait now, and why: `table 'queue' refuses the next sample: …`.

        Raises:
          DeadlineExceededError: The server does not answer within `timeout` seconds.
        """


class ReplayClient(Batches, Protocol):
    """Reads and writes the tables of one or several servers. All methods may be called from any thread."""

    def batch_writer(self, max_in_flight_items: int | None = None) -> BatchWriter:
        """Returns a writer for B envs.

        Args:
          max_in_flight_items: number of items that may wait for room before `create_items` waits too; None
            means 512.
        """

    def sample_batch(
        self, table: str, batch_size: int, timeout: float | None = None, out: Out = None, pad: bool = False
    ) -> Sample:
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
          DeadlineExceededError: The timeout expired. Nothing was drawn.
          ServerClosed: The server was stopped or the client interrupted.
        """

    def single_samples(self, table: str, n: int, timeout: float | None = None) -> Iterator[Sample]:
        """Yields `n` batches of one sample each, which may differ in their lengths and leaves.

        A client of another process draws ahead what needs no wait: as many samples as it has yielded, and at
        most 256 or 1 MiB. When the iterator is closed, it gives back those that it did not yield.

        Args:
          table: name of the table.
          n: number of samples. No more are drawn, at any time.
          timeout: seconds to wait for each sample; None waits without a limit.

        Raises:
          DeadlineExceededError: The timeout expired.
          ServerClosed: The server was stopped or the client interrupted.
        """

    def mutate_priorities(
        self, table: str, updates: Mapping[int, float] | None = None, deletes: Sequence[int] | None = None
    ) -> None:
        """Deletes items, then sets priorities; see `update_priorities`."""

    def can_sample(self, table: str, n: int = 1) -> bool:
        """Returns whether `n` samples can be drawn now without waiting."""

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Returns whether `n` items can be inserted now without waiting."""

    def reset(self, table: str) -> None:
        """Removes every item of a table and sets its counters to 0."""

    def server_info(self, timeout: float | None = None) -> Mapping[str, TableInfo]:
        """Returns a description of each table.

        Raises:
          DeadlineExceededError: The server does not answer within `timeout` seconds.
        """

    def interrupt(self) -> None:
        """Ends every waiting call, and every later call that would wait, with `ServerClosed`."""

    def close(self) -> None:
        """Closes this client and its writers without waiting for room."""
