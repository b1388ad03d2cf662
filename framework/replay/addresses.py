"""Where servers are: with keys at a TCP port, without keys at a socket in a directory of their user.

`Server(port=8000)` listens at `repertory.UID/8000` in the folder of temporary files (`TMPDIR`, or `/tmp`).
`Client("localhost:8000")` of the same user finds it there. The directory has mode 0700, so the kernel admits
no other user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator

from launch.directories import check_private
from launch.rpc import sockets

_FREE_PORTS = range(49152, 65536)


def directory() -> str:
    """Returns the directory of this user's servers; makes it if there is none.

    Raises:
      PermissionError: Other users have access to it.
    """
    path = os.path.join(tempfile.gettempdir(), f"repertory.{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check_private(path)
    return path


def resolve(server_address: str, curve: sockets.CurveKeys | None) -> str:
    """Returns the `ipc://` or `tcp://` address for what a user has written.

    Raises:
      ValueError: It is not an address, or names another host without keys.
    """
    transport, _, place = server_address.rpartition("://")
    host, _, port = place.rpartition(":")
    if transport == "ipc":
        return server_address
    if transport not in ("", "tcp") or not (host and port.isdigit()):
        raise ValueError(
            f"server_address: got {server_address!r}, expected 'host:port', 'tcp://host:port' or "
            "'ipc://path'."
        )
    if curve is not None:
        return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"
    if transport or not sockets.is_loopback(host):
        raise ValueError(
            f"server_address: got {server_address!r} without keys, expected 'localhost:{port}', a server of "
            "this user on this machine. Pass the server's keys as curve=."
        )
    return f"ipc://{directory()}/{port}"


def port_of(address: str) -> int | None:
    """Returns the port of a TCP server, or of a socket in `directory`; None for other sockets."""
    transport, _, place = address.partition("://")
    folder, _, port = place.rpartition(":" if transport == "tcp" else "/")
    return int(port) if transport == "tcp" or folder == directory() else None


@contextlib.contextmanager
def claim(port: int | None) -> Iterator[str]:
    """Yields the address for a port, or for a free one, and lets no other server claim one until the end.

    The socket that a killed server has left does not count.

    Raises:
      OSError: A server listens there.
    """
    folder = directory()
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for each in [port] if port else (secrets.choice(_FREE_PORTS) for _ in range(1000)):
            if not _listens(f"{folder}/{each}"):
                yield f"ipc://{folder}/{each}"
                return
    raise OSError(
        errno.EADDRINUSE,
        f"cannot serve replay at localhost:{port or '*'}: {os.strerror(errno.EADDRINUSE)}",
    )


def _listens(path: str) -> bool:
    """Returns whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # with a full queue of connections
            return True
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise
            return False
        return True
