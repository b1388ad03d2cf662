"""Environments of `repertory serve-environment`, which run in other processes, Pythons or hosts.

`environment_server` has the protocol. Each server connects to one of the environments here and offers its
envs. That environment takes as many of them as it still needs.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import zmq

import launch
from framework.environments.base import EnvironmentFault
from framework.environments.remote import environment_server as protocol
from framework.environments.remote.connected import ConnectedEnvironment, require_file
from framework.environments.remote.environment_server import UnreadableMessage
from launch.rpc.sockets import CurveKeys, admit_peers, make_server_socket
from launch.texts import printable


class _ConnectedServer(NamedTuple):
    """A connected server.

    Attributes:
      envs: indices of its envs.
      layout: layout of its time steps.
    """

    envs: np.ndarray
    layout: list[tuple[np.dtype, tuple[int, ...]]]


class RemoteEnvironment(ConnectedEnvironment):
    """B envs of servers that connect to `address`, each stepped with one message for all of its envs.

    Args:
      address: `tcp://INTERFACE:PORT`.
      num_envs: B.
      seed: seed of all envs. None: a different one in every run.
      key: file of the key that servers need; created if it does not exist.
      timeout: seconds that a step may wait for envs to connect and for their answers.

    Raises:
      EnvironmentFault: There are too few envs after `timeout` seconds, or an env raises an error.
    """

    def __init__(
        self,
        address: str,
        num_envs: int = 1,
        seed: int | None = None,
        *,
        key: str = "",
        timeout: float = 300.0,
    ):
        name = f"remote:{address}"
        require_file(name, "key", key, "servers")
        os.makedirs(os.path.dirname(os.path.abspath(key)), exist_ok=True)
        self._keys = CurveKeys.from_file(key)
        self.how_to_connect = (
            "Start servers of them: repertory serve-environment ENVIRONMENT --num-envs N --connect "
            f"HOST:{address.rpartition(':')[2]} --key {key}"
        )
        self._seeds = np.random.SeedSequence(seed)
        self._is_seeded = seed is not None
        self._domain = secrets.token_hex(12).encode()
        self._socket: zmq.Socket | None = None
        self._servers: dict[bytes, _ConnectedServer] = {}
        super().__init__(name, address, num_envs, timeout)

    def _listen(self) -> None:
        self._is_listening = True
        if self._socket is not None:
            admit_peers(self._domain, self._keys)
            return
        self._socket = make_server_socket(
            f"tcp://{self._host}:{self._port}",
            self._keys,
            max_frame_bytes=protocol.MAX_FRAME_BYTES,
            descriptor=self._open_port().detach(),
            domain=self._domain,
        )

    def _stop_listening(self) -> None:
        # unbind() would end the connections, too.
        admit_peers(self._domain, None)
        self._is_listening = False

    def _request(self, actions: Sequence[np.ndarray] | None) -> None:
        for identity, server in list(self._servers.items()):
            if actions is None:
                self._send(identity, "reset")
            else:
                self._send(identity, "step", protocol.to_bytes([leaf[server.envs] for leaf in actions]))

    def _abandon(self) -> None:
        for identity, server in list(self._servers.items()):
            if self._missing[server.envs[0]]:
                self._send(identity, "release")  # It offers its envs again.
                self._forget(identity)

    def _receive(self, timeout: float) -> None:
        assert self._socket is not None
        if not self._socket.poll(int(1000 * timeout)):
            for identity, server in list(self._servers.items()):
                if self._missing[server.envs[0]]:
                    self._send(identity, "ping")  # Fails if the server is gone.
            return
        identity, *frames = self._socket.recv_multipart()
        try:
            kind, content = protocol.unpack(frames[0] if len(frames) == 1 else b"")
            if identity in self._servers:
                self._take_answer(self._servers[identity], kind, content)
            elif kind == "hello":
                self._admit(identity, content)
            else:  # The server was too late.
                self._send(identity, "release")
        except (EnvironmentFault, launch.ProgramStopped):
            raise
        except Exception as error:
            text = self._refuse_message(error)
            self._send(identity, "refuse", text)
            self._forget(identity)

    def _take_answer(self, server: _ConnectedServer, kind: str, content: list) -> None:
        if kind == "fault" and content:
            envs = ", ".join(map(str, server.envs))
            raise EnvironmentFault(f"{self.name}, of envs {envs}: {printable(str(content[0]))}")
        if kind != "timestep" or len(content) != 1 or not self._missing[server.envs[0]]:
            raise UnreadableMessage(f"message: got {kind!r}, expected one timestep for each request.")
        leaves = protocol.from_bytes(content[0], server.layout)
        if leaves[0].min() < 0 or leaves[0].max() > 2:
            raise UnreadableMessage(f"step type: got {leaves[0]}, expected 0, 1 or 2.")
        self._put(server.envs, leaves)

    def _admit(self, identity: bytes, content: list) -> None:
        if len(content) != 3:
            raise UnreadableMessage(f"hello: got {len(content)} fields, expected protocol, envs and spec.")
        number, num_envs, data = content
        if number != protocol.PROTOCOL or type(num_envs) is not int or num_envs < 1:
            raise UnreadableMessage(
                f"hello: got protocol {number!r}, {num_envs!r} envs, expected {protocol.PROTOCOL}, 1 or more."
            )
        spec = self._parse_spec(data)
        if self._spec_data is None:
            self._set_spec(data, spec)
        elif data != self._spec_data:
            raise UnreadableMessage(f"{self.name}: got an environment with {spec}, expected {self.spec}.")
        envs = np.flatnonzero(self._vacant)[:num_envs]
        if not len(envs):
            self._send(identity, "release")
            return
        layout = [(dtype, (len(envs), *shape)) for dtype, shape in self._layout]
        self._servers[identity] = _ConnectedServer(envs, layout)
        self._vacant[envs] = False
        if not np.count_nonzero(self._vacant):
            self._stop_listening()  # The server offers the rest of its envs next.
        seed = int(self._seeds.spawn(1)[0].generate_state(1)[0]) if self._is_seeded else None
        self._send(identity, "take", len(envs), seed)
        if self._columns is not None:  # In the middle of a step.
            self._send(identity, "reset")

    def _send(self, identity: bytes, kind: str, *content: object) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([identity, protocol.pack(kind, *content)], zmq.NOBLOCK)
        except zmq.ZMQError:  # It is gone.
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        server = self._servers.pop(identity, None)
        if server is not None:
            self._vacant[server.envs] = True
            self._missing[server.envs] = True  # Even if it has answered: a newcomer answers its own reset.

    def close(self) -> None:
        super().close()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
