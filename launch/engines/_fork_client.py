"""The launcher's side of the fork server, and its record of each process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from launch.engines._channel import Channel
from launch.engines.base import Unit


class Process:
    """One unit and the process that is its present life.

    Attributes:
      number: of this life, for the fork server; a restarted unit gets a new one.
      channel: the private line to it; None when it has ended.
      worker: whether it has work of its own; None until it is ready.
      kill_at: when it will be ended by force, if ever (`time.monotonic`).
      kill_reason: why it was ended by force, if it was.
      failure: what `launch.rpc.wire.describe_error` said over there.
      closed: whether it said that it has closed in good order.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.restarts = 0
        self.error: str | None = None
        self.usage: dict[str, Any] = {"cpu_seconds": None, "memory_bytes": None, "calls": None}
        self.begin(-1, None, 0.0)

    def begin(self, number: int, channel: Channel | None, now: float) -> None:
        """A new life."""
        self.number = number
        self.channel = channel
        self.pid: int | None = None
        self.state = "starting"
        self.worker: bool | None = None
        self.restart_at: float | None = None
        self.last_seen = now
        self.kill_at: float | None = None
        self.kill_reason: str | None = None
        self.failure: dict[str, Any] | None = None
        self.closed = False

    @property
    def alive(self) -> bool:
        return self.channel is not None

    @property
    def working(self) -> bool:
        """Whether a stop still has to wait for it: it is starting, or its work has not returned."""
        return self.alive and (self.worker is None or (self.worker and self.state == "running"))

    def order(self, what: str) -> None:
        """Tells the process to "stop" or "close"."""
        if self.channel is not None:
            try:
                self.channel.send(what)
            except OSError:
                return  # it is ending; the fork server will say how

    def status(self) -> dict[str, Any]:
        return {
            "label": self.unit.label,
            "group": self.unit.group,
            "index": self.unit.index,
            "state": self.state,
            "restarts": self.restarts,
            "pid": self.pid,
            **self.usage,
            "error": self.error,
        }


class ForkServer:
    """A running fork server; see `launch.engines._fork_server` for what it does.

    Args:
      preload: modules that it imports.
      sockets: directory that it takes away if the launcher dies.
      job: name of the run.
    """

    def __init__(self, preload: Sequence[str], sockets: str, job: str) -> None:
        self.line, theirs = socket.socketpair()
        self._received = b""
        self._lives = 0
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from launch.engines._fork_server import main; "
            f"main({theirs.fileno()})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()
        self._send({"preload": list(preload), "sockets": sockets, "job": job})

    def fork(self, threads: int, env: dict[str, str], log: str | None) -> tuple[int, Channel]:
        """Asks for a process. Returns the number of its life and the line to it."""
        ours, theirs = socket.socketpair()
        ours.settimeout(30.0)  # a node that does not read is found by its heartbeat; never wait for it
        self._lives += 1
        request = {"fork": self._lives, "threads": threads, "env": env, "log": log}
        socket.send_fds(self.line, [json.dumps(request).encode() + b"\n"], [theirs.fileno()])
        theirs.close()
        return self._lives, Channel(ours)

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
        """Has it end what is left, clean up and leave; waits for that."""
        self.line.close()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        self.line.sendall(json.dumps(message).encode() + b"\n")
