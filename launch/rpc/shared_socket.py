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

    A signal handler may raise an exception between two frames of a message. The rest of a received message is
    then dropped; nothing tells which frames were sent.

    Args:
      socket: a connected or bound socket, or None until `replace`.

    Attributes:
      cut: whether an interrupt has left an incomplete message: `replace` the socket before the next `send`.
    """

    def __init__(self, socket: zmq.Socket | None = None) -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self._closed = False
        self.cut = False
        self._torn = False  # whether an interrupt has ended the last receive
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def replace(self, socket: zmq.Socket | None) -> None:
        """Closes the socket and continues with another one."""
        with self._lock:
            old, self._socket = self._socket, socket
            self.cut = self._torn = False
        if old is not None:
            old.close(linger=0)
        self.wake()

    def send(self, frames: Sequence[Any]) -> None:
        """Sends one message and copies its frames. Does nothing after `close`.

        Raises:
          zmq.ZMQError: `EAGAIN` if the peer refused the connection, `EHOSTUNREACH` if a ROUTER's peer has
            disconnected.
        """
        with self._lock:
            socket = self._socket
            if socket is None:
                return
            readable = 1  # also if it is interrupted
            try:
                self.cut = len(frames) > 1
                for frame in frames[:-1]:
                    socket.send(frame, _MORE)
                socket.send(frames[-1], zmq.NOBLOCK)
                self.cut = False
                readable = int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            except zmq.ZMQError:
                self.cut = False
                raise
            finally:
                if readable:
                    self._wake()

    def receive(self, timeout: float | None) -> list[zmq.Frame] | None:
        """Returns the next message, or None after `timeout` seconds (None: no limit) or after `wake`."""
        waited = False
        while True:
            with self._lock:
                if self._closed:
                    return None
                poll = select.poll()
                poll.register(self._wake_read, select.POLLIN)
                if self._socket is not None:
                    if self._torn and self._socket.getsockopt(zmq.RCVMORE):
                        self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    self._torn = True
                    frames: list[zmq.Frame] | None = None
                    with contextlib.suppress(zmq.Again):
                        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    self._torn = False
                    if frames is not None:
                        return frames
                    poll.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
            if waited:
                return None
            ready = poll.poll(None if timeout is None else max(0.0, timeout * 1000))
            if any(descriptor == self._wake_read for descriptor, _ in ready):
                os.read(self._wake_read, 4096)
                waited = True
            waited |= not ready

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
            if self._socket is not None:
                self._socket.close(linger=linger)
                self._socket = None
            os.close(self._wake_read)
            os.close(self._wake_write)
