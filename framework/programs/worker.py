"""What the workers of programs have in common: they step until they are done or the program is stopped."""

from __future__ import annotations

from framework import core


class ProgramWorker(core.Worker):
    """A worker that may finish by itself; see ``finished``."""

    _finished = False

    def finished(self) -> bool:
        """Whether there is nothing left to do; the serial engine asks no more then."""
        return self._finished

    def run(self) -> None:
        """Steps until the work is done or the program is stopped, which ends a wait on replay too."""
        import launch
        from framework.replay import ServerClosed

        stopped = launch.stop_event()
        try:
            while not (stopped.is_set() or self._finished):
                self.step()
        except ServerClosed:
            if not stopped.is_set():
                raise
