"""A process per node on this machine, under a supervisor.

The launcher starts a fork server (`launch.engines._fork_server`), which forks the nodes. They meet at
``ipc://`` sockets in a private directory; see `launch.engines._supervisor` for how they are looked after.
"""

from __future__ import annotations

import socket
import sys

from launch.engines import _fork_server
from launch.engines._fork_client import ForkServer
from launch.engines._node_process import Entry
from launch.engines._process import Host
from launch.engines._supervisor import SupervisedJob
from launch.engines.base import Options
from launch.nodes import ReplayNode
from launch.program import Program
from launch.rpc import sockets


def start(program: Program, options: Options) -> ProcessesJob:
    """Starts the program's processes."""
    return ProcessesJob(program, options)


class ProcessesJob(SupervisedJob):
    """A program of processes on this machine."""

    engine = "processes"

    def _open(self) -> tuple[dict[int, Entry], Host]:
        self._sockets = sockets.make_private_directory()
        try:
            entries = {
                leaf.node.node_id: self._entry(
                    leaf,
                    f"ipc://{self._sockets}/{leaf.node.node_id}",
                    _free_port() if isinstance(leaf.node, ReplayNode) else None,
                )
                for unit in self._units
                for leaf in unit.leaves
            }
            preload = self._options.preload
            if preload is None:
                preload = ["torch"] if "torch" in sys.modules else []
            return entries, ForkServer(preload, self._sockets, self._job)
        except BaseException:
            sockets.remove_private_directory(self._sockets)
            raise

    def _clean_up(self) -> None:
        _fork_server.clean_up(self._sockets, self._job)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
