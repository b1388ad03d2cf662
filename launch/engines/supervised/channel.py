"""A private channel between the launcher and one of its processes: pickles with their lengths."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of a pair of Unix sockets. Sending is safe from any thread; one thread receives.

    A channel has either `send`, which waits until the other end has room for the message, or `post` and
    `flush`, which never wait and belong to one thread.

    Attributes:
      descriptors: the received file descriptors, in their order.
      messages: the messages that `receive` has read ahead.
      unsent: the posted messages for which there was no room yet; the first may be the rest of one.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.descriptors: list[int] = []
        self._send_lock = threading.Lock()
        self._received = bytearray()
        self.messages: list[Any] = []
        self.unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Sends a message; raises `OSError` if the other end is closed."""
        data = _frame(message)
        with self._send_lock:
            if descriptors:
                data = data[socket.send_fds(self._socket, [data], descriptors) :]
            self._socket.sendall(data)

    def post(self, message: Any) -> None:
        """Sends what there is room for, and keeps the rest for `flush`. The errors are `flush`'s."""
        self._socket.setblocking(False)
        self.unsent.append(memoryview(_frame(message)))
        self.flush()

    def flush(self) -> None:
        """Sends what there is room for; raises `OSError` and forgets the rest if the other end is closed."""
        try:
            while self.unsent:
                sent = self._socket.send(self.unsent[0])
                self.unsent[0] = self.unsent[0][sent:]
                if not self.unsent[0]:
                    self.unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.unsent.clear()
            raise

    def receive(self) -> Any:
        """Waits for the next message; raises `EOFError` if the other end is closed."""
        while not self.messages:
            self.messages += self.receive_ready()
        return self.messages.pop(0)

    def receive_ready(self) -> list[Any]:
        """Reads once and returns the complete messages; `EOFError` at the end. Does not wait if readable."""
        return [pickle.loads(message) for message in self.receive_pickles()]

    def receive_pickles(self) -> list[bytes]:
        """As `receive_ready`, but leaves it to the caller to unpickle the messages, which may fail."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 8)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            raise EOFError("The other end of the channel is closed.")
        self.descriptors += descriptors
        self._received += data
        messages: list[bytes] = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def drain(self) -> list[bytes]:
        """Returns the pickles of the messages that have arrived, before the channel is closed."""
        self._socket.setblocking(False)
        messages: list[bytes] = []
        with contextlib.suppress(EOFError, BlockingIOError):
            while True:
                messages += self.receive_pickles()
        return messages

    def end(self) -> None:
        """Tells the other end that the last message was sent."""
        with contextlib.suppress(OSError):  # the other end is already closed
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def _frame(message: Any) -> bytes:
    data = cloudpickle.dumps(message)
    return _LENGTH.pack(len(data)) + data
