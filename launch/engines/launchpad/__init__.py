"""Runs the graph as a real `launchpad.Program`, each node in its own process (`local_mp`).

The engine `launchpad_mt` runs it as threads of one process (`local_mt`). Requires dm-launchpad (Python 3.10).
Launchpad creates the processes: every node is an `lp.PyNode`. The nodes are supervised and communicate as on
the engine `processes` (`launch.engines.supervised.job`). Launchpad does not restart nodes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from launch import directories, pickling, platforms
from launch.engines.base import Unit, plan
from launch.engines.launchpad import driver
from launch.engines.options import Options, Resources, make_options
from launch.engines.supervised.job import SupervisedJob
from launch.engines.supervised.process import Process, ProcessHost, Report
from launch.errors import LaunchError
from launch.program import Program
from launch.running import begin

_TAIL = 4000  # bytes of Launchpad's log in an error
_END_S = 10.0  # seconds to wait for Launchpad's end


class LaunchpadJob(SupervisedJob):
    """A program of processes, or of threads of one process, that Launchpad creates.

    Raises:
      LaunchError: Launchpad is not installed.
      ValueError: A group has restarts.
    """

    def __init__(self, program: Program, engine: str, options: Options) -> None:
        _check(options)
        super().__init__(program, engine, options)

    def _open(self) -> tuple[str, ProcessHost]:
        folder = directories.make_private_directory()
        self._options.at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        launch_type = "local_mp" if self._engine == "launchpad" else "local_mt"
        name = self._program.name
        return folder, LaunchpadHost(name, launch_type, folder, self._units, self._options, self._report)


def _check(options: Options) -> None:
    """Raises an error if Launchpad is not installed, or cannot do what is asked."""
    if importlib.util.find_spec("launchpad") is None:
        raise LaunchError("The engine launchpad requires dm-launchpad (Python 3.10). See docs/deepmind.md.")
    for name, given in (("restarts", options.restarts), ("min_nodes", options.min_nodes)):
        if any(given.values()):
            raise ValueError(f"{name}: got {dict(given)}, expected none: Launchpad does not restart nodes.")


class NodeHost(ProcessHost):
    """Waits for the nodes, which Launchpad starts.

    Each node connects to a socket of this host, sends its label and process id, and gets its end of its
    channel to the supervisor. It keeps the connection until its end, which it also reports.
    """

    def __init__(self, folder: str, units: list[Unit], report: Report) -> None:
        self._report = report
        self._numbers: list[int] = []
        self._lines: dict[str, Any] = {unit.label: queue.SimpleQueue() for unit in units}
        self._pids: dict[int, int] = {}  # of the live nodes
        self._dead: set[int] = set()  # nodes that never begin
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{folder}/launchpad")
        self._listener.listen(len(units))

    def fork(self, process: Process, line: socket.socket, resources: Resources) -> None:
        self._numbers.append(process.number)
        self._lines[process.unit.label].put((process.number, line))  # Launchpad starts the process by itself.

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
                if number in self._dead:
                    return
                socket.send_fds(node, [b"\0"], [line.fileno()])
            self._pids[number] = said["pid"]
            self._report({"forked": number, "pid": said["pid"]})
            end = node.recv(1)
        del self._pids[number]
        self._report({"exit": number, "code": end[0] if end else -9})


class LaunchpadHost(NodeHost):
    """Starts a process that calls `lp.launch` (`launch.engines.launchpad.driver`)."""

    def __init__(
        self, name: str, launch_type: str, folder: str, units: list[Unit], options: Options, report: Report
    ) -> None:
        super().__init__(folder, units, report)
        self._launch_type = launch_type
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
        """Waits until Launchpad ends, then reports the end of every node that did not do so itself."""
        code = self._driver.wait()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `_listen`
        self._threads[0].join()
        with open(self._log, "rb") as file:
            tail = file.read()[-_TAIL:].decode(errors="replace")
        for number in self._numbers:
            reason = f"Launchpad ended with exit code {code}: {tail}"
            self._report({"exit": number, "code": -9, "reason": reason})


class SupervisorHost(NodeHost):
    """The host of a program whose supervisor is itself a node of Launchpad's; see `to_launchpad`."""

    def __init__(self, folder: str, units: list[Unit], report: Report, has_processes: bool) -> None:
        super().__init__(folder, units, report)
        self._has_processes = has_processes
        self._thread = threading.Thread(target=self._listen, name="launchpad-listen", daemon=True)
        self._thread.start()

    def kill(self, number: int) -> None:
        """Kills a node's process. A thread cannot be killed: Launchpad ends its process later."""
        pid = self._pids.get(number)
        if pid is not None and self._has_processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        self._dead.add(number)
        self._report({"exit": number, "code": -9, "reason": None})

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `_listen`
        if self._has_processes:
            for number in list(self._pids):
                self.kill(number)
            self._thread.join()
        self._listener.close()


