"""Applications that ask for actions and report rewards, as envs of an actor: docs/external_clients.md.

The roles are reversed: the application steps by itself, and `step` of this environment answers its last
request with the action and waits for its next. Messages are lines of JSON over TCP.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import math
import os
import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

from framework import nest as nests
from framework import specs
from framework.environments.base import FIRST, LAST, MID, EnvironmentFault
from framework.environments.remote.connected import ConnectedEnvironment, require_file
from framework.environments.remote.environment_server import UnreadableMessage
from framework.environments.remote.external_client import keep_alive
from framework.types import Nest
from launch.rpc.sockets import is_loopback, read_secret

PROTOCOL = 1
MAX_LINE_BYTES = 1 << 25
MAX_HELLO_BYTES = 1 << 20
_HELLO_S = 3.0  # that a connection may take to say hello
_MAX_STRANGERS = 64  # connections before their hello
_LARGEST_REWARD = float(np.finfo(np.float32).max)


class _ExternalClient:
    """One connection.

    Attributes:
      env: index of its env; -1 before hello.
      is_open: whether an episode is open.
      asks: whether it waits for an action.
      is_new: whether the open episode has no observation yet.
      is_cut: whether the run was reset in the open episode, whose next observation begins an episode.
      has_acted: whether the open episode has had an action.
      reward: sum of the rewards logged since the last action.
    """

    def __init__(self, connection: socket.socket):
        self.connection, self.begun, self.env = connection, time.monotonic(), -1
        self.buffer, self.reward = bytearray(), 0.0
        self.is_open = self.asks = self.is_new = self.is_cut = self.has_acted = False

    def read(self) -> bool:
        """Takes what has arrived, up to the end of a message; False if the connection has ended."""
        most = MAX_LINE_BYTES if self.env >= 0 else MAX_HELLO_BYTES
        try:
            while data := self.connection.recv(1 << 16):  # A whole TLS record, so that none is left behind.
                self.buffer += data
                if len(self.buffer) > most:
                    raise UnreadableMessage(f"message: got more than {most} bytes before its end.")
                if b"\n" in data:
                    return True
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False
        return False

    def next_message(self) -> dict[str, Any] | None:
        line, separator, rest = self.buffer.partition(b"\n")
        if not separator:
            return None
        self.buffer = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableMessage(f"message: got no JSON: {error}") from None
        if not isinstance(message, dict):
            raise UnreadableMessage(f"message: got {type(message).__name__}, expected an object with a type.")
        return message

    def send(self, **message: Any) -> bool:
        """Whether the message was sent; a client that does not read is lost."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError):
            return False
        return True


