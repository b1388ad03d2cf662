# ruff: noqa: UP035  (Python 3.8)
"""The server: its connections to runs, and the envs that each has taken."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
import traceback
from typing import Any, Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from . import messages
from .messages import UnreadableMessage

_ANSWER_SECONDS = 3.0  # for a run to answer an offer, and for the handshake before it
_TURNED_AWAY = 500  # the status of a run that needs no envs now; a wrong key has 400
_RETRY_SECONDS = (0.02, 0.25)  # shortest and longest pause between two offers
_AUTH_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _AUTH_FAILED


class _Session:
    """One connection: an offer of envs, and the batch that a run has taken of them."""

    def __init__(self, context: zmq.Context, address: str, keys: tuple[bytes, bytes], hello: bytes):
        self.address, self.begun = address, time.monotonic()
        self.batch: Any = None
        self.num_envs = 0
        self.actions: list[Any] = []
        self.socket = context.socket(zmq.DEALER)
        options: dict[str, Any] = {"linger": 0, "maxmsgsize": messages.MAX_FRAME_BYTES, "reconnect_ivl": -1}
        options.update(tcp_keepalive=1, tcp_maxrt=60000)  # milliseconds
        options.update(tcp_keepalive_idle=30, tcp_keepalive_intvl=10, tcp_keepalive_cnt=3)
        options.update(curve_serverkey=keys[0], curve_publickey=keys[0], curve_secretkey=keys[1])
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.monitor = self.socket.get_monitor_socket(_ENDED)
        self.socket.connect(f"tcp://{address}")
        self.send(hello)

    def send(self, frame: bytes) -> None:
        # It would wait forever for a lost connection; the monitor tells of the loss.
        with contextlib.suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        if self.batch is not None:
            self.batch.close()


class Refused(Exception):
    """The run does not take these environments, and says why."""


class _Server:
    """Offers the free envs on one connection at a time; steps the envs of every run that took some."""

    def __init__(self, make_batch: Any, connect: Sequence[str], keys: tuple[bytes, bytes], num_envs: int):
        self._make_batch, self._keys, self._free = make_batch, keys, num_envs
        self._addresses = itertools.cycle(connect)
        self._context = zmq.Context()
        self._sessions: list[_Session] = []
        self._offer: _Session | None = None
        self._next_offer, self._pause = 0.0, _RETRY_SECONDS[0]
        self._said = ""
        self.last_used = time.monotonic()

    def step(self) -> None:
        """Makes an offer if one is due, and answers what arrives within a second."""
        now = time.monotonic()
        if self._offer is None and self._free and now >= self._next_offer:
            hello = messages.pack("hello", messages.PROTOCOL, self._free, self._make_batch.spec)
            self._offer = _Session(self._context, next(self._addresses), self._keys, hello)
            self._sessions.append(self._offer)
        offer = self._offer
        poller = zmq.Poller()
        for session in self._sessions:
            poller.register(session.socket, zmq.POLLIN)
            poller.register(session.monitor, zmq.POLLIN)
        waits_to_offer = self._offer is None and self._free
        wait = min(1.0, max(0.0, self._next_offer - now)) if waits_to_offer else 1.0
        ready = dict(poller.poll(int(1000 * wait) + 1))
        for session in list(self._sessions):
            if session.socket in ready:
                self._answer(session)
            elif session.monitor in ready:
                event = recv_monitor_message(session.monitor)
                refused = event["event"] & _AUTH_FAILED and event["value"] != _TURNED_AWAY
                self._end(session, "it refused the key" if refused else "it needs no envs, or is not running")
        # Its answer may have arrived meanwhile: steps of other envs may have taken long.
        waits = offer if offer is self._offer else None
        if waits is not None and waits.socket not in ready and now > waits.begun + _ANSWER_SECONDS:
            self._end(waits, f"{waits.address} did not answer")
        if len(self._sessions) > (self._offer is not None):
            self.last_used = time.monotonic()

    def _answer(self, session: _Session) -> None:
        try:
            kind, content = messages.unpack(session.socket.recv(zmq.NOBLOCK))
            self._take_message(session, kind, content)
        except zmq.Again:
            return
        except UnreadableMessage as error:
            self._end(session, f"received an invalid message: {error}")

    def _take_message(self, session: _Session, kind: str, content: list[Any]) -> None:
        if kind == "take" and session is self._offer:
            num_envs, seed = messages.fields(kind, content, 2)
            if type(num_envs) is not int or not 1 <= num_envs <= self._free:
                raise UnreadableMessage(f"take: got {num_envs!r} envs, expected 1 to {self._free}.")
            session.num_envs = num_envs
            self._free -= num_envs
            self._offer, self._pause = None, _RETRY_SECONDS[0]
            self._tell(f"{session.address} took {session.num_envs} envs, {self._free} are free")
            session.actions = messages.layout_of(self._make_batch.spec["actions"], session.num_envs)
            self._reply(session, lambda: setattr(session, "batch", self._make_batch(num_envs, seed)))
        elif kind == "reset" and session.batch is not None:
            self._reply(session, lambda: session.batch.reset())
        elif kind == "step" and session.batch is not None:
            (leaves,) = messages.fields(kind, content, 1)
            actions = messages.from_bytes(leaves, session.actions)
            self._reply(session, lambda: session.batch.step(actions))
        elif kind == "refuse":
            (text,) = messages.fields(kind, content, 1)
            if session is self._offer:
                raise Refused(text)
            self._end(session, f"the run has ended the connection: {text}")
        elif kind == "release":
            self._end(session, "no run needs envs")
        elif kind not in ("reset", "step", "ping"):  # An error of the first batch was told before.
            raise UnreadableMessage(f"message: got {kind!r}, expected take, reset, step, release or ping.")

    def _reply(self, session: _Session, call: Callable[[], Any]) -> None:
        try:
            leaves = call()
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            self._tell(text)
            session.send(messages.pack("fault", text))
            return
        if leaves is not None:
            session.send(messages.pack("timestep", messages.to_bytes(leaves)))

    def _end(self, session: _Session, why: str) -> None:
        self._sessions.remove(session)
        self._free += session.num_envs
        if session is self._offer:
            self._offer = None
            self._next_offer = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _RETRY_SECONDS[1])
            self._tell(f"waiting for a run at {session.address}: {why}")
        else:
            self._tell(f"{session.address} gave back {session.num_envs} envs: {why}")
        session.close()

    def _tell(self, text: str) -> None:
        if text != self._said:
            print(_printable(text), file=sys.stderr, flush=True)
        self._said = text

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        self._context.destroy(linger=0)


def serve(
    make_batch: Any,
    connect: Sequence[str],
    key: str,
    num_envs: int = 1,
    idle_timeout: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Serves until an interrupt, or until no run has had envs for `idle_timeout` seconds.

    Args:
      make_batch: `EnvironmentsOf(make_one)`; or another object with the attribute `spec`, called with the
        number of envs and a seed or None, that returns a batch with `reset()`, `step(leaves)` and `close()`.
      connect: `HOST:PORT` of the hosts where the run's actors are, tried in turn.
      key: the file with the run's key.
      num_envs: number of envs that are offered.
      idle_timeout: seconds; None serves without a limit.
      stopped: called at least once a second; True ends the server.

    Raises:
      Refused: The run's environment has other specs.
    """
    server = _Server(make_batch, connect, read_key(key), num_envs)
    try:
        while not stopped() and (idle_timeout is None or time.monotonic() < server.last_used + idle_timeout):
            server.step()
    finally:
        server.close()


