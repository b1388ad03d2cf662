"""Ctrl-C in a command: one line, and the exit code of a shell.

A `KeyboardInterrupt` in an import can become an `ImportError`, or be printed and forgotten. So Ctrl-C ends
the process at once while a command only imports and reads. From `clean_up_first` on, the first one raises
`KeyboardInterrupt`.

This module is imported before everything else. It imports only what every interpreter has loaded: `signal`
would take 10 ms, in which Ctrl-C prints a traceback.
"""

from __future__ import annotations

import _signal
import itertools
import os
import sys
from collections.abc import Callable

EXIT_CODE = 128 + _signal.SIGINT
_TEXT = "Interrupted."
_raised = False


def is_command() -> bool:
    """Whether this process is `repertory`, or a module of this package as `python -m framework.replay` is."""
    given = sys.orig_argv
    return os.path.basename("".join(given[1:2])) == "repertory" or any(
        flag == "-m" and module.startswith("framework.") for flag, module in itertools.pairwise(given)
    )


def leave_at_once() -> None:
    """Makes Ctrl-C end this process, unless the one that started it ignores Ctrl-C, as `nohup` does."""
    if _signal.getsignal(_signal.SIGINT) in (_signal.default_int_handler, _raise):
        _signal.signal(_signal.SIGINT, _leave)


def clean_up_first() -> None:
    """Makes Ctrl-C raise `KeyboardInterrupt` again: from here on there is something to remove or to close."""
    if _signal.getsignal(_signal.SIGINT) is _leave:
        _signal.signal(_signal.SIGINT, _raise)


def happened(error: BaseException | None = None) -> bool:
    """Whether there was a Ctrl-C, or `error`, of whatever kind, comes from one."""
    return _raised or isinstance(error, KeyboardInterrupt)


def ending(command: Callable[[], int]) -> int:
    """Runs the command of this process; returns its exit code, or after Ctrl-C says so and returns 130."""
    leave_at_once()
    try:
        code = command()
        if not happened():
            return code
    except BaseException as error:
        if not happened(error):
            raise
    finally:
        leave_at_once()  # While the interpreter ends.
    print(_TEXT, file=sys.stderr)
    return EXIT_CODE


def _leave(*_: object) -> None:
    os.write(2, f"{_TEXT}\n".encode())
    os._exit(EXIT_CODE)


def _raise(*_: object) -> None:
    global _raised
    _raised = True
    _signal.signal(_signal.SIGINT, _leave)  # The next one does not wait.
    raise KeyboardInterrupt(_TEXT)
