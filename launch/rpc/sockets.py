"""ZeroMQ sockets that only the nodes of one program can reach.

Every program has one random key pair (`CurveKeys`), known to its nodes only. The protection depends on the
transport:

- `ipc://` sockets are in a directory of mode 0700: the kernel admits only the user (and root). Peers send a
  token that is derived from the keys (ZeroMQ's PLAIN handshake), so that two programs of one user cannot
  connect by mistake. There is no encryption: the bytes never leave the kernel, and CURVE would cost several
  times as much as the call itself for large arrays.
- `tcp://` uses CURVE: authenticated encryption that admits only clients with the program's key. Every user of
  the machine can reach the loopback interface, too, so that it also needs keys.

In both cases ZeroMQ finishes the handshake before it delivers any frame, so that data of a peer without the
key is never parsed. One thread per process, the `Authenticator`, decides which peers are admitted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from launch.directories import MAX_IPC_PATH, check_private

DEFAULT_MAX_FRAME_BYTES = 1 << 30
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_USER = b"launch"


@dataclass(frozen=True)
class CurveKeys:
    """The key pair of a program; both halves are secret to its nodes. Never printed.

    Attributes:
      public: 40 characters of Z85, as `zmq.curve_keypair()` returns them.
      secret: 40 characters of Z85.
    """

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """Returns a new random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret)

    @classmethod
    def from_file(cls, path: str) -> CurveKeys:
        """Returns the keys in a file of mode 0600, two lines of Z85; creates the file if it does not exist.

        Raises:
          ValueError: Other users may read the file, or it does not hold keys.
        """
        keys = cls.generate()
        lines = read_secret(path, keys.public + b"\n" + keys.secret + b"\n").split()
        if len(lines) != 2 or any(len(line) != 40 for line in lines):
            raise ValueError(
                f"{path}: got no keys, expected two lines of 40 characters, a public and a secret key."
            )
        return cls(public=lines[0], secret=lines[1])

    @property
    def token(self) -> bytes:
        """Returns the token that a peer sends on `ipc://`; it does not reveal the keys."""
        return self._derive(b"launch-token")

    @property
    def domain(self) -> bytes:
        """Returns the authenticator's name of this program; not a secret."""
        return self._derive(b"launch-domain")[:24]

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(self.secret, digest_size=32, person=purpose).hexdigest().encode()


def read_secret(path: str, new: bytes) -> bytes:
    """Returns the contents of a file of mode 0600; if there is none, creates it with the contents `new`.

    The file appears complete or not at all, even if the process is killed while it writes.

    Raises:
      ValueError: Other users may read or change the file.
    """
    if not os.path.exists(path):
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", prefix=".keys-") as file:
            file.write(new)  # of mode 0600
            file.flush()
            os.fsync(file.fileno())  # a full disk may be noticed only here
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(file.name, path)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ValueError(
                f"{path}: got a file that other users may read, expected mode 0600. Run chmod 600 {path}."
            )
        return file.read()


class Authenticator:
    """Decides, on a thread of its own, which peers libzmq admits (ZAP, https://rfc.zeromq.org/spec/27/).

    Attributes:
      programs: by domain, the keys of the peers to admit. None refuses all peers, which may try again.
    """

    def __init__(self, context: zmq.Context) -> None:
        self.programs: dict[bytes, CurveKeys | None] = {}
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._run, name="launch-authenticator", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart()
            except zmq.ContextTerminated:
                self._socket.close()
                return
            version, request_id = request[:2]
            code, text, user = b"400", b"not a peer of this program", b""
            if request[2] in self.programs:
                keys = self.programs[request[2]]
                if keys is None:
                    code, text = b"500", b"try again"
                elif self._may_enter(keys, request[5], request[6:]):
                    code, text, user = b"200", b"OK", _USER
            self._socket.send_multipart([version, request_id, code, text, user, b""])

    def _may_enter(self, keys: CurveKeys, mechanism: bytes, credentials: list[bytes]) -> bool:
        if mechanism == b"PLAIN" and len(credentials) == 2:
            return credentials[0] == _USER and hmac.compare_digest(credentials[1], keys.token)
        if mechanism == b"CURVE" and len(credentials) == 1:
            return hmac.compare_digest(credentials[0], z85.decode(keys.public))
        return False