class SupervisorJob(LaunchpadJob):
    """A program that Launchpad runs, in the node that supervises it.

    Args:
      folder: the folder of the nodes' sockets, which is removed at the end.
    """

    def __init__(self, folder: str, program: Program, engine: str, options: Options) -> None:
        self._folder = folder
        super().__init__(program, engine, options)

    def _open(self) -> tuple[str, ProcessHost]:
        self._options.at_end.callback(shutil.rmtree, self._folder, ignore_errors=True)
        has_processes = self._engine == "launchpad"
        return self._folder, SupervisorHost(self._folder, self._units, self._report, has_processes)


def to_launchpad(
    program: Program,
    *,
    directory: str | os.PathLike[str] | None = None,
    resources: Mapping[str, Resources | Mapping[str, Any]] | None = None,
    stop_timeout: float = 10.0,
    heartbeat_timeout: float | None = 60.0,
) -> Any:
    """Returns a `launchpad.Program` for a script that calls `launchpad.launch`, with Launchpad's flags.

    ```python
    launchpad.launch(to_launchpad(program))    # python script.py --lp_launch_type=local_mp
    ```

    It has the program's groups, of an `lp.PyNode` for each process, and a group `supervisor`, whose node
    starts, stops and closes the others as on the engine `launchpad`. An error of a node is the supervisor's.
    It runs once, on one machine, as processes or threads. What nodes print goes to Launchpad's terminals.

    Args:
      program: the program. It is pickled, its callbacks too.
      directory: see `launch.launch`, as the other arguments.

    Raises:
      LaunchError: Launchpad is not installed.
      ValueError: The program has groups with `min_nodes`, or an argument does not fit.
      TypeError: The program cannot be pickled.
    """
    arguments: dict[str, Any] = {"stop_timeout": stop_timeout, "heartbeat_timeout": heartbeat_timeout}
    arguments["directory"] = None if directory is None else os.path.abspath(os.fspath(directory))
    options = make_options(program, resources, None, **arguments)
    _check(options)
    import launchpad as lp

    try:
        code = pickling.dumps(program)
    except Exception as error:
        raise TypeError(f"program {program.name!r}: got {error}, expected what can be pickled.") from error
    folder = directories.make_private_directory()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # It may not have been launched.
    made = lp.Program(program.name)
    with made.group("supervisor"):
        made.add_node(lp.PyNode(supervise, code, folder, resources, arguments))
    for unit in plan(program, "launchpad", options)[1]:
        environment = options.resources.get(unit.group, Resources()).environment()
        with made.group(unit.group):
            made.add_node(lp.PyNode(driver.run_node, f"{folder}/launchpad", unit.label, None, environment))
    return made


def supervise(code: bytes, folder: str, resources: Any, arguments: dict[str, Any]) -> None:
    """The function of the node `supervisor`: returns or raises when the program is over."""
    import launchpad as lp

    program = pickle.loads(code)
    is_thread = lp.context.get_context().launch_type.value.endswith("mt")
    make_job = functools.partial(SupervisorJob, folder)
    options = make_options(program, resources, None, **arguments)
    job = begin(program, "launchpad_mt" if is_thread else "launchpad", make_job, options)

    def stop() -> None:  # On a thread, because the interrupted one may hold a lock that the stop needs.
        threading.Thread(target=job.stop, daemon=True).start()

    lp.register_stop_handler(stop)
    try:
        with job:
            job.wait()
    finally:
        lp.unregister_stop_handler(stop)
