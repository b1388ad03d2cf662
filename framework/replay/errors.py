"""The errors of replay. Invalid arguments raise `ValueError`."""

from __future__ import annotations

from framework.checkpoints import CheckpointError as CheckpointError
from launch.errors import ProgramStopped


class ReverbError(Exception):
    """Base class of the errors of valid calls that could not be carried out."""


class DeadlineExceededError(ReverbError, TimeoutError):
    """A call did not complete within its timeout. It had no effect unless its documentation says so."""


class ServerClosed(ReverbError, ProgramStopped):
    """The server was stopped, or the client interrupted, before the call or while it waited.

    In a program that is stopping, it ends a node in the ordinary way (see `launch.ProgramStopped`).
    """


class ServerLost(ServerClosed):
    """The server failed or cannot be reached, and did not announce that it stops."""


class WouldBlockError(ReverbError):
    """The call would wait forever: the rate limiter refuses it, and no other thread uses the tables."""


class StoreFullError(ReverbError, MemoryError):
    """The row store cannot reserve memory for more rows, or its budget does not allow it."""


class UnknownTableError(ReverbError, RuntimeError, ValueError):
    """There is no table of that name."""
