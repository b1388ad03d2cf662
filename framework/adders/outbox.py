"""Items on their way into the tables, for a writer that sometimes must not wait."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from framework.replay.errors import DeadlineExceededError
from framework.types import Nest


@dataclasses.dataclass
class Items:
    """``total`` items for one table, of which the first ``done`` are there.

    ``make`` gives the trajectory of some of them; ``priorities`` are float64 ``[total]`` or None.
    """

    table: str
    make: Callable[[slice], Nest]
    total: int
    priorities: np.ndarray | None
    done: int = 0

    @property
    def missing(self) -> int:
        """How many are not in the table yet."""
        return self.total - self.done


class Outbox:
    """Inserts items in order. Those that a rate limiter refuses for too long are kept, with their rows.

    Where nobody else runs (``concurrent`` False) nothing waits: what does not go in at once is kept.
    """

    def __init__(self, writer: Any, concurrent: bool):
        self._writer = writer
        self._concurrent = concurrent
        # What the table said when it refused items last.
        self.refusal = ""
        # Items that wait here, the oldest first.
        self.kept: collections.deque[Items] = collections.deque()
        self._unreleased: list[tuple[str, np.ndarray]] = []

    @property
    def num_kept(self) -> int:
        """Items that wait here."""
        return sum(items.missing for items in self.kept)

    def insert(self, items: Items, timeout: float | None) -> None:
        """Inserts ``items``, or keeps those that do not go in within ``timeout`` seconds (None: for ever)."""
        if self.kept:
            self.kept.append(items)
            return
        try:
            self._try(items, timeout)
        finally:
            # Whatever went wrong, close() can say what was dropped.
            if items.missing:
                self.kept.append(items)

    def insert_kept(self, timeout: float | None) -> None:
        """Inserts what waits here, as far as that goes within ``timeout`` seconds each."""
        while self.kept:
            self._try(self.kept[0], timeout)
            if self.kept[0].missing:
                return
            self.kept.popleft()
        self.release_rows()

    def _try(self, items: Items, timeout: float | None) -> None:
        part = slice(items.done, None)
        priorities = None if items.priorities is None else items.priorities[part]
        try:
            self._writer.create_items(
                items.table,
                items.make(part),
                priorities=priorities,
                timeout=timeout if self._concurrent else 0,
            )
            items.done = items.total
        except DeadlineExceededError as error:
            self.refusal = str(error.args[0]) if error.args else ""
            # The tables say how many went in before the time was over.
            items.done += int(error.args[1]) if len(error.args) > 1 else 0

    def release(self, stream: str, rows: np.ndarray) -> None:
        """No item will be made of ``rows`` any more (-1: none); they go once no kept item needs them."""
        rows = rows[rows >= 0]
        if len(rows):
            self._unreleased.append((stream, rows))

    def release_rows(self) -> None:
        """Gives back what was released, if nothing is kept that may need it."""
        if not self.kept:
            for stream, rows in self._unreleased:
                self._writer.release(stream, rows)
            self._unreleased.clear()

    def clear(self) -> int:
        """Drops what is kept; returns how many items that were."""
        dropped = self.num_kept
        self.kept.clear()
        return dropped
