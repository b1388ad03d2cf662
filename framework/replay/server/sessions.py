"""What the clients of a server hold: leased rows, samples in delivery, requests half fulfilled."""

from __future__ import annotations

import numpy as np

from framework.replay.errors import DeadlineExceededError
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import Stream
from framework.replay.tables.delivery import Delivery
from framework.replay.tables.table import Table
from framework.replay.types import SampleInfo


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
        self._pieces: list[Delivery] = []

    def attempt(self) -> Delivery | None:
        """All samples, or None if some are still missing; those that were drawn are kept."""
        for piece in self._pieces:
            if piece.epoch != self._table.epoch:  # the table was reset while the request waited: begin again
                piece.unpin()
        self._pieces = [piece for piece in self._pieces if piece.epoch == self._table.epoch]
        got = sum(map(len, self._pieces))
        try:
            self._pieces.append(self._table.sample(self._n - got, timeout=0))
        except DeadlineExceededError as error:
            some = int(error.args[1]) if len(error.args) > 1 else 0
            if not some or self._n == 1:
                return None
            piece = self._table.sample(some, timeout=0)
            self._pieces.append(piece)
            # They count as handed out while the request waits, so that a batch larger than the window can
            # fill.
            self._table.count_drawn(len(piece), piece.epoch)
            return None
        for piece in self._pieces[:-1]:
            self._table.count_drawn(-len(piece), piece.epoch)
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else _merge(pieces)

    def end(self) -> None:
        """The request was dropped or has been answered: what was drawn for nothing is given back."""
        for piece in self._pieces:
            self._table.count_drawn(-len(piece), piece.epoch)
            self._table.give_back(piece)
            piece.unpin()
        self._pieces = []


def _merge(pieces: list[Delivery]) -> Delivery:
    """One delivery from several of the same table; the pieces end."""
    info = SampleInfo(
        *[np.concatenate(arrays) for arrays in zip(*[piece.info for piece in pieces], strict=True)]
    )
    parts, begin = [], 0
    for piece in pieces:
        for binding, places, index, lengths in piece.parts:
            at = np.arange(len(piece)) if places is None else places
            parts.append((binding, at + begin, index, lengths))
        begin += len(piece)
        piece.open = piece.pinned = False
    merged = Delivery(
        pieces[0].table, info, np.concatenate([piece.slots for piece in pieces]), parts, pieces[0].epoch
    )
    merged.pinned = True
    return merged


class Held:
    """What one session holds besides its leases."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = False
        self.abandoned = False  # nothing that waits for a limiter is wanted any more
        self.known: set[int] = set()  # layouts that the client has been told of
        self.layouts: dict[int, Layout] = {}  # layouts that the client has told of
        self.deliveries: set[int] = set()
