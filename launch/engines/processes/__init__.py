"""One process per node on this machine, under a supervisor.

The launcher starts a fork server (`launch.engines.processes.fork_server`), which forks the nodes, or spawns
them where forking is not safe. They communicate through `ipc://` sockets in a private directory.
`launch.engines.supervised.job` supervises them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from launch import directories
from launch.context import shared_memory_path
from launch.engines.options import Options, Resources
from launch.engines.processes.fork_server import command, kill_group
from launch.engines.supervised.channel import Channel
from launch.engines.supervised.job import SupervisedJob
from launch.engines.supervised.process import Process, ProcessHost, Report
from launch.texts import how_it_ended

_CLOSE_TIMEOUT_S = 10.0  # seconds for the fork server to end


class ProcessesJob(SupervisedJob):
    """A program of processes on this machine."""

    def _open(self) -> tuple[str, ProcessHost]:
        directories.sweep()
        paths = [directories.make_private_directory(f"lp-{self._job}-"), shared_memory_path(self._job)]
        files = [*self._options.files]  # The kernel frees what is locked with the last process.
        for path in paths:
            self._options.at_end.callback(shutil.rmtree, path, ignore_errors=True)
            files.append(directories.share_directory(path))
            self._options.at_end.callback(os.close, files[-1])
        return paths[0], ForkServer(paths, files, self._options, self._report)


def start_interpreter(line: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts the process of a fork server.

    Args:
      line: descriptor of its channel.
      inherited: other descriptors that it and the nodes have.
    """
    return subprocess.Popen(
        command("main", line),
        stdin=subprocess.DEVNULL,
        pass_fds=[line, *inherited],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


class ForkServer(ProcessHost):
    """A running fork server; see `launch.engines.processes.fork_server`.

    Args:
      folders: the run's, which it removes if the launcher dies.
      files: descriptors that it and the nodes inherit.
      options: of the run.
      report: see `launch.engines.supervised.process.Report`.
    """

    def __init__(
        self, folders: Sequence[str], files: Sequence[int], options: Options, report: Report
    ) -> None:
        ours, theirs = socket.socketpair()
        self._line = Channel(ours)
        self._grace = options.time_to_end  # if the launcher dies
        self._report = report
        self._closed = False
        self._pids: dict[int, int] = {}  # of the live nodes, by number
        self._given_up = ""  # why this process killed it
        self._sent: dict[int, socket.socket] = {}  # the nodes' ends of their channels, by number
        self._reader = threading.Thread(target=self._read, name="launch-fork-server", daemon=True)
        self._process = start_interpreter(theirs.fileno(), files)
        options.at_end.callback(self.close)  # Ctrl-C may interrupt the launch from here on.
        theirs.close()
        preload = options.preload
        if preload is None:
            preload = ["torch"] if "torch" in sys.modules else []
        self._line.send({"preload": preload, "folders": folders})
        self._reader.start()

    def fork(self, process: Process, line: socket.socket, resources: Resources) -> None:
        grace, env = self._grace(process.unit.group), resources.environment()
        request = {"fork": process.number, "log": process.log, "grace": grace, "env": env}
        # Closed only when it has arrived: macOS loses sockets whose only reference is on its way.
        self._sent[process.number] = line
        with contextlib.suppress(OSError):  # it has died, which `_read` reports
            self._line.send(request, [line.fileno()])

    def note_worker(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has died
            self._line.send({"worker": number})

    def kill(self, number: int) -> None:
        """Kills a process and the processes that it started."""
        try:
            self._line.send({"kill": number})
        except OSError:  # it has died
            self._kill_group(number)

    def give_up(self, label: str) -> None:
        """Kills the fork server, which does not report the end of a node. It may have been stopped."""
        self._given_up = f"did not report the end of node {label!r}, and was killed"
        self._process.kill()

    def _kill_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, KeyError):  # it has ended, or never began
            kill_group(self._pids[number])

    def close(self) -> None:
        """Asks the fork server to end all nodes, clean up and exit; kills it if that takes too long."""
        if self._closed:
            return
        self._closed = True
        self._line.end()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader.ident is not None:  # It was started.
            self._reader.join()
        for number in self._pids:
            self._kill_group(number)
        for line in self._sent.values():
            line.close()
        self._line.close()

    def _read(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message = self._line.receive()
                if "forked" in message:
                    self._sent.pop(message["forked"]).close()
                    self._pids[message["forked"]] = message["pid"]
                elif "exit" in message:
                    self._pids.pop(message["exit"], None)
                self._report(message)
        if not self._closed:
            how = how_it_ended(self._process.wait())
            text = (
                f"The fork server, which starts the nodes, {self._given_up or how}. The program was stopped. "
            )
            file = f"Messages of the fork server, which runs {sys.executable}, are on stderr."
            self._report({"lost": text + file})
