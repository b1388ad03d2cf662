"""The clients of replay, with Reverb's methods: of tables in this process, of a server, and `Client`."""

from __future__ import annotations

import abc
from typing import Any

from framework.replay import addresses
from framework.replay.local.client import LocalClient, client_here
from framework.replay.remote.channel import RECONNECT_TIMEOUT_S
from framework.replay.remote.client import RemoteClient
from framework.replay.reverb_api.client import ReverbApi
from framework.replay.reverb_api.trajectory_writer import Writer as Writer
from launch.rpc import sockets


class EmbeddedClient(ReverbApi, LocalClient):
    """A client of tables in this process; see `LocalClient`."""


class ServedClient(ReverbApi, RemoteClient):  # type: ignore[misc]  # The address is read only.
    """A client of a server in another process; see `RemoteClient`."""


class Client(abc.ABC):  # noqa: B024
    """`Client(address)` is an `EmbeddedClient` if the server is in this process, else a `ServedClient`."""

    def __new__(  # type: ignore[misc]
        cls,
        server_address: str,
        *,
        curve: sockets.CurveKeys | None = None,
        local: bool | None = None,
        reconnect_timeout: float = RECONNECT_TIMEOUT_S,
    ) -> EmbeddedClient | ServedClient:
        """Connects to a server.

        Args:
          server_address: `"localhost:8000"`, `"tcp://host:port"` or `"ipc://path"`.
          curve: the server's keys, if it has any. Without keys, only servers of this user on this machine can
            be reached: see `framework.replay.addresses`.
          local: None uses shared memory and direct calls where possible; False never does.
          reconnect_timeout: seconds for which calls wait for a server that does not answer.

        Raises:
          ValueError: `server_address` is not an address, or names another host without keys.
        """
        address = addresses.resolve(server_address, curve)
        here: Any = None if local is False else client_here(address)
        return here or ServedClient(address, curve, local, reconnect_timeout)


Client.register(EmbeddedClient)
Client.register(ServedClient)
