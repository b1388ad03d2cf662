"""The tables of a dm-reverb server, as a client and its writers see them."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import reverb

from framework.replay.dm_reverb import convert
from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost, UnknownTableError
from framework.replay.types import TableInfo
from framework.types import Nest

# Seconds to wait for a server of another process to start, including TensorFlow's import.
START_SECONDS = 120.0
# Timeout of one request to a running server, in seconds.
_ASK_SECONDS = 5


class ServerTables:
    """The part of `Client` that its writers use: the tables at an address, and when to stop waiting for them.

    Args:
      address: address of the server, such as `"localhost:8000"`.
      concurrent: whether other threads use the tables too.
    """

    def __init__(self, address: str, concurrent: bool):
        #: The `reverb.Client`, for methods that this class does not have.
        self.native = reverb.Client(address)
        self.address: str | None = address
        self.concurrent = concurrent
        #: Notified when samples arrive, or when a waiting call must check whether it is interrupted.
        self.changed = threading.Condition()
        self.interrupted = False
        self.closed = False
        self._signatures: dict[str, Nest] | None = None
        #: The largest priority that this client has set in each table.
        self.max_priorities: dict[str, float] = {}

    def check_open(self) -> None:
        """Raises `ServerClosed` if the server was stopped or the client closed."""
        if self.closed:
            raise ServerClosed("The server was stopped or the client closed.")

    def interrupt(self, close: bool = False) -> None:
        """Ends every waiting call with `ServerClosed`, and every later call that would wait.

        With `close`, every later call raises `ServerClosed`.
        """
        with self.changed:
            self.interrupted = True
            self.closed |= close
            self.changed.notify_all()

    def infos(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Returns a description of each table.

        Args:
          timeout: seconds, rounded up to whole ones. None waits while the server starts, but not for a server
            that was lost, for which dm-reverb would wait without a limit.

        Raises:
          DeadlineExceededError: No server answers in time.
          ServerLost: The connection to the server was lost.
          ServerClosed: The server was stopped in this process, or the client closed.
        """
        self.check_open()
        seconds = _ASK_SECONDS if timeout is None else max(1, math.ceil(timeout))
        deadline = time.monotonic() + (START_SECONDS if timeout is None else 0)
        while True:
            try:
                infos = self.native.server_info(timeout=seconds).values()
                return {each.name: convert.to_info(each, self.max_priority(each.name)) for each in infos}
            except reverb.errors.DeadlineExceededError as error:
                self.check_open()
                if self.interrupted or time.monotonic() >= deadline:
                    raise DeadlineExceededError(f"No dm-reverb server answers at {self.address}.") from error
            except RuntimeError as error:  # the connection broke
                self.check_open()
                raise ServerLost(f"The dm-reverb server at {self.address} was lost: {error}") from error

    def info(self, table: str) -> TableInfo:
        """Returns the description of one table; `UnknownTableError` if there is no such table."""
        self.signature(table)
        return self.infos()[table]

    def signature(self, table: str) -> Nest:
        """Returns the table's signature or None.

        Raises:
          UnknownTableError: There is no such table.
          ServerClosed: The server was stopped in this process, or the client closed.
        """
        self.check_open()
        if self._signatures is None:
            self._signatures = {name: info.signature for name, info in self.infos().items()}
        if table not in self._signatures:
            raise UnknownTableError(f"table {table!r} was not found. There are {sorted(self._signatures)}.")
        return self._signatures[table]

    def has_room(self, table: str, n: int) -> bool:
        """Returns whether the rate limiter lets n items in."""
        return convert.limiter_of(self.info(table)).allowed_inserts(n) == n

    def all_have_room(self) -> bool:
        """Returns whether the server answers and no rate limiter refuses an item."""
        try:
            return all(
                convert.limiter_of(info).allowed_inserts(1) for info in self.infos(_ASK_SECONDS).values()
            )
        except (DeadlineExceededError, ServerClosed):
            return False

    def max_priority(self, table: str) -> float:
        """Returns the largest priority that this client has set in the table; 1.0 at first."""
        return self.max_priorities.get(table, 1.0)

    def saw_priorities(self, table: str, priorities: np.ndarray) -> None:
        """Records the priorities that items of the table get."""
        if len(priorities):
            before = self.max_priorities.get(table, 0.0)
            self.max_priorities[table] = max(before, float(priorities.max()))
