"""What the clients of a server hold: leased rows, samples in delivery, requests half fulfilled."""

from __future__ import annotations

import numpy as np

from framework.replay.rows.layout import Layout
from framework.replay.rows.store import Stream
from framework.replay.tables.delivery import Delivery
from framework.replay.tables.table import Table


class Leases:
    """Who may write which row of one stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._owner = np.zeros(1024, np.int64)

    def lease(self, owner: int, n: int) -> np.ndarray:
        """``n`` rows for a session."""
        rows = self.stream.lease(n)
        top = int(rows.max()) + 1 if n else 0
        if top > len(self._owner):
            self._owner = np.concatenate([self._owner, np.zeros(max(top, len(self._owner)), np.int64)])
        self._owner[rows] = owner
        return rows

    def check(self, owner: int, rows: np.ndarray) -> None:
        """ValueError unless the session holds all of ``rows``."""
        if not len(rows):
            return
        if rows.min() < 0 or rows.max() >= len(self._owner) or (self._owner.take(rows) != owner).any():
            raise ValueError(
                f"stream {self.stream.name!r}: got rows that this client has not leased, or has "
                "released already"
            )

    def release(self, owner: int, rows: np.ndarray) -> None:
        """The session is done with ``rows``."""
        self.check(owner, rows)
        self._owner[rows] = 0
        self.stream.release(rows)

    def release_all(self, owner: int) -> None:
        """The session has ended."""
        rows = np.flatnonzero(self._owner == owner)
        self._owner[rows] = 0
        self.stream.release(rows)


class Draws:
    """A request for ``n`` samples that may come in several pieces, as the rate limiter allows."""

    def __init__(self, table: Table, n: int) -> None:
        self._table = table
        self._n = n
        self._delivery: Delivery | None = None

    def attempt(self) -> Delivery | None:
        """All samples, or None if some are still missing; those that were drawn are kept."""
        while True:
            before, self._delivery = self._delivery, self._table.draw(self._n, self._delivery)
            if self._delivery is not None and len(self._delivery) == self._n:
                delivery, self._delivery = self._delivery, None
                return delivery
            if self._delivery is before:
                return None

    def end(self) -> None:
        """The request was dropped or has been answered: what was drawn for nothing is given back."""
        if self._delivery is not None:
            self._table.give_back(self._delivery)
            self._delivery = None


class Held:
    """What one session holds besides its leases."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = False
        self.abandoned = False  # nothing that waits for a limiter is wanted any more
        self.known: set[int] = set()  # layouts that the client has been told of
        self.layouts: dict[int, Layout] = {}  # layouts that the client has told of
        self.deliveries: set[int] = set()
