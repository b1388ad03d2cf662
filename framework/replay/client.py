"""`Client`: the way into a replay server that fits where the caller runs."""

from __future__ import annotations

from typing import Any

from framework.replay.remote.connection import DEFAULT_RECONNECT_TIMEOUT
from framework.replay.local.client import EmbeddedClient
from framework.replay.remote.client import ServedClient
from framework.replay.server.server import Server, server_here
from framework.replay.tables.table import Table
from launch.rpc import sockets


class _ClientType(type):
    """Lets ``isinstance(x, Client)`` hold for every way in."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (EmbeddedClient, ServedClient))


class Client(metaclass=_ClientType):
    """``Client(address)`` is an `EmbeddedClient` if the server is in this process, else a `ServedClient`.

    Args:
      server_address: ``"localhost:8000"``, ``"tcp://host:port"`` or ``"ipc://path"``.
      curve: the server's keys, if it has any (needed to reach other machines).
      local: None uses shared memory and direct calls where possible; False never does.
      reconnect_timeout: seconds for which calls wait for a server that is not there.
    """

    def __new__(  # type: ignore[misc]
        cls,
        server_address: str,
        *,
        curve: sockets.CurveKeys | None = None,
        local: bool | None = None,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT,
    ) -> EmbeddedClient | ServedClient:
        address = parse_address(server_address)
        server = None if local is False else server_here(address)
        if server is not None:
            return server.localhost_client()
        return ServedClient(address, curve, local, reconnect_timeout)


def parse_address(address: str) -> str:
    """``localhost:8000`` and the like as an address with its transport; ValueError if it is none."""
    if not isinstance(address, str) or not address:
        raise ValueError(
            f"server_address: got {address!r}, expected 'host:port', 'tcp://host:port' or 'ipc://path'"
        )
    if "://" not in address:
        address = f"tcp://{address}"
    if address.startswith("tcp://"):
        host, _, port = address[len("tcp://") :].rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"server_address: got {address!r}, expected 'host:port', as in 'localhost:8000'")
        if host == "localhost":
            address = f"tcp://127.0.0.1:{port}"
    return address


def serve_node(
    tables: list[Table],
    *,
    embedded: bool,
    concurrent: bool,
    address: str | None,
    curve: sockets.CurveKeys | None,
    checkpointer: Any = None,
) -> Server:
    """How ``launch.ReplayNode`` starts a server; see `Server`."""
    if embedded:
        return Server(tables, checkpointer=checkpointer, embedded=True, concurrent=concurrent)
    return Server(tables, checkpointer=checkpointer, address=address, curve=curve)


def connect_node(
    server_or_address: Any, curve: sockets.CurveKeys | None = None
) -> EmbeddedClient | ServedClient:
    """How a handle of a ``launch.ReplayNode`` makes a client; a stop of the program interrupts it."""
    import launch

    client: EmbeddedClient | ServedClient
    if isinstance(server_or_address, Server):
        client = server_or_address.localhost_client()
    else:
        client = Client(server_or_address, curve=curve)  # type: ignore[assignment]
    launch.register_stop_handler(client.interrupt)
    return client
