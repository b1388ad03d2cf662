"""The connections of one client to its server."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from framework.replay.errors import ServerClosed
from framework.replay.remote.channel import RECONNECT_TIMEOUT_S, ReplayChannel
from framework.replay.remote.connection import ReplayConnection
from framework.replay.wire import Wake
from launch.rpc import sockets


class ConnectionPool:
    """The connections of one client to its server. A thread borrows one that no other thread uses.

    Args:
      address, curve, local, reconnect_timeout: see `ReplayChannel`.
    """

    def __init__(
        self,
        address: str,
        curve: sockets.CurveKeys | None = None,
        local: bool | None = None,
        reconnect_timeout: float = RECONNECT_TIMEOUT_S,
    ) -> None:
        self._channel = ReplayChannel(address, curve, local, reconnect_timeout)
        self._begin()

    def _begin(self) -> None:
        """Sets up the state of this process, without connections."""
        self._connections: weakref.WeakSet[ReplayConnection] = weakref.WeakSet()
        self._idle: list[ReplayConnection] = []
        self._lock = threading.Lock()
        self._interrupted = False
        self._closed = False

    def begin_in_child(self) -> None:
        """Connects again in a forked child, which uses no connection of its parent."""
        inherited = list(self._connections)
        self._channel.begin()
        self._begin()
        for connection in inherited:  # a source keeps its own
            connection.wake = Wake()  # the parent waits at the other one
            self._connections.add(connection)

    def connection(self) -> ReplayConnection:
        """Returns a new connection for one owner; its first use opens it."""
        connection = ReplayConnection(self._channel)
        with self._lock:
            self._connections.add(connection)
            if self._interrupted:
                connection.wake.set()
        return connection

    @contextlib.contextmanager
    def borrow(self) -> Iterator[ReplayConnection]:
        """Lends an idle connection, or a new one, for the length of a block."""
        with self._lock:
            if self._closed:
                raise ServerClosed("this client is closed")
            connection = self._idle.pop() if self._idle else None
        connection = connection or self.connection()
        try:
            yield connection
        except BaseException as error:
            connection.end_if_interrupted(error)
            raise
        finally:
            with self._lock:
                if self._closed:
                    connection.close()  # type: ignore[unreachable]  # by another thread
                else:
                    self._idle.append(connection)

    def call(
        self, message: dict[str, Any], timeout: float | None = None, wait: bool = False
    ) -> dict[str, Any]:
        """Makes a request on any connection; see `ReplayConnection.call`."""
        with self.borrow() as connection:
            return connection.call(message, timeout, wait)

    def interrupt(self) -> None:
        """Ends every waiting call, and every later one that would wait, with `ServerClosed`."""
        with self._lock:
            self._interrupted = True
            for connection in self._connections:
                connection.wake.set()

    def close(self) -> None:
        """Ends every idle session, and the others when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