class ExternalEnvironment(ConnectedEnvironment):
    """B clients as B envs. A client is lost with its connection, and a new one takes its place.

    Clients cannot be reset: after a reset in mid-episode, the env continues with its present observation as
    the first one, and is marked in `cut`.

    Args:
      address: `tcp://INTERFACE:PORT`.
      num_envs: B.
      token: file of the token that clients need; created if it does not exist.
      certificate: file of the TLS certificate and its key (PEM). Without one, the interface must be loopback.
      evaluation: whether to take clients that say `"evaluation": true`, and no others.
      timeout: seconds that a step may wait for clients and their next requests.

    Raises:
      EnvironmentFault: There are too few clients after `timeout` seconds.
    """

    def __init__(
        self,
        address: str,
        num_envs: int = 1,
        *,
        token: str = "",
        certificate: str | None = None,
        evaluation: bool = False,
        timeout: float = 300.0,
    ):
        name = f"external:{address}"
        require_file(name, "token", token, "clients")
        if certificate is None and not is_loopback(address.partition("://")[2].rpartition(":")[0]):
            raise ValueError(
                f"{name}: got an interface that others can reach without encryption. Give certificate=FILE "
                "(PEM with its key) among the options of the environment, or listen at tcp://127.0.0.1:PORT."
            )
        self._token, self._evaluation, self._tls = read_token(token), evaluation, None
        if certificate is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(certificate)
        kind = 'clients with "evaluation": true' if evaluation else "clients"
        self.how_to_connect = f"Start {kind}, which connect to the port and send the token in {token}."
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._clients: set[_ExternalClient] = set()
        self._cut, self._rewards = np.zeros(num_envs, np.bool_), np.zeros(num_envs)
        super().__init__(name, address, num_envs, timeout)

    @property
    def cut(self) -> np.ndarray:
        return self._cut

    @property
    def exact_rewards(self) -> list[np.ndarray]:
        return [self._rewards]

    def _listen(self) -> None:
        self._listener = self._open_port()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_listening = True

    def _stop_listening(self) -> None:
        assert self._listener is not None
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._is_listening = None, False

    def _request(self, actions: Sequence[np.ndarray] | None) -> None:
        for client in [client for client in self._clients if client.env >= 0]:
            if client.asks and actions is None:
                self._put_step(client, FIRST, 1.0, self._last[client.env])
            elif client.asks and actions is not None:
                client.asks, client.reward, client.has_acted = False, 0.0, True
                rows = [leaf[client.env] for leaf in actions]
                plain = tree.map_structure(lambda row: row.tolist(), self._build_action(rows))
                if not client.send(type="action", action=plain):
                    self._end(client)
                    continue
            elif actions is None:
                client.is_cut = True
            self._handle(client)

    def _receive(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._clients:
                client = key.data
                try:
                    alive = client.read()
                except UnreadableMessage as error:
                    self._refuse(client, error)
                    continue
                self._handle(client)
                if not alive and client in self._clients:
                    self._end(client)
        # A client says hello at once. The others make room for those that come.
        strangers = sorted((each for each in self._clients if each.env < 0), key=lambda each: each.begun)
        late = time.monotonic() - _HELLO_S
        for at, client in enumerate(strangers):
            if client.begun < late or at < len(strangers) - _MAX_STRANGERS:
                self._end(client)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        try:
            connection.getpeername()  # Fails if the peer has left.
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
            if self._tls is not None:
                # The handshake is part of the first reads.
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
        except OSError:
            connection.close()
            return
        client = _ExternalClient(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _handle(self, client: _ExternalClient) -> None:
        """Takes the client's messages up to its next time step; later ones wait."""
        try:
            while client in self._clients and (client.env < 0 or self._awaits(client)):
                message = client.next_message()
                if message is None:
                    return
                if client.env < 0:
                    self._admit(client, message)
                else:
                    self._take(client, message)
        except Exception as error:
            self._refuse(client, error)

    def _awaits(self, client: _ExternalClient) -> bool:
        return self._columns is not None and bool(self._missing[client.env])

    def _admit(self, client: _ExternalClient, message: dict[str, Any]) -> None:
        token = message.get("token")
        given = str(token) if isinstance(token, str | int) else ""
        if message.get("type") != "hello" or message.get("protocol") != PROTOCOL:
            raise UnreadableMessage(
                f"hello: got {_short(message)}, expected type hello of protocol {PROTOCOL}."
            )
        if not hmac.compare_digest(given.encode(errors="surrogatepass"), self._token.encode()):
            raise UnreadableMessage("token: got one that differs from the token in the run's file.")
        data = {"observations": message.get("observation"), "actions": message.get("action")}
        spec = self._parse_spec(data)
        free = np.flatnonzero(self._vacant)
        if bool(message.get("evaluation")) is not self._evaluation or not len(free):
            client.send(type="busy")
            self._end(client)
            return
        if self._spec_data is None:
            self._set_spec(data, spec)
            self._build_action = nests.unflattener(spec.actions)
            self._last: list[Nest] = [None] * self.num_envs  # Observation that waits for an action, by env.
        elif data != self._spec_data:
            raise UnreadableMessage(
                f"hello: got {spec.observations} and {spec.actions}, expected {self.spec}."
            )
        client.env = int(free[0])
        self._vacant[client.env] = False
        client.send(type="welcome")

    def _take(self, client: _ExternalClient, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "start_episode" and not client.is_open:
            client.is_open = client.is_new = True
            client.has_acted = False
        elif kind == "log_reward" and client.is_open and not client.is_new:
            given = message.get("reward")
            if not isinstance(given, int | float):
                raise UnreadableMessage(f"reward: got {type(given).__name__}, expected a number.")
            try:
                client.reward += given
            except OverflowError:
                client.reward = math.inf
            if not abs(client.reward) <= _LARGEST_REWARD:
                raise UnreadableMessage(
                    f"reward: got {given!r:.40}, expected a finite number of float32, also as a sum."
                )
        elif kind == "get_action" and client.is_open:
            leaves = self._observation(client, message)
            self._last[client.env] = leaves
            client.asks = True
            self._put_step(client, FIRST if client.is_new or client.is_cut else MID, 1.0, leaves)
            client.is_new = client.is_cut = False
        elif kind == "end_episode" and client.is_open and not client.is_new:
            leaves = self._observation(client, message)
            client.is_open = False
            if not isinstance(message.get("truncated", False), bool):
                raise UnreadableMessage(
                    f"truncated: got {message['truncated']!r:.40}, expected true or false."
                )
            if not client.is_cut:  # If it is, the episode never began for the run; the next one begins.
                self._put_step(client, LAST, 1.0 if message.get("truncated") else 0.0, leaves)
        else:
            raise UnreadableMessage(
                f"message: got {_short(message)}, expected start_episode, then get_action, then log_reward "
                "and get_action or end_episode."
            )

    def _put_step(
        self, client: _ExternalClient, kind: int, discount: float, observation: list[np.ndarray]
    ) -> None:
        reward = 0.0 if kind == FIRST else client.reward
        if kind == FIRST:
            self._cut[client.env] = client.has_acted
        self._rewards[client.env] = reward
        leaves = [np.int64(kind), np.float32(reward), np.float32(discount), *observation]
        self._put(np.array([client.env]), [np.asarray(leaf)[None] for leaf in leaves])

    def _observation(self, client: _ExternalClient, message: dict[str, Any]) -> list[np.ndarray]:
        """The leaves of a message's observation: numbers in nested lists, or the bytes in base64."""
        if "observation" not in message:
            raise UnreadableMessage(f"message: got {_short(message)} without an observation, expected one.")
        value, spec = message["observation"], self.spec.observations
        try:
            # The check reports a missing part.
            with contextlib.suppress(KeyError, IndexError, TypeError):
                parts = [_decoded(specs.pick(value, path), leaf) for path, leaf in specs.leaves(spec)]
                value = self._check.fields["observation"].build(parts)
            arrays = self._check.fields["observation"].gather([value], [client.env])
        except (EnvironmentFault, ValueError, OverflowError) as error:
            raise UnreadableMessage(f"observation: {error}") from None
        return [array[0] for array in arrays]

    def _refuse(self, client: _ExternalClient, error: Exception) -> None:
        text = self._refuse_message(error)
        client.send(type="error", message=text)
        if client in self._clients:
            self._end(client)

    def _end(self, client: _ExternalClient) -> None:
        """Ends a connection. The env of the client becomes vacant."""
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        if client.env >= 0:
            self._vacant[client.env] = True

    def close(self) -> None:
        super().close()
        for client in list(self._clients):
            self._end(client)
        if self._listener is not None:
            self._stop_listening()
        self._selector.close()


def read_token(path: str) -> str:
    """The token in a file of mode 0600; creates the file if it does not exist.

    Raises:
      ValueError: Other users may read the file, or it is empty.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    token = read_secret(path, secrets.token_hex(16).encode() + b"\n").decode().strip()
    if not token:
        raise ValueError(
            f"{path}: got an empty file, expected a token. Delete it; the next start creates one."
        )
    return token


def _decoded(part: Any, leaf: specs.Array) -> np.ndarray:
    """The array of nested lists, or of bytes in base64. Whole numbers may be written as 3.0."""
    if isinstance(part, str):
        data = base64.b64decode(part, validate=True)
        return np.frombuffer(data, leaf.dtype.newbyteorder("<")).reshape(leaf.shape).astype(leaf.dtype)
    array = np.asarray(part)
    if array.dtype.kind == "f" != leaf.dtype.kind and np.isfinite(array).all():
        converted = array.astype(leaf.dtype)
        return converted if (converted == array).all() else array
    return array


def _short(message: dict[str, Any]) -> str:
    """A message for errors, without what may be secret or long."""
    kind = message.get("type")  # of any other type, it may be a nest that is too deep for `str`
    return f"type {kind[:40] if isinstance(kind, str) else type(kind).__name__!r}"
