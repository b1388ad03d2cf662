"""A ZeroMQ socket that any thread sends on and one thread receives from."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from typing import Any

import zmq

_MORE = zmq.NOBLOCK | zmq.SNDMORE


class SharedSocket:
    """Guards a ZeroMQ socket with a lock, so that a sender does not hand its message to another thread.

    The receiver waits on the socket's file descriptor outside of the lock. That descriptor is
    edge-triggered and a send may consume its edge, so a sender that finds the socket readable wakes the
    receiver (https://libzmq.readthedocs.io/en/latest/zmq_getsockopt.html, `ZMQ_FD`).
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def send(self, frames: Sequence[Any]) -> None:
        """Sends one message and copies its frames. Does nothing after `close`.

        Raises:
          zmq.ZMQError: `EHOSTUNREACH` if a ROUTER's peer has disconnected.
        """
        with self._lock:
            if self._closed:
                return
            try:
                for frame in frames[:-1]:
                    self._socket.send(frame, _MORE)
                self._socket.send(frames[-1], zmq.NOBLOCK)
            finally:
                if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    self._wake()

    def receive(self) -> list[zmq.Frame] | None:
        """Returns the next message, or None after `wake`."""
        woken = False
        while True:
            with self._lock:
                if self._closed:
                    return None
                with contextlib.suppress(zmq.Again):
                    return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                poll = select.poll()
                poll.register(self._wake_read, select.POLLIN)
                poll.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
            if woken:
                return None
            if any(descriptor == self._wake_read for descriptor, _ in poll.poll()):
                os.read(self._wake_read, 4096)
                woken = True

    def wake(self) -> None:
        """Ends the current or the next wait of `receive`."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # the pipe is full: the receiver wakes anyway
                os.write(self._wake_write, b"\0")

    def close(self, linger: int = 0) -> None:
        """Closes the socket; the receiving thread must have ended.

        Args:
          linger: milliseconds for which queued messages are still sent.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.close(linger=linger)
            os.close(self._wake_read)
            os.close(self._wake_write)
