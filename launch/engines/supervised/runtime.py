"""A process's view of a program whose nodes are in other processes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.context import Runtime, entered
from launch.engines.base import unknown_node, unserved
from launch.errors import ProgramStopped
from launch.handles import NodeClient
from launch.rpc.client import Connection
from launch.rpc.sockets import CurveKeys


@dataclass(frozen=True)
class NodeEntry:
    """How to reach a node.

    Attributes:
      serves: as in `launch.nodes.ProgramNode.serves`.
      address: address of the node; None if it is not known yet. The order "addresses" sends it later.
      options: as in `launch.nodes.ProgramNode.client_options`.
    """

    label: str
    description: str
    serves: str | None
    address: str | None
    options: Any


@dataclass(frozen=True)
class ProcessSetup:
    """The launcher's first message to a node's process."""

    unit: bytes  # pickled `Unit`; unpickled, and its code imported, only after the channel is in use
    entries: dict[int, NodeEntry]
    keys: CurveKeys
    heartbeat: float | None
    stop_timeout: float  # seconds that this process has to end
    longest_timeout: float  # the longest of all processes
    seed: int | None = None  # of the global random generators; None: another one in every run
    interface: str = ""  # host name or address on which nodes without a fixed address serve


class RemoteRuntime(Runtime):
    """The runtime of a process that runs some of the program's nodes, or none (the launcher)."""

    def __init__(
        self,
        job: str,
        entries: dict[int, NodeEntry],
        keys: CurveKeys,
        request_stop: Callable[..., None],
        report_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        super().__init__(job, request_stop, report_failure)
        self._entries = entries
        self._keys = keys
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        self._connections: dict[int, Any] = {}  # including replay clients
        self._moved = threading.Condition()

    def client(self, node_id: int) -> Any:
        entry = self._entries.get(node_id)
        if entry is None:
            raise unknown_node(node_id)
        if entry.serves is None:
            raise unserved(entry.label, entry.description)
        if entry.serves == "server":
            self._wait_for_address(node_id)  # before the lock, which other threads may need for their clients
        with self._lock:
            if node_id not in self._clients:
                self._clients[node_id] = self._connect(node_id, entry)
            return self._clients[node_id]

    def _connect(self, node_id: int, entry: NodeEntry) -> Any:
        if entry.serves == "server":
            with entered(self, self.only_context):
                client = entry.options(self._wait_for_address(node_id), self._keys)
            self._connections[node_id] = client
            return client
        options = dict(entry.options)
        timeout = options.pop("call_timeout")
        with self._moved:
            address = self._entries[node_id].address
            connection = Connection(address, self._keys, name=entry.label, stopped=self.stopped, **options)
            self._connections[node_id] = connection
        return NodeClient(node_id, connection.call, connection.submit, timeout)

    def move(self, addresses: dict[int, str | None]) -> None:
        """Sets new addresses of nodes; None means that a node has no address now."""
        with self._moved:
            for node_id, address in addresses.items():
                self._entries[node_id] = dataclasses.replace(self._entries[node_id], address=address)
            clients: list[Any] = [self._connections.get(node_id) for node_id in addresses]
            self._moved.notify_all()
        for client, address in zip(clients, addresses.values(), strict=True):
            if hasattr(client, "move"):  # not every replay back end has it
                client.move(address)

    def begin_stop(self) -> None:
        try:
            super().begin_stop()
        finally:
            with self._moved:
                connections = list(self._connections.values())
                self._moved.notify_all()
            for connection in connections:
                if isinstance(connection, Connection):
                    connection.stop()

    def _wait_for_address(self, node_id: int) -> str:
        """Waits for a node's address and returns it; raises `ProgramStopped` if the program stops first."""
        with self._moved:
            self._moved.wait_for(lambda: self._entries[node_id].address is not None or self.stopped.is_set())
            address = self._entries[node_id].address
        if address is None:
            label = self._entries[node_id].label
            raise ProgramStopped(f"node {label!r} has no address, and the program stops.")
        return address

    def close(self) -> None:
        """Closes every client of this process."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()
