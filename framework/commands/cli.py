"""The command line: `repertory COMMAND …`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from framework import interrupts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: the command line. None is this process's, which the command then is.

    Returns:
      The exit code: 0, 1 after an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    if arguments is None:
        return interrupts.ending(lambda: _run(sys.argv[1:]))
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    code: int = importlib.import_module("framework.commands.dispatch").run(list(arguments))
    return code
