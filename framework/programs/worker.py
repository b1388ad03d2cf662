"""What the workers of programs have in common: they step until they are done or the program is stopped."""

from __future__ import annotations

import launch
from framework import core
from framework.replay.errors import ServerClosed


class ProgramWorker(core.Worker):
    """A worker that may finish by itself; see `finished`."""

    _finished = False

    def finished(self) -> bool:
        """Whether there is nothing left to do; the serial engine asks no more then."""
        return self._finished

    def run(self) -> None:
        """Steps until the work is done or the program is stopped, which ends a wait on replay too."""
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
        """Whether stepping can go on after a replay server was lost in the middle of a step."""
        return False
