"""Where the server of a client is, as far as the client knows."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, ClassVar

from framework.replay.shm import MappedStore
from framework.replay.writers import Writers
from launch.rpc import sockets

RECONNECT_TIMEOUT_S = 30.0


@dataclasses.dataclass(eq=False)
class ReplayChannel:
    """The server that all connections of one client go to, and its columns in this process.

    Args:
      address: where the server is: `tcp://host:port` or `ipc://path`.
      curve: the keys of the program, if the server has any.
      local: None maps the rows of a server on this machine; False does not.
      reconnect_timeout: seconds for which calls wait for a server that does not answer.

    Attributes:
      away: whether the server is being moved; calls wait for it longer than `reconnect_timeout`.
      stopped: whether the server's last message said that it stops.
      writers: the client's writers in this process.
      look_s: seconds between two checks of whether the server has moved, while a connection looks for it.
    """

    address: str
    curve: sockets.CurveKeys | None = None
    local: bool | None = None
    reconnect_timeout: float = RECONNECT_TIMEOUT_S
    look_s: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins in this process, perhaps a forked child: nothing is known of the server."""
        self.away = self.stopped = False
        self.writers = Writers(elsewhere=True)
        self._mapped: MappedStore | None = None
        self._lock = threading.Lock()

    def move(self, address: str | None) -> None:
        """Makes calls use the server at `address`; None while it is being moved."""
        self.away = address is None
        if address is not None:
            self.address = address
            self.stopped = False  # the server before did

    def mapped(self, welcome: dict[str, Any]) -> MappedStore:
        """Returns the mapped columns of the server that sent this answer to hello."""
        directory = "" if self.local is False else welcome.get("directory", "")
        new = MappedStore(welcome.get("server", ""), directory)
        with self._lock:
            old = self._mapped
            if old is None or (old.server, old.directory, old.local) != (new.server, directory, new.local):
                old = self._mapped = new
            return old
