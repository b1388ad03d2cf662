"""All connections of a client to one server."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from framework.replay.errors import ServerClosed
from framework.replay.remote.connection import (
    DEFAULT_RECONNECT_TIMEOUT,
    Connection,
    Interrupt,
    News,
    SessionLost,
)
from launch.rpc import sockets


class Channel:
    """All connections of one client to one server; hands out idle ones, so that no thread waits for
    another's request."""

    def __init__(
        self,
        address: str,
        curve: sockets.CurveKeys | None = None,
        hello: dict[str, Any] | None = None,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT,
    ) -> None:
        self.address = address
        self.curve = curve
        self.interrupted = Interrupt()
        self._hello = hello
        self._reconnect_timeout = reconnect_timeout
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._news = News()
        self._children: weakref.WeakSet[Interrupt] = weakref.WeakSet()

    def private(self) -> tuple[Connection, Interrupt]:
        """A new connection with an interrupt of its own, which an interrupt of the client sets too."""
        interrupt = Interrupt()
        self._children.add(interrupt)
        if self.interrupted.is_set:
            interrupt.set()
        return self._make(interrupt), interrupt

    def _make(self, interrupt: Interrupt) -> Connection:
        return Connection(
            self.address, self.curve, interrupt, self._hello, self._reconnect_timeout, self._news
        )

    def connection(self) -> Connection:
        """A new connection, for an object that keeps it; it is opened at its first use."""
        return self._make(self.interrupted)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Connection]:
        """An idle connection (or a new one) for the length of a block."""
        with self._lock:
            if self._closed:
                raise ServerClosed("this client is closed")
            connection = self._idle.pop() if self._idle else self.connection()
        try:
            yield connection
        finally:
            with self._lock:
                if self._closed:
                    connection.close()
                else:
                    self._idle.append(connection)

    def call(
        self, message: dict[str, Any], timeout: float | None = None, wait: bool = False
    ) -> dict[str, Any]:
        """One request and its answer on any connection; asked again if the connection ended in between."""
        with self.borrow() as connection:
            return self.retry(connection, message, timeout, wait)

    @staticmethod
    def retry(
        connection: Connection, message: dict[str, Any], timeout: float | None = None, wait: bool = False
    ) -> dict[str, Any]:
        """`Connection.request` on an open session, again in a new one if the old one ended first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            # An unreachable server is no reason to fail a poll (timeout 0) that could be answered in a
            # moment.
            connection.open(None if left is None else left + 1.0)
            with contextlib.suppress(SessionLost):
                return connection.request(message, left, wait)

    def move(self, address: str | None) -> None:
        """The server is at ``address`` from now on, or nowhere until the next call of this (None)."""
        self._news.away = address is None
        if address is not None:
            self._news.address = self.address = address

    def interrupt(self) -> None:
        """Wakes every wait with ServerClosed; later calls are still made, but wait for nothing."""
        self.interrupted.set()
        for child in list(self._children):
            child.set()

    def close(self) -> None:
        """Ends every idle session, and the others when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