def read_key(path: str) -> tuple[bytes, bytes]:
    """The public and the secret key in a file of two lines that only its owner may read."""
    if os.name == "posix" and os.stat(path).st_mode & 0o077:
        raise ValueError(
            f"{path}: got a file that other users may read, expected mode 0600. Run chmod 600 {path}."
        )
    with open(path, "rb") as file:
        lines = file.read().split()
    if len(lines) != 2 or any(len(line) != 40 for line in lines):
        raise ValueError(f"{path}: got no keys, expected two lines of 40 characters. Copy the run's file.")
    return lines[0], lines[1]


def _printable(text: str) -> str:
    """`text` without the control characters of a peer, which a terminal would obey."""
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def make_parser(prog: str, *, names: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Serves environments to the actors of a run.")
    add = parser.add_argument
    add("environment", help=names)
    add("--connect", nargs="+", required=True, metavar="HOST:PORT", help="where the run's actors listen")
    add("--key", required=True, metavar="FILE", help="the run's environments.key, of mode 0600")
    add("--num-envs", type=int, default=1, help="number of envs (default: 1)")
    add(
        "--idle-timeout",
        type=float,
        metavar="SECONDS",
        help="exit after this many seconds without a run (default: never)",
    )
    return parser


def run(make: Callable[[], Any], chosen: argparse.Namespace) -> int:
    """Serves what `make` returns until SIGTERM, or an interrupt; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(make(), chosen.connect, chosen.key, chosen.num_envs, chosen.idle_timeout)
    except (OSError, ValueError, TypeError, ImportError, AttributeError, Refused) as error:
        print(_printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0
