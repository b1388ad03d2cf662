"""The launcher's side of the fork server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from launch.engines.base import Resources, Unit
from launch.engines.supervised.channel import Channel

_CLOSE_TIMEOUT = 10.0


class ForkServer:
    """A running fork server; see `launch.engines.processes.fork_server` for what it does.

    Args:
      preload: modules that it imports.
      folders: folders that it removes if the launcher dies.
      locks: descriptors that it and the nodes inherit.
      grace: seconds that workers have if the launcher dies, and services after them.
    """

    def __init__(
        self, preload: Sequence[str], folders: Sequence[str], locks: Sequence[int], grace: float
    ) -> None:
        self.line, theirs = socket.socketpair()
        self._received = b""
        self._lives = 0
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from launch.engines.processes.fork_server import main; "
            f"main({theirs.fileno()})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *locks],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()
        self._send({"preload": list(preload), "folders": list(folders), "grace": grace})

    def fork(self, unit: Unit, resources: Resources, log: str | None) -> tuple[int, Channel]:
        """Asks for a process. Returns the number of its life and the line to it."""
        ours, theirs = socket.socketpair()
        ours.settimeout(30.0)  # a node that does not read is found by its heartbeat; never wait for it
        self._lives += 1
        env = {key: str(value) for key, value in resources.env.items()}
        request = {"fork": self._lives, "threads": resources.threads, "env": env, "log": log}
        socket.send_fds(self.line, [json.dumps(request).encode() + b"\n"], [theirs.fileno()])
        theirs.close()
        return self._lives, Channel(ours)

    def ready(self, number: int, worker: bool) -> None:
        """Tells which processes only serve; they end last if the launcher dies."""
        if not worker:
            self._send({"service": number})

    def kill(self, number: int) -> None:
        """Ends a process and all that it started."""
        self._send({"kill": number})

    def read(self) -> list[dict[str, Any]]:
        """Reads once: ``{"forked", "pid"}`` and ``{"exit", "code"}``. RuntimeError if the server is gone."""
        data = self.line.recv(65536)
        if not data:
            code = self._process.wait()
            raise RuntimeError(f"the fork server ended with code {code}; its messages are on stderr")
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Has it end what is left, clean up and leave; waits for that, and ends it if it takes too long."""
        self.line.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and with it, on Linux, its nodes
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        self.line.sendall(json.dumps(message).encode() + b"\n")
