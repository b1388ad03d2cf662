"""The base class of the workers of programs, which step until they finish or the program is stopped."""

from __future__ import annotations

import launch
from framework import core
from framework.replay.errors import ServerClosed


class ProgramWorker(core.Worker):
    """A worker that may finish before the program is stopped; see `finished`."""

    _finished = False

    def finished(self) -> bool:
        """Whether the work is done. The serial engine then stops calling `step`."""
        return self._finished

    def run(self) -> None:
        """Steps until the work is done or the program is stopped. A stop also ends a wait on replay."""
        stopped = launch.stop_event()
        while not (stopped.is_set() or self._finished):
            try:
                self.step()
            except ServerClosed as error:
                if stopped.is_set():
                    return
                if not self.recover(error):
                    raise

    def recover(self, error: ServerClosed) -> bool:
        """Recovers from the loss of a replay server during a step; returns whether stepping can continue."""
        return False
