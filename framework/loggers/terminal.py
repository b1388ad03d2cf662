"""Rows as lines of text, for logs of nodes and for terminals that cannot redraw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from framework.loggers.base import Logger, format_value, to_scalars


class TerminalLogger(Logger):
    """Prints each row as `[label] A = 1337 | B = 42.000 | C = foo`.

    Args:
      label: printed before every line, in brackets.
      print_fn: prints a line.
    """

    def __init__(self, label: str = "", print_fn: Callable[[str], object] = print):
        self._label = label
        self._print = print_fn

    def write(self, row: Mapping[str, Any]) -> None:
        self._print(format_row(row, self._label))


def format_row(row: Mapping[str, Any], label: str = "") -> str:
    """Returns the line that `TerminalLogger` prints."""
    text = " | ".join(f"{name} = {format_value(value)}" for name, value in to_scalars(row).items())
    return f"[{label}] {text}" if label else text
