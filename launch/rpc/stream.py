"""The short way between two processes of one machine: a unix stream socket beside a node's ZeroMQ socket.

A caller that waits needs none of what a message queue gives. It writes its call into a stream and reads the
answer from it, each with one system call; at the other end a thread does the same. That is two changes of
thread a call, where a queue with threads of its own makes six. Everything else goes the long way (futures,
nodes that are not there yet or no more, other machines), and this way falls back on it.

A connection begins with a greeting that holds the program's token (see `launch.rpc.sockets`); a peer that
does not show it is cut off before anything else is read. Then messages follow, one call under way at a time::

    head (kind, number of buffers, number of the call, bytes of the pickle)
    | bytes of each buffer | pickle | buffers
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.rpc import sockets, wire

_HEAD = struct.Struct("<BxHxxxxQQ")
_HEAD_BYTES = _HEAD.size
_GREETING = b"launch-stream-1\n"
_ID_BYTES = 8
_TIME = struct.Struct("@ll")
_PIECE = 1 << 16
#: Bytes of what a client says first: greeting, token, id of the connection.
HELLO_BYTES = len(_GREETING) + 64 + _ID_BYTES


class Gone(Exception):
    """The peer has closed the connection, or died."""


class Silent(Exception):
    """Nothing came, or nothing could be sent, within the time set."""


Message = tuple[int, int, Any, Sequence[Any]]


def door(address: str) -> str | None:
    """Where the stream socket of the node at ``address`` is; None if it has none."""
    path = address.removeprefix("ipc://") + ".s"
    return path if path != address + ".s" and len(os.fsencode(path)) <= sockets.MAX_IPC_PATH else None


def head(kind: int, number: int, size: int, sizes: Sequence[int]) -> bytes:
    """What a message with a pickle of ``size`` bytes and buffers of ``sizes`` begins with."""
    return _HEAD.pack(kind, len(sizes), number, size) + struct.pack(f"<{len(sizes)}Q", *sizes)


def greeting(token: bytes, name: bytes) -> bytes:
    """What a client says first; ``name`` has 8 bytes."""
    return _GREETING + token + name


class Stream:
    """One end of a connection; one thread at a time.

    Args:
      sock: a connected unix stream socket.
      max_frame_bytes: a pickle or buffer of more bytes is a `launch.rpc.wire.MalformedMessage`.
    """

    def __init__(self, sock: socket.socket, max_frame_bytes: int) -> None:
        self._socket = sock
        self._limit = max_frame_bytes
        self._piece = bytearray(_PIECE)
        self._view = memoryview(self._piece)
        # What has been read of the message under way, so that a read that ran out of time can go on.
        self._have = 0
        self._rest: list[memoryview] | None = None
        self._message: Message | None = None

    def set_timeout(self, seconds: float) -> None:
        """From now on `receive` and `send` wait so long at most; the kernel counts, which costs nothing."""
        value = _TIME.pack(int(seconds), int(seconds % 1 * 1e6) or (0 if seconds >= 1 else 1))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(
        self, kind: int, number: int, data: bytes, buffers: Sequence[Any], flags: int = 0
    ) -> list[memoryview]:
        """Sends a message; what could not be sent in time is returned, for `send_rest`."""
        if not buffers:
            message = _HEAD.pack(kind, 0, number, len(data)) + data
            try:
                sent = self._socket.send(message, flags)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise Gone from error
            return [] if sent == len(message) else self.send_rest([memoryview(message)[sent:]], flags)
        raws = [buffer if isinstance(buffer, memoryview) else buffer.raw() for buffer in buffers]
        begin = head(kind, number, len(data), [raw.nbytes for raw in raws])
        return self.send_rest([memoryview(begin + data), *raws], flags)

    def send_rest(self, parts: list[memoryview], flags: int = 0) -> list[memoryview]:
        """Sends ``parts``; returns what is left of them when the time is over."""
        parts = [part for part in parts if part.nbytes]
        while parts:
            try:
                sent = self._socket.sendmsg(parts[:512], (), flags)
            except BlockingIOError:
                return parts
            except OSError as error:
                raise Gone from error
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if sent:
                parts[0] = parts[0][sent:]
        return parts

    def receive(self) -> Message:
        """``(kind, number, pickle, buffers)``; the pickle is gone with the next `receive`.

        Raises:
          Silent: the time is over; what came so far is kept.
          Gone: the peer has.
          launch.rpc.wire.MalformedMessage: no message of ours.
        """
        if self._rest is None:
            have = self._have + self._read(self._view[self._have :])
            self._have = have
            while have < _HEAD_BYTES:
                have = self._have = have + self._read(self._view[have:])
            kind, count, number, size = _HEAD.unpack_from(self._piece)
            if not count and have == _HEAD_BYTES + size:
                self._have = 0
                return kind, number, self._view[_HEAD_BYTES:have], ()
            self._begin(kind, count, number, size)
        assert self._rest is not None and self._message is not None
        while self._rest:
            got = self._read(self._rest[0], socket.MSG_WAITALL)
            self._rest[0] = self._rest[0][got:]
            if not self._rest[0].nbytes:
                del self._rest[0]
        message, self._rest, self._message, self._have = self._message, None, None, 0
        return message

    def _begin(self, kind: int, count: int, number: int, size: int) -> None:
        """Makes room for a message that did not come in one piece, and puts into it what has come."""
        while self._have < (begin := _HEAD_BYTES + 8 * count) <= _PIECE:
            self._have += self._read(self._view[self._have :])
        if begin > _PIECE:
            raise wire.MalformedMessage(f"a message of {count} buffers")
        sizes = [size, *struct.unpack_from(f"<{count}Q", self._piece, _HEAD_BYTES)]
        if max(sizes) > self._limit:
            raise wire.MalformedMessage(f"a frame of {max(sizes)} bytes; max_frame_bytes is {self._limit}")
        parts = [memoryview(np.empty(nbytes, np.uint8)) for nbytes in sizes]  # type: ignore[arg-type]
        rest = []
        for part in parts:
            piece = min(part.nbytes, self._have - begin)
            part[:piece] = self._view[begin : begin + piece]
            begin += piece
            if piece < part.nbytes:
                rest.append(part[piece:])
        if begin < self._have:
            raise wire.MalformedMessage("more than one message at a time")
        self._rest, self._message = rest, (kind, number, parts[0], parts[1:])

    def _read(self, room: memoryview, flags: int = 0) -> int:
        try:
            got = self._socket.recv_into(room, 0, flags)
        except BlockingIOError:
            raise Silent from None
        except OSError as error:
            raise Gone from error
        if not got:
            raise Gone
        return got

    def end(self) -> None:
        """Wakes whoever reads or writes at either end, with `Gone`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was quicker

    def has_news(self) -> bool:
        """Whether `receive` would find something, be it the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self._socket.close()


def connect(path: str, token: bytes, name: bytes, max_frame_bytes: int, timeout: float) -> Stream | None:
    """A connection to the door at ``path``, introduced as ``name`` (8 bytes); None if nobody is there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A full queue at the door is as good as nobody: do not wait for it. Afterwards calls block.
        sock.setblocking(False)
        sock.connect(path)
        sock.send(greeting(token, name))
        sock.setblocking(True)
    except OSError:
        sock.close()
        return None
    stream = Stream(sock, max_frame_bytes)
    stream.set_timeout(timeout)
    return stream


def admit(sock: socket.socket, token: bytes) -> bytes | None:
    """Reads what a client says first; the id of its connection, or None if it does not know the token."""
    hello = b""
    try:
        while len(hello) < HELLO_BYTES:
            piece = sock.recv(HELLO_BYTES - len(hello))
            if not piece:
                return None
            hello += piece
    except OSError:  # also: it took too long
        return None
    shown = hello[:-_ID_BYTES]
    return hello[-_ID_BYTES:] if hmac.compare_digest(shown, _GREETING + token) else None
