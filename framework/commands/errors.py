"""The errors that the command line shows without a traceback."""

from __future__ import annotations

from framework.programs.run_folder import RunError


class CommandError(RunError):
    """An error of a command; the message says what is wrong and what to do."""


class UsageError(CommandError):
    """An invalid command line."""
