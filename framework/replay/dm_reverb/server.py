"""The dm-reverb server, and how `launch.ReplayNode` starts and finds it."""

from __future__ import annotations

import os
import pathlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import reverb

import launch
from framework.replay.checkpointers import DefaultCheckpointer
from framework.replay.dm_reverb import convert
from framework.replay.dm_reverb.client import DmReverbClient
from framework.replay.dm_reverb.writer import START_S
from framework.replay.errors import ReverbError, ServerClosed

_PRIVATE = "dm-reverb"  # the folder of dm-reverb's checkpoints in the given folder


class DmReverbServer:
    """A `reverb.Server` of `Table`s or `reverb.Table`s.

    Args:
      tables: at least one, of different names.
      port: port on all interfaces (dm-reverb offers no other choice); None takes a free one.
      checkpointer: a `reverb.checkpointers.CheckpointerBase`, a folder, or a checkpointer of
        `framework.replay`. dm-reverb gets a subfolder of the folder, because it deletes other files in the
        folder that it writes to.
      concurrent: whether more than one thread uses the clients of this process.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        port: int | None = None,
        checkpointer: Any = None,
        *,
        concurrent: bool = True,
    ) -> None:
        native = native_tables(tables)
        self.concurrent = concurrent
        self.tables = {table.name: table for table in native}
        self.native = reverb.Server(native, port=port, checkpointer=native_checkpointer(checkpointer))
        self.port: int = self.native.port
        self._clients: weakref.WeakSet[DmReverbClient] = weakref.WeakSet()
        self._stopped = threading.Event()

    def localhost_client(self) -> DmReverbClient:
        """Returns a client of this server."""
        client = DmReverbClient(f"localhost:{self.port}", concurrent=self.concurrent)
        self._clients.add(client)
        return client

    def stop(self) -> None:
        """Stops the server. Waiting calls of its clients in this process raise `ServerClosed`."""
        if not self._stopped.is_set():
            self._stopped.set()
            for client in list(self._clients):
                client.interrupt(close=True)
            self.native.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server is stopped, at most `timeout` seconds; returns whether it is."""
        return self._stopped.wait(timeout)

    def __enter__(self) -> DmReverbServer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()


def native_tables(tables: Sequence[Any]) -> list[Any]:
    """Returns the `reverb.Table`s for `tables`; a hook for an `lp.ReverbNode`."""
    return [convert.to_native_table(table) for table in tables]


def native_checkpointer(checkpointer: Any) -> Any:
    """Returns dm-reverb's checkpointer for the `checkpointer` of `DmReverbServer`."""
    if checkpointer is None or isinstance(checkpointer, reverb.checkpointers.CheckpointerBase):
        return checkpointer
    folder, fallback = checkpointer, None
    if isinstance(checkpointer, DefaultCheckpointer):
        folder, fallback = checkpointer.path, checkpointer.fallback_checkpoint_path
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(
            f"checkpointer: got {checkpointer!r}, expected a folder, a DefaultCheckpointer or one of "
            "dm-reverb's checkpointers."
        )
    private = pathlib.Path(folder) / _PRIVATE
    private.mkdir(parents=True, exist_ok=True)
    return reverb.checkpointers.DefaultCheckpointer(
        str(private), fallback_checkpoint_path=None if fallback is None else os.fspath(fallback)
    )


# Functions that launch.ReplayNode calls.


def serve_node(
    tables: Sequence[Any],
    *,
    embedded: bool,
    concurrent: bool,
    address: str | None,
    curve: Any,
    checkpointer: Any = None,
) -> DmReverbServer:
    """Starts a server for `launch.ReplayNode`.

    dm-reverb serves on TCP ports only. The port for an address `ipc://path` is written to `path.port`, where
    `connect_node` reads it; a restarted server takes the same port. `curve` is not used.
    """
    port, notice = None, None
    if address is not None and address.startswith("tcp://"):
        port = int(address.rpartition(":")[2])
    elif address is not None:
        notice = _notice(address)
        port = int(notice.read_text()) if notice.exists() else None
    server = DmReverbServer(tables, port, checkpointer, concurrent=concurrent)
    if notice is not None:
        beside = notice.with_suffix(".new")
        beside.write_text(str(server.port))
        beside.rename(notice)
    return server


def connect_node(server_or_address: Any, curve: Any = None) -> DmReverbClient:
    """Creates a client for a handle of a `launch.ReplayNode`. A stop of the program interrupts the client."""
    if isinstance(server_or_address, DmReverbServer):
        client = server_or_address.localhost_client()
    elif str(server_or_address).startswith("ipc://"):
        client = DmReverbClient(f"localhost:{_wait_for_port(server_or_address)}")
    else:
        client = DmReverbClient(str(server_or_address).removeprefix("tcp://"))
    launch.register_stop_handler(client.interrupt)
    return client


def _notice(address: str) -> pathlib.Path:
    return pathlib.Path(address.removeprefix("ipc://") + ".port")


def _wait_for_port(address: str) -> int:
    """Waits for the server of `ipc://path` and returns its port."""
    notice, stopped = _notice(address), launch.stop_event()
    deadline = time.monotonic() + START_S
    while not notice.exists():
        if stopped.wait(0.02):
            raise ServerClosed("The program stops before its replay server has started.")
        if time.monotonic() > deadline:
            raise ReverbError(f"The replay server did not start within {START_S:g} s.")
    return int(notice.read_text())
