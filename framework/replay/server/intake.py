"""Bounds what peers without a key make ZeroMQ hold while their messages arrive.

ZeroMQ delivers a message once its last frame is there, and none of its options bounds the frames before:
`ZMQ_MAXMSGSIZE` is the size of one frame, and `ZMQ_RCVHWM` counts whole messages. A peer could therefore
fill the memory with a message that never ends, at the speed of the network, or with empty frames, each of
which takes two bytes on the line and 64 in memory.

The kernel counts what each TCP connection has received. `Intake` looks at it several times a second, and
closes a connection whose message is too large before it is complete. What this does not bound:

- A peer may send for `LOOK_S` seconds before it is noticed.
- Empty frames are told by the memory of the process, which grows faster than what has arrived. A peer may
  have half a million of them (32 MiB), which take the server a second or two to read.
- Only Linux counts the bytes. Elsewhere a message is checked when it is complete.

Servers with keys, or on sockets in a directory of one user, need none of this: their peers are the program
itself.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import zmq

_LOG = logging.getLogger(__name__)
LOOK_S = 0.1
_HANDSHAKE = 1 << 14  # bytes of a connection that count for nothing
_SPARE = 1 << 25  # bytes of memory that a message may take beyond its own
_SOME = 1 << 24  # bytes of a message from which on it is no matter of empty frames
_OFFSET, _SIZE = 128, 232  # of `tcpi_bytes_received` in the kernel's `struct tcp_info`


class _Peer:
    """A connection: bytes received before its newest message began, and the process's memory then."""

    def __init__(self, memory: int) -> None:
        self.begin = 0
        self.memory = memory


class Intake:
    """See the module. `Service` calls the methods, on its thread.

    Args:
      address: where the server listens.
      max_bytes: of one message; all messages that are arriving may take four times as much.
      watches: whether peers without keys may come.

    Attributes:
      cut: number of connections that were closed.
      peers: the connections to look at, by ZeroMQ's descriptor.
      heard: the descriptors whose messages came since the last look.
    """

    def __init__(self, address: str, max_bytes: int, watches: bool) -> None:
        self.cut = 0
        self._address = address
        self._max_bytes = max_bytes
        self._watches = watches and sys.platform == "linux"
        self.peers: dict[int, _Peer] = {}
        self.heard: set[int] = set()

    def note(self, event: int, descriptor: int) -> None:
        """Takes an event of the socket's monitor."""
        if event != zmq.EVENT_ACCEPTED:
            self.peers.pop(descriptor, None)
        elif self._watches:
            with contextlib.suppress(OSError):
                self.peers[descriptor] = _Peer(_memory())

    def look(self) -> None:
        """Closes the connections whose messages are too large."""
        arriving: dict[int, int] = {}
        try:
            memory = _memory()
        except OSError:  # The process has used up its files.
            return
        for descriptor, peer in list(self.peers.items()):
            with self._borrowed(descriptor) as connection:
                info = b""
                if connection is not None:
                    with contextlib.suppress(OSError):
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
                known = len(info) >= _OFFSET + 8  # since Linux 4.1
                received = int(struct.unpack_from("=Q", info, _OFFSET)[0]) if known else None
            if received is None:  # Its end will be an event.
                continue
            if descriptor in self.heard:
                peer.begin = received
            size = received - peer.begin
            if size <= _HANDSHAKE:
                peer.memory = memory
            elif size > self._max_bytes or (size < _SOME and memory - peer.memory > _SPARE + 4 * size):
                self.close(descriptor, f"a message of more than {size} bytes")
            else:
                arriving[descriptor] = size
        self.heard.clear()
        while sum(arriving.values()) > 4 * self._max_bytes:
            largest = max(arriving, key=lambda descriptor: arriving[descriptor])
            self.close(largest, f"with others, messages of more than {sum(arriving.values())} bytes")
            del arriving[largest]

    def close(self, descriptor: int, what: str) -> None:
        """Closes a connection to the server; ZeroMQ drops what it holds of it."""
        self.peers.pop(descriptor, None)
        with self._borrowed(descriptor) as connection:
            if connection is None:
                return
            with contextlib.suppress(OSError):
                # The peer is reset, instead of waiting for room at a connection that is no longer read.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
        self.cut += 1
        if self.cut & (self.cut - 1) == 0:  # the 1st, 2nd, 4th …: a flood fills no log
            _LOG.warning("closed the connection of a client (%d so far): %s", self.cut, what)

    @contextlib.contextmanager
    def _borrowed(self, descriptor: int) -> Iterator[socket.socket | None]:
        """Yields the connection of a descriptor of ZeroMQ; None if it is none to this server any more.

        ZeroMQ may have closed it. Of what has taken its number since, only another connection to this address
        counts.
        """
        connection = None
        with contextlib.suppress(OSError):  # The number is free, or a file's.
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        if connection is None:
            yield None
            return
        try:
            name: Any = None
            with contextlib.suppress(OSError):
                name = connection.getsockname()
            place = name if isinstance(name, str) else f":{name[1]}" if name else None
            yield connection if place and self._address.endswith(place) else None
        finally:
            connection.detach()


def _memory() -> int:
    """Returns the bytes of this process's own memory, which rows in shared memory are not part of."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * mmap.PAGESIZE
