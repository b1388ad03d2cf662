"""The hooks by which a `launch.ReplayNode` serves tables and connects to them."""

from __future__ import annotations

from typing import Any

import launch
from framework.replay.client import Client
from framework.replay.local.client import EmbeddedClient
from framework.replay.remote.client import ServedClient
from framework.replay.server.server import Server
from framework.replay.tables.table import Table
from launch.rpc import sockets


def serve_node(
    tables: list[Table],
    *,
    embedded: bool,
    concurrent: bool,
    address: str | None,
    curve: sockets.CurveKeys | None,
    checkpointer: Any = None,
) -> Server:
    """How `launch.ReplayNode` starts a server; see `Server`."""
    if embedded:
        return Server(tables, checkpointer=checkpointer, embedded=True, concurrent=concurrent)
    return Server(tables, checkpointer=checkpointer, address=address, curve=curve)


def connect_node(
    server_or_address: Any, curve: sockets.CurveKeys | None = None
) -> EmbeddedClient | ServedClient:
    """How a handle of a `launch.ReplayNode` makes a client; a stop of the program interrupts it."""
    client: EmbeddedClient | ServedClient
    if isinstance(server_or_address, Server):
        client = server_or_address.localhost_client()
    else:
        client = Client(server_or_address, curve=curve)
    launch.register_stop_handler(client.interrupt)
    return client