class _Transport:
    """The ZeroMQ context of this process and its authenticator; recreated after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, tuple[zmq.Context, Authenticator]] = {}  # by process id

    def get(self) -> tuple[zmq.Context, Authenticator]:
        with self._lock:
            if os.getpid() not in self._made:
                context = zmq.Context()
                self._made = {os.getpid(): (context, Authenticator(context))}
            return self._made[os.getpid()]


_transport = _Transport()
os.register_at_fork(after_in_child=lambda: setattr(_transport, "_lock", threading.Lock()))


def context() -> zmq.Context:
    """Returns the ZeroMQ context that this process uses for all sockets of programs."""
    return _transport.get()[0]


def make_server_socket(
    address: str,
    curve: CurveKeys | None,
    *,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    max_unread_messages: int = 0,
    max_unsent_messages: int = 0,
    descriptor: int | None = None,
    domain: bytes | None = None,
) -> zmq.Socket:
    """Returns a bound socket that admits only peers with the keys `curve`.

    Args:
      address: `ipc://<path in a directory of mode 0700>` or `tcp://<interface>:<port or *>`.
      curve: the keys of the program. None admits every process of this user, and is an error unless the
        address is ipc.
      max_frame_bytes: largest frame; a peer that sends a larger one is disconnected.
      max_unread_messages: messages of one peer, from 2 on, that may wait here to be received; the peer then
        waits, too. 0 means no limit.
      max_unsent_messages: messages that may wait here for one peer to read them; sending more raises
        `zmq.Again`. 0 means no limit.
      descriptor: descriptor of a listening TCP socket at `address`, which the returned socket then owns. None
        opens one.
      domain: name of this socket for `admit_peers`. None shares the keys' domain.

    Returns:
      The socket; `bound_address` returns the address for clients.

    Raises:
      ValueError: The address is of another kind, or of tcp without keys.
      PermissionError: Other users can access the directory of an ipc address.
    """
    transport = check_address(address, curve)
    with _new_socket(zmq.ROUTER, address, max_frame_bytes) as socket:
        socket.rcvhwm, socket.sndhwm = max_unread_messages, max_unsent_messages
        socket.router_mandatory = True  # sending to a disconnected peer is an error, not a silent loss
        if curve is not None:
            socket.zap_domain = domain or curve.domain
            admit_peers(socket.zap_domain, curve)
            if transport == "ipc":
                socket.plain_server = True
            else:
                socket.curve_server = True
                socket.curve_secretkey = curve.secret
        if transport == "ipc":
            old = address[len("ipc://") :]
            if os.path.exists(old):  # left by an earlier life of this node
                os.unlink(old)
        if descriptor is not None:
            socket.use_fd = descriptor
        socket.bind(address)
    return socket


def make_client_socket(
    address: str, curve: CurveKeys | None, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
) -> zmq.Socket:
    """Returns a socket connected to a server; it reconnects by itself when the server is restarted.

    The call does not wait for the server. The arguments and errors are `make_server_socket`'s.
    """
    transport = check_address(address, curve)
    with _new_socket(zmq.DEALER, address, max_frame_bytes) as socket:
        socket.reconnect_ivl = 10
        socket.reconnect_ivl_max = 500
        if curve is not None:
            if transport == "ipc":
                socket.plain_username = _USER
                socket.plain_password = curve.token
            else:
                socket.curve_serverkey = curve.public
                socket.curve_publickey = curve.public
                socket.curve_secretkey = curve.secret
        socket.connect(address)
    return socket


def admit_peers(domain: bytes, curve: CurveKeys | None) -> None:
    """Makes the server socket of `domain` admit peers with the keys `curve`; None refuses all peers."""
    _transport.get()[1].programs[domain] = curve


def bound_address(socket: zmq.Socket) -> str:
    """Returns the address that a server socket is bound to, with its port."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


def check_address(address: str, curve: CurveKeys | None) -> str:
    """Checks that an address is safe; returns its transport, `"ipc"` or `"tcp"`."""
    transport, separator, rest = address.partition("://")
    if not separator or transport not in ("ipc", "tcp"):
        raise ValueError(f"address: got {address!r}, expected ipc://<path> or tcp://<interface>:<port>.")
    if transport == "ipc":
        _check_ipc_path(rest)
    elif curve is None:
        raise ValueError(
            f"address: got {address!r} without keys, expected keys, because other users can reach tcp. Pass "
            "curve=CurveKeys.generate() here and to the clients, or use ipc://PATH."
        )
    return transport


def is_loopback(host: str) -> bool:
    """Returns whether an interface or host name can be reached from this machine only."""
    host = host.strip("[]")
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ipc_path(path: str) -> None:
    if not os.path.isabs(path) or len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(
            f"ipc path: got {path!r}, expected an absolute path of at most {MAX_IPC_PATH} bytes."
        )
    directory = os.path.dirname(path)
    try:
        check_private(directory)
    except FileNotFoundError:
        raise ValueError(
            f"ipc path {path!r}: the directory {directory!r} does not exist. Its program may have ended."
        ) from None


@contextlib.contextmanager
def _new_socket(kind: int, address: str, max_frame_bytes: int) -> Iterator[zmq.Socket]:
    """Creates a socket with the options of both sides; closes it if the `with` block fails."""
    socket = context().socket(kind)
    try:
        socket.maxmsgsize = max_frame_bytes
        socket.linger = 0
        socket.sndhwm = 0  # the callers limit the number in flight; dropping or blocking here would hide it
        socket.rcvhwm = 0
        socket.ipv6 = address.startswith("tcp://[")
        socket.tcp_keepalive = 1
        # The kernel notices within a minute that a peer's machine has vanished, whether data is in flight or
        # not. Unlike ZeroMQ's heartbeats, it does not mistake a long frame or a paused process for that.
        socket.tcp_keepalive_idle = 30  # seconds
        socket.tcp_keepalive_intvl = 10
        socket.tcp_keepalive_cnt = 3
        socket.tcp_maxrt = 60_000  # milliseconds
        yield socket
    except BaseException:
        socket.close(linger=0)
        raise
