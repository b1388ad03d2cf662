"""Runs the graph as a real `launchpad.Program`, each node in its own process (`local_mp`).

The engine `launchpad_mt` runs it as threads of one process (`local_mt`). Requires dm-launchpad (Python 3.10).
Launchpad creates the processes: every node is an `lp.PyNode`. The nodes are supervised and communicate as on
the engine `processes` (`launch.engines.supervised.job`). Launchpad does not restart nodes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from launch import directories, platforms
from launch.engines.base import Unit
from launch.engines.options import Options, Resources
from launch.engines.supervised.job import SupervisedJob
from launch.engines.supervised.process import Process, ProcessHost, Report
from launch.errors import LaunchError
from launch.program import Program

_TAIL = 4000  # bytes of Launchpad's log in an error
_END_S = 10.0  # seconds to wait for Launchpad's end


class LaunchpadJob(SupervisedJob):
    """A program of processes, or of threads of one process, that Launchpad creates.

    Raises:
      LaunchError: Launchpad is not installed.
      ValueError: A group has restarts.
    """

    def __init__(self, program: Program, engine: str, options: Options) -> None:
        if importlib.util.find_spec("launchpad") is None:
            raise LaunchError(
                "The engine launchpad requires dm-launchpad (Python 3.10). See docs/deepmind.md."
            )
        for name, given in (("restarts", options.restarts), ("min_nodes", options.min_nodes)):
            if any(given.values()):
                raise ValueError(
                    f"{name}: got {dict(given)}, expected none: Launchpad does not restart nodes."
                )
        super().__init__(program, engine, options)

    def _open(self) -> tuple[str, ProcessHost]:
        folder = directories.make_private_directory()
        self._options.at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        launch_type = "local_mp" if self._engine == "launchpad" else "local_mt"
        name = self._program.name
        return folder, LaunchpadHost(name, launch_type, folder, self._units, self._options, self._report)


class LaunchpadHost(ProcessHost):
    """Starts a process that calls `lp.launch` (`launch.engines.launchpad.driver`).

    Each node connects to a socket of this host, sends its label and process id, and gets its end of its
    channel to the supervisor. It keeps the connection until its end, which it also reports.
    """

    def __init__(
        self, name: str, launch_type: str, folder: str, units: list[Unit], options: Options, report: Report
    ) -> None:
        self._launch_type = launch_type
        self._report = report
        self._numbers: list[int] = []
        self._lines: dict[str, Any] = {unit.label: queue.SimpleQueue() for unit in units}
        self._pids: dict[int, int] = {}  # of the live nodes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{folder}/launchpad")
        self._listener.listen(len(units))
        logs = os.path.join(options.directory or folder, "logs")
        os.makedirs(logs, exist_ok=True)
        self._log = os.path.join(logs, "launchpad.log")
        keep_logs = options.directory is not None and launch_type == "local_mp"
        plan = {
            "name": name,
            "launch_type": launch_type,
            "socket": f"{folder}/launchpad",
            "units": [
                [unit.group, unit.label, os.path.join(logs, f"{unit.label}.log") if keep_logs else None]
                for unit in units
            ],
            "environments": {
                unit.group: options.resources.get(unit.group, Resources()).environment() for unit in units
            },
        }
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "LAUNCHPAD_LOGGING_DIR": logs,
        }
        with open(self._log, "wb") as log:
            self._driver = subprocess.Popen(
                [platforms.interpreter(), "-m", "launch.engines.launchpad.driver"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(plan).encode() + b"\n")
        self._driver.stdin.flush()
        self._threads = [
            threading.Thread(target=target, name=f"launchpad-{target.__name__}", daemon=True)
            for target in (self._listen, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def fork(self, process: Process, line: socket.socket, resources: Resources) -> None:
        self._numbers.append(process.number)
        self._lines[process.unit.label].put((process.number, line))  # Launchpad starts the process by itself.

    def kill(self, number: int) -> None:
        """Kills a node's process, or all nodes if they share one or this node has none yet."""
        pid = self._pids.get(number)
        with contextlib.suppress(ProcessLookupError):
            if pid is None or self._launch_type == "local_mt":
                os.killpg(self._driver.pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(_END_S)  # all its nodes have ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()
        for thread in self._threads:
            thread.join()
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._listener.close()

    def _watch(self) -> None:
        """Waits until Launchpad ends, then reports the end of every node that has not reported it."""
        code = self._driver.wait()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `_listen`
        self._threads[0].join()
        with open(self._log, "rb") as file:
            tail = file.read()[-_TAIL:].decode(errors="replace")
        for number in self._numbers:
            reason = f"Launchpad ended with exit code {code}: {tail}"
            self._report({"exit": number, "code": -9, "reason": reason})

    def _listen(self) -> None:
        """Follows each node on a thread of its own; returns when Launchpad and all nodes have ended."""
        followers = []
        with contextlib.suppress(OSError):  # shut down
            while True:
                node, _ = self._listener.accept()
                followers.append(threading.Thread(target=self._follow, args=(node,), daemon=True))
                followers[-1].start()
        for follower in followers:
            follower.join()

    def _follow(self, node: socket.socket) -> None:
        """Gives a node its channel, and reports its start and its end."""
        with node, node.makefile("rb") as file:
            said = json.loads(file.readline())
            number, line = self._lines[said["label"]].get(timeout=_END_S)
            with line:
                socket.send_fds(node, [b"\0"], [line.fileno()])
            self._pids[number] = said["pid"]
            self._report({"forked": number, "pid": said["pid"]})
            end = node.recv(1)
        del self._pids[number]
        self._report({"exit": number, "code": end[0] if end else -9})
