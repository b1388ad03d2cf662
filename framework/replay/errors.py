"""The errors of replay. Wrong arguments are ``ValueError``s as everywhere else."""

from __future__ import annotations

from framework.checkpoints import CheckpointError as CheckpointError
from launch.errors import ProgramStopped


class ReverbError(Exception):
    """Base of what replay raises when a call was right but could not be carried out."""


class DeadlineExceededError(ReverbError, TimeoutError):
    """A call did not go through within its timeout. Nothing of it has taken effect unless it says so."""

    def __str__(self) -> str:
        # A second argument, how far the call got, would make an OSError's "[Errno …]" of the message.
        return str(self.args[0]) if self.args else ""


class ServerClosed(ReverbError, ProgramStopped):
    """The server was stopped, or the client interrupted, while the call waited or before it began.

    Out of a node of a program that is stopping it is an ordinary end (`launch.ProgramStopped`).
    """


class ServerLost(ServerClosed):
    """The server failed or cannot be reached; it was not stopped on purpose as far as anybody knows."""


class WouldBlockError(ReverbError):
    """The call would wait for ever: the rate limiter refuses and nobody else runs in this thread."""


class StoreFullError(ReverbError, MemoryError):
    """The row store may not, or can not, reserve memory for more rows."""


class UnknownTableError(ReverbError, RuntimeError, ValueError):
    """There is no table of that name."""
