"""The replay nodes of a program: `launch` knows nodes that are servers, and nothing of replay."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from launch import context
from launch.errors import message_of
from launch.nodes import ServerNode

_LOG = logging.getLogger("launch")  # as other messages of nodes


def _connect(backend: str, server_or_address: Any, curve: Any) -> Any:
    """Returns a client of a server in this process, or of one at an address."""
    return importlib.import_module(backend).connect_node(server_or_address, curve)


class ReplayNode(ServerNode):
    """A replay server; its handle becomes a replay client.

    Args:
      tables_fn: creates the tables in the node's process.
      checkpointer_fn: creates the checkpointer, or None.
      backend: name of a module with the functions `serve_node` and `connect_node`, such as
        `framework.replay.dm_reverb`.
    """

    def __init__(
        self,
        tables_fn: Callable[[], Any],
        *,
        checkpointer_fn: Callable[[], Any] | None = None,
        backend: str = "framework.replay",
    ) -> None:
        super().__init__(tables_fn)
        self.checkpointer_fn = checkpointer_fn
        self._backend = backend
        self.client_options = functools.partial(_connect, backend)

    def serve(self, *, embedded: bool, concurrent: bool, address: str | None, curve: Any) -> Any:
        """Returns the server with the tables of `tables_fn`."""
        checkpointer = self.checkpointer_fn() if self.checkpointer_fn is not None else None
        return importlib.import_module(self._backend).serve_node(
            self.call(),
            embedded=embedded,
            concurrent=concurrent,
            address=address,
            curve=curve,
            checkpointer=checkpointer,
        )


class ReverbNode(ReplayNode):
    """A `ReplayNode` with the arguments of Launchpad's.

    Args:
      priority_tables_fn: creates the tables in the node's process.
      checkpoint_ctor: creates the checkpointer, or None.
      checkpoint_time_delta_minutes: minutes between two checkpoints; None writes no periodic checkpoints. One
        that fails is logged. On the serial engine it has no effect, because nothing there depends on a clock.
    """

    def __init__(
        self,
        priority_tables_fn: Callable[[], Any],
        checkpoint_ctor: Callable[[], Any] | None = None,
        checkpoint_time_delta_minutes: float | None = None,
    ) -> None:
        if checkpoint_time_delta_minutes is not None and checkpoint_time_delta_minutes <= 0:
            raise ValueError(
                f"checkpoint_time_delta_minutes: got {checkpoint_time_delta_minutes}, expected minutes > 0."
            )
        super().__init__(priority_tables_fn, checkpointer_fn=checkpoint_ctor)
        self._delta_minutes = checkpoint_time_delta_minutes

    def serve(self, *, embedded: bool, concurrent: bool, address: str | None, curve: Any) -> Any:
        server = super().serve(embedded=embedded, concurrent=concurrent, address=address, curve=curve)
        if self._delta_minutes is not None and concurrent:
            stopped, seconds = context.stop_event(), 60 * self._delta_minutes
            label = context.get_node_context().label

            def checkpoint() -> None:
                client = self.client_options(server if embedded else address, curve)
                while not stopped.wait(seconds):
                    try:
                        client.checkpoint()
                    except Exception as error:  # A full disk, for example: there may be room again later.
                        if stopped.is_set():  # The server was closed.
                            return
                        text = f"{type(error).__name__}: {message_of(error)}"
                        _LOG.error("%s: no checkpoint; the next try is in %g s: %s", label, seconds, text)

            threading.Thread(target=checkpoint, name="replay-checkpoints", daemon=True).start()
        return server
