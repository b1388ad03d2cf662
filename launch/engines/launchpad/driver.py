"""The process that calls `lp.launch`.

Launchpad takes over the signals, flags and exit of its process, and kills it when a node is slow to end.
Therefore it does not run in the user's process.

The first line of standard input describes the program. The end of the input means that the user's process has
died; then this process kills all nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any

from launch.engines.supervised import node_process
from launch.engines.supervised.channel import Channel
from launch.errors import LaunchError

_CONNECT_S = 300.0  # for the launcher to start, which may import TensorFlow
_LOOK_S = 0.05  # between two tries


def run_node(path: str, label: str, log: str | None, environment: dict[str, str] | None = None) -> None:
    """The function of an `lp.PyNode`: runs one node.

    Args:
      path: socket of the launcher.
      label: label of the node.
      log: file for what this process prints, or None.
      environment: variables of this process where Launchpad has set no others; None for a thread.
    """
    node_process.redirect_output(log)
    for name, value in (environment or {}).items():
        os.environ.setdefault(name, value)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        if not _connect(launcher, path):
            return
        launcher.sendall(json.dumps({"label": label, "pid": os.getpid()}).encode() + b"\n")
        _, descriptors, _, _ = socket.recv_fds(launcher, 1, 1)
        if not descriptors:  # The program has stopped.
            return
        code = node_process.run(Channel(socket.socket(fileno=descriptors[0])))
        node_process.flush_output()
        launcher.sendall(bytes([code]))


def _connect(launcher: socket.socket, path: str) -> bool:
    """Waits for the launcher, which may start after this node; returns whether the program goes on."""
    import launchpad as lp

    end = time.monotonic() + _CONNECT_S
    while os.path.isdir(os.path.dirname(path)):  # It is removed when the program is over.
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            launcher.connect(path)
            return True
        if time.monotonic() > end:
            raise LaunchError(f"supervisor: got no answer in {_CONNECT_S:g} s, expected one. See its log.")
        if lp.stop_event().wait(_LOOK_S):
            break
    return False


def build(plan: dict[str, Any]) -> Any:
    """Returns the `launchpad.Program`."""
    import launchpad as lp

    program = lp.Program(plan["name"])
    for group, label, log in plan["units"]:
        with program.group(group):
            program.add_node(lp.PyNode(run_node, plan["socket"], label, log))
    return program


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    import launchpad as lp
    from absl import flags

    flags.FLAGS(["launchpad"])
    threading.Thread(target=_watch_launcher, name="launch-driver", daemon=True).start()
    resources = None
    if plan["launch_type"] == "local_mp":
        from launchpad.nodes.python.local_multi_processing import PythonProcess

        # Launchpad's files go here, because its exit hooks do not run. The launcher removes the folder.
        tempfile.tempdir = os.path.dirname(plan["socket"])
        resources = {group: PythonProcess(env=env) for group, env in plan["environments"].items()}
    manager = lp.launch(
        build(plan), launch_type=plan["launch_type"], local_resources=resources, terminal="output_to_files"
    )
    manager.wait(raise_error=False)
    sys.stdout.flush()
    os._exit(0)  # past Launchpad's exit hooks, which wait for nodes that have ended


def _watch_launcher() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # Nodes are pickled, so their functions must not belong to a module called __main__.
    from launch.engines.launchpad import driver

    driver.main()
