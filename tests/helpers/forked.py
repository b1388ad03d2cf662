"""Processes forked from the test's own: they can be killed like any other, and need no new interpreter."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


class Forked:
    """Runs ``function(pipe, *args)`` in a child; what it sends through the pipe is read by ``word``."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=function, args=(theirs, *args), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; the child uses nothing that they hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def word(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            os.kill(self.process.pid, signal.SIGABRT)  # It writes its stacks.
            raise AssertionError("the child said nothing")
        return self._pipe.recv()

    def tell(self, value: Any) -> None:
        """Sends what the function reads from its pipe."""
        self._pipe.send(value)

    def end(self) -> None:
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
