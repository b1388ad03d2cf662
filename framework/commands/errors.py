"""The errors that the command line shows without a traceback."""

from __future__ import annotations

from framework.programs.run_folder import RunError


class CommandError(RunError):
    """What is wrong and what to do about it, for the person at the terminal."""


class UsageError(CommandError):
    """A wrong command line."""
