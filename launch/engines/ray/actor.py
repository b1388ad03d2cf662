"""The Ray actor that is the process of a node.

It holds one end of a socket pair; the node's `NodeProcess` has the other end as its channel to the launcher.
The launcher moves the bytes of this channel in both directions with calls of this actor. The methods run on
three threads: one for the node, one for each direction.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from typing import Any

from launch import directories, platforms
from launch.context import shared_memory_path
from launch.engines.supervised import node_process
from launch.engines.supervised.channel import Channel

_PIECE = 1 << 16
#: The concurrency groups: each method names the one whose thread runs it.
CONCURRENCY_GROUPS = {"life": 1, "out": 1, "in": 1}
_LEAVE_S = 0.1


class HostActor:
    """One node, or one colocation of them.

    Args:
      label: label of the node; Ray prints it before each line of output.
      job: random name of the run.
      path: the launcher's `sys.path`.
      env: environment variables.
    """

    def __init__(self, label: str, job: str, path: list[str], env: dict[str, str]) -> None:
        self._label = label
        self._job = job
        os.environ.update(env)
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry or ".")]
        self._ours, theirs = socket.socketpair()
        self._channel = Channel(theirs)

    def __repr__(self) -> str:
        return self._label

    def born(self) -> dict[str, Any]:
        """Returns the process id, the process's start time (to identify it later) and Ray's node id."""
        import psutil
        import ray

        return {
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "machine": ray.get_runtime_context().get_node_id(),
        }

    def live(self) -> int:
        """Runs the node and returns its exit code."""
        import ray

        output = _Output(self._channel)
        memory = _share_memory(self._job)
        address = ray.util.get_node_ip_address()
        code = node_process.run(self._channel, f"[{address}]" if ":" in address else address)
        output.close()
        os.close(memory)
        root = platforms.shared_memory_root()
        directories.remove_abandoned_directories(root, f"lp-{self._job}")  # if it was the last
        return code

    def leave(self) -> None:
        """Ends this process once the call is answered, for a launcher whose Ray has no head that could."""
        threading.Timer(_LEAVE_S, os._exit, (1,)).start()

    def take(self, timeout: float) -> bytes:
        """Returns the node's next bytes; empty after `timeout` seconds without any."""
        readable, _, _ = select.select([self._ours], [], [], timeout)
        return self._ours.recv(_PIECE) if readable else b""

    def give(self, data: bytes) -> None:
        """Sends bytes of the launcher to the node."""
        self._ours.sendall(data)


def _share_memory(job: str) -> int:
    """Makes and locks the run's folder in shared memory, and removes killed runs' folders."""
    directories.remove_abandoned_directories(platforms.shared_memory_root(), "lp-")
    return directories.share_directory(shared_memory_path(job))


class _Output:
    """Copies this process's output to the launcher, for the node's log; Ray still gets it too."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._before = [os.dup(1), os.dup(2)]
        self._read, write = os.pipe()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._copy, name="launch-output", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while data := os.read(self._read, _PIECE):
            os.write(self._before[0], data)
            with contextlib.suppress(OSError):
                self._channel.send(("log", data))

    def close(self) -> None:
        """Sends the remaining output and stops copying."""
        node_process.flush_output()
        os.dup2(self._before[0], 1)
        os.dup2(self._before[1], 2)
        self._thread.join(2.0)  # a process that the node started may hold the pipe open


def end_process(pid: int, created: float) -> None:
    """Kills a process of this machine that hangs and no longer answers Ray."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == created:
            process.kill()
