"""Ctrl-C in a command: one line, and the exit code of a shell.

A `KeyboardInterrupt` in an import can become an `ImportError`, or be printed and forgotten. So Ctrl-C ends
the process at once while a command only imports and reads. From `clean_up_first` on, the first one raises
`KeyboardInterrupt`.
"""

from __future__ import annotations

import os
import signal
from typing import Any

EXIT_CODE = 128 + signal.SIGINT
TEXT = "Interrupted."
_raised = False


def leave_at_once() -> None:
    """Makes Ctrl-C end this process, unless the one that started it ignores Ctrl-C, as `nohup` does."""
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise):
        signal.signal(signal.SIGINT, _leave)


def clean_up_first() -> None:
    """Makes Ctrl-C raise `KeyboardInterrupt` again: from here on there is something to remove or to close."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _raise)


def happened(error: BaseException) -> bool:
    """Whether `error`, of whatever kind, comes from Ctrl-C."""
    return _raised or isinstance(error, KeyboardInterrupt)


def _leave(*_: Any) -> None:
    os.write(2, f"{TEXT}\n".encode())
    os._exit(EXIT_CODE)


def _raise(*_: Any) -> None:
    global _raised
    _raised = True
    signal.signal(signal.SIGINT, _leave)  # The next one does not wait.
    raise KeyboardInterrupt(TEXT)
