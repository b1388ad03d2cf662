"""A private channel between the launcher and one of its processes; carries pickles with their lengths."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of a socket pair. Sending is safe from any thread; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._send_lock = threading.Lock()
        self._received = bytearray()
        self._messages: list[Any] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Sends a message; raises `OSError` if the other end is closed."""
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Waits for the next message; raises `EOFError` if the other end is closed."""
        while not self._messages:
            self._messages += self.receive_ready()
        return self._messages.pop(0)

    def receive_ready(self) -> list[Any]:
        """Reads once and returns the complete messages; `EOFError` at the end. Does not wait if readable."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("The other end of the channel is closed.")
        self._received += data
        messages: list[Any] = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(pickle.loads(memoryview(bytes(self._received[_LENGTH.size : end]))))
            del self._received[:end]
        return messages

    def drain(self) -> list[Any]:
        """Returns the messages that have arrived, before the channel is closed."""
        self._socket.setblocking(False)
        messages: list[Any] = []
        with contextlib.suppress(EOFError, BlockingIOError):
            while True:
                messages += self.receive_ready()
        return messages

    def close(self) -> None:
        self._socket.close()
