"""The record of each process, its log included, and the interface of hosts, which create processes."""

from __future__ import annotations

import abc
import os
import socket
from collections.abc import Callable
from typing import Any

from launch.engines.base import Record, Unit
from launch.engines.options import Resources
from launch.engines.supervised.channel import Channel

_TAIL_LINES = 20
_TAIL_BYTES = 16384


class Process(Record):
    """One unit and its current process.

    Args:
      unit: the unit.
      code: the pickle of the unit.
      directory: the folder of the run, or None.

    Attributes:
      log: path of the log, or None.
      number: number of this life of the unit, for the host; a restarted unit gets a new one.
      channel: the private channel to the process; None when the process has ended.
      born: time at which this life began (`time.monotonic`).
      worker: whether it is a worker; None until it is ready.
      kill_at: time at which it will be killed (`time.monotonic`), or None.
      kill_reason: why it was killed, or None.
      failure: the result of `launch.rpc.wire.describe_error` in the process, or None.
      silent_since: time at which its channel broke, because it ended, or at which it was killed before it had
        begun (`time.monotonic`), or None.
    """

    def __init__(self, unit: Unit, code: bytes, directory: str | None) -> None:
        super().__init__(unit, unit.label)
        self.code = code
        self.log = None if directory is None else os.path.join(directory, "logs", f"{unit.label}.log")
        self.begin(-1, None, 0.0)

    def begin(self, number: int, channel: Channel | None, now: float) -> None:
        """Starts a new life."""
        self.number = number
        self.channel = channel
        self.pid = None
        self.state = "starting"
        self.worker: bool | None = None
        self.restart_at: float | None = None
        self.born = now
        self.last_seen = now
        self.kill_at: float | None = None
        self.kill_reason: str | None = None
        self.failure: dict[str, Any] | None = None
        self.silent_since: float | None = None

    @property
    def alive(self) -> bool:
        return self.channel is not None

    @property
    def begun(self) -> bool:
        """Whether there is a process. On a cluster, a node may wait for hours until there is room for it."""
        return self.alive and self.pid is not None

    @property
    def working(self) -> bool:
        """Whether a stop must wait for it, because it is starting or working."""
        return self.alive and (self.worker is None or (self.worker and self.state == "running"))

    def log_tail(self) -> str:
        """Returns the last lines of the log; empty if there is none."""
        if self.log is None:
            return ""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:  # there is none yet, or its folder is away
            return ""
        return "\n".join(lines[-_TAIL_LINES:])


# Takes a report of a host, from any thread: a process began, `{"forked": number, "pid": pid}`; it ended,
# `{"exit": number, "code": code, "reason": text or None}`; or the host cannot create processes any more, and
# may not report their ends, `{"lost": text}`.
Report = Callable[[dict[str, Any]], None]


class ProcessHost(abc.ABC):
    """Creates processes, kills them, and reports when they have ended."""

    @abc.abstractmethod
    def fork(self, process: Process, line: socket.socket, resources: Resources) -> None:
        """Asks for a process, whose end of its channel is `line`."""

    @abc.abstractmethod
    def kill(self, number: int) -> None:
        """Kills a process."""

    def note_worker(self, number: int) -> None:  # noqa: B027
        """Is called when a process has made its objects and has work of its own."""

    def give_up(self, label: str) -> None:  # noqa: B027
        """Is called if the end of the node `label`, whose channel broke, is not reported for long."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all remaining processes and waits for their end."""
