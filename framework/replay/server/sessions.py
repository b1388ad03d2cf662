"""What one client connection holds on the server: leased rows, deliveries of samples, requests that wait."""

from __future__ import annotations

import abc
import collections
import secrets
from collections.abc import Hashable
from typing import Any

import numpy as np
import zmq

from framework.replay.errors import DeadlineExceededError
from framework.replay.rows.arrays import grown
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import Stream
from framework.replay.tables.items import Delivery
from framework.replay.tables.table import Table

Reply = dict[str, Any]
_LONGEST_TIMEOUT = 1e9  # seconds


class Waiting(abc.ABC):
    """A request that may have to wait. The service calls its methods on its own thread.

    Args:
      line: requests of one line go through in order; the first that must wait holds up the others.
      timeout: seconds that it may wait; None: without limit; 0: not at all.

    Attributes:
      session: the client's; set by the service, as are the others.
      id: the client's number of the message.
      number: the service's number of the request, from the moment when it begins to wait.
    """

    def __init__(self, line: Hashable, timeout: float | None) -> None:
        if timeout is not None:
            if type(timeout) not in (int, float) or not timeout >= 0:  # NaN is not
                raise ValueError(f"timeout: got {timeout!r}, expected seconds >= 0 or None")
            timeout = min(float(timeout), _LONGEST_TIMEOUT)
        self.line = line
        self.timeout = timeout
        self.session: Session
        self.id: int | None = None
        self.number = 0

    @abc.abstractmethod
    def attempt(self) -> Reply | None:
        """The answer, or None if the request must wait (on)."""

    def late(self) -> Exception:
        """The error to answer with when the timeout is over."""
        return DeadlineExceededError(f"{self.line!r} did not go through within {self.timeout} s")

    def count(self, change: int) -> None:
        """Called with 1 when the request begins to wait, and with -1 when it ceases."""
        return

    def drop(self) -> None:
        """Gives back what the attempts have taken. Called when the request ends, answered or not."""
        return


class Session:
    """One client connection.

    Attributes:
      identity: ZeroMQ's name of the connection.
      number: names the owner of rows; random, never 0.
      hello: the first message of the client.
      waiting: requests that cannot be answered yet, by number.
      unsent: trackers of large answers that the client may not have read yet.
      layouts: layouts that the client has defined, by its numbers.
      known: layouts that the client has been told, with the server's numbers.
      deliveries: samples that the client holds: the table, the delivery, and whether the samples are given
        back (True) or released (False) when the session ends.
      inserted: items of this client that went into tables.
    """

    def __init__(self, identity: bytes, hello: dict[str, Any]) -> None:
        self.identity = identity
        self.number = secrets.randbits(62) | 1
        self.hello = hello
        self.waiting: dict[int, Waiting] = {}
        self.unsent: collections.deque[zmq.MessageTracker] = collections.deque()
        self.layouts: dict[int, Layout] = {}
        self.known: dict[Layout, int] = {}
        self.deliveries: dict[int, tuple[Table, Delivery, bool]] = {}
        self.inserted = 0


class Leases:
    """Which session may write and release which row of one stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._owner = np.zeros(1024, np.int64)

    def lease(self, owner: int, n: int) -> np.ndarray:
        """Leases `n` rows to a session, int64 `[n]`."""
        rows = self.stream.lease(n)
        self._owner = grown(self._owner, int(rows.max(initial=-1)) + 1)
        self._owner[rows] = owner
        return rows

    def check(self, owner: int, rows: np.ndarray) -> None:
        """ValueError unless the session holds all of `rows`."""
        if not len(rows):
            return
        if rows.min() < 0 or rows.max() >= len(self._owner) or (self._owner.take(rows) != owner).any():
            raise ValueError(
                f"rows of stream {self.stream.name!r}: got rows that this client has not leased or has "
                "released already, expected rows that it holds"
            )

    def release(self, owner: int, rows: np.ndarray) -> None:
        """Ends the lease of `rows`; ValueError if the session does not hold all of them, once each."""
        self.check(owner, rows)
        order = np.arange(len(rows))
        self._owner[rows] = order
        twice = (self._owner.take(rows) != order).any()
        self._owner[rows] = owner if twice else 0
        if twice:
            raise ValueError(f"rows of stream {self.stream.name!r}: got one row twice, expected each once")
        self.stream.release(rows)

    def release_all(self, owner: int) -> None:
        """Ends every lease of a session that has ended."""
        rows = np.flatnonzero(self._owner == owner)
        self._owner[rows] = 0
        self.stream.release(rows)
