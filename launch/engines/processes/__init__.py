"""One process per node on this machine, under a supervisor.

The launcher starts a fork server (`launch.engines.processes.fork_server`), which forks the nodes. They
communicate through `ipc://` sockets in a private directory. `launch.engines.supervised.job` supervises them.
"""

from __future__ import annotations

import sys

from launch.engines.base import Options
from launch.engines.processes.folders import Folders
from launch.engines.processes.fork_client import ForkServer
from launch.engines.supervised.job import SupervisedJob
from launch.engines.supervised.process import Host
from launch.engines.supervised.runtime import Entry
from launch.program import Program


def start(program: Program, options: Options) -> ProcessesJob:
    """Starts the program's processes."""
    return ProcessesJob(program, options, "processes")


class ProcessesJob(SupervisedJob):
    """A program of processes on this machine."""

    def _open(self) -> tuple[dict[int, Entry], Host]:
        self._folders = Folders(self._job)
        try:
            preload = self._options.preload
            if preload is None:
                preload = ["torch"] if "torch" in sys.modules else []
            folders, grace = self._folders, self._options.stop_timeout
            server = ForkServer(preload, folders.paths, folders.locks, grace, self._report)
            return self._find_entries(self._folders.sockets), server
        except BaseException:
            self._folders.remove()
            raise

    def _clean_up(self) -> None:
        self._folders.remove()
