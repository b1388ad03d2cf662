"""What the supervisor knows of each process, and what it asks of the maker of processes."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from launch.engines.base import BackOff, Resources, Unit, node_status
from launch.engines.supervised.channel import Channel


class Process:
    """One unit and the process that is its present life.

    Attributes:
      number: of this life, for the fork server; a restarted unit gets a new one.
      channel: the private line to it; None when it has ended.
      born: when this life began (`time.monotonic`).
      worker: whether it has work of its own; None until it is ready.
      kill_at: when it will be ended by force, if ever (`time.monotonic`).
      kill_reason: why it was ended by force, if it was.
      failure: what `launch.rpc.wire.describe_error` said over there.
      closed: whether it said that it has closed in good order.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.restarts = 0
        self.back_off = BackOff()
        self.error: str | None = None
        self.usage: dict[str, Any] = {}
        self.begin(-1, None, 0.0)

    def begin(self, number: int, channel: Channel | None, now: float) -> None:
        """A new life."""
        self.number = number
        self.channel = channel
        self.pid: int | None = None
        self.state = "starting"
        self.worker: bool | None = None
        self.restart_at: float | None = None
        self.born = now
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

    def order(self, what: Any) -> None:
        """Tells the process to "stop" or "close", or `("where", {node_id: address})`."""
        if self.channel is not None:
            try:
                self.channel.send(what)
            except OSError:
                return  # it is ending; the fork server will say how

    def status(self) -> dict[str, Any]:
        unit = self.unit
        return node_status(unit, unit.label, self.state, self.restarts, self.error, self.pid, **self.usage)


#: How a host tells, from any thread, that a process began `{"forked": number, "pid": pid}` or ended `{"exit":
#: number, "code": code, "reason": text or None}`, or that it can make no more processes `{"error": text}`.
Report = Callable[[dict[str, Any]], None]


class Host(abc.ABC):
    """Makes processes, ends them, and reports when they have ended."""

    @abc.abstractmethod
    def fork(self, unit: Unit, resources: Resources, log: str | None) -> tuple[int, Channel]:
        """Asks for a process for `unit`. Returns the number of its life and the line to it."""

    def ready(self, number: int, worker: bool) -> None:  # noqa: B027
        """A process has made its objects; `worker` tells whether it has work of its own."""

    @abc.abstractmethod
    def kill(self, number: int) -> None:
        """Ends a process by force."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what is left and waits for that."""
