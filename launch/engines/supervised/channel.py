"""A private pipe between the launcher and one of its processes; carries pickles, each behind its length."""

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
        """Sends; OSError if the other end is gone."""
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Waits for the next message; EOFError if the other end is gone."""
        while not self._messages:
            self._messages += self.receive_ready()
        return self._messages.pop(0)

    def receive_ready(self) -> list[Any]:
        """Reads once, without waiting if readable: the messages complete now. EOFError at the end."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the other end of the channel is gone")
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
        """The messages that are still there, before the channel is closed."""
        self._socket.setblocking(False)
        messages: list[Any] = []
        with contextlib.suppress(EOFError, BlockingIOError):
            while True:
                messages += self.receive_ready()
        return messages

    def close(self) -> None:
        self._socket.close()
