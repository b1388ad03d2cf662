# ruff: noqa: E402, UP035  (Python 3.8)
"""The command `python -m environment_server`."""

from __future__ import annotations

import os
import signal
import sys


def _leave(*_: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)  # The imports take long, and leave nothing to clean up.

import importlib
from typing import Any, Callable, Sequence

from .batches import EnvironmentsOf
from .server import make_parser, run


def find(name: str) -> Callable[[], Any]:
    """The function that makes one environment of a name."""
    module, separator, rest = name.partition(":")
    if not separator:
        raise ValueError(f"environment: got {name!r}, expected gymnasium:ID, gym:ID or module:object.")
    if module in ("gymnasium", "gym"):
        make = importlib.import_module(module).make
        return lambda: make(rest)
    return getattr(importlib.import_module(module), rest)


def main(arguments: Sequence[str] | None = None) -> int:
    names = "gymnasium:ID, gym:ID, or module:object of a function that returns an environment"
    chosen = make_parser("environment_server", names=names).parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())

    def make() -> EnvironmentsOf:
        make_one = find(chosen.environment)
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # There is something to close now.
        return EnvironmentsOf(make_one)

    try:
        return run(make, chosen)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
