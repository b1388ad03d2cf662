"""The interface of loggers: `write` takes one row of named scalars, and `close` flushes all rows.

Rows are flat dicts. Between two serial runs with the same seed, only values whose names start with `time/`
(seconds, rates, dates) may differ.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from framework.foreign import close, is_foreign
from launch.texts import printable

TIME_PREFIX = "time/"
Scalar = bool | int | float | str | None
Row = dict[str, Scalar]


class Logger(abc.ABC):
    """Takes rows of metrics. Use it in a `with` block or call `close`."""

    @abc.abstractmethod
    def write(self, row: Mapping[str, Any]) -> None:
        """Takes one row: name to number, string, bool, None, or a 0-d array or tensor."""

    def flush(self) -> None:  # noqa: B027 - many loggers have nothing to flush
        """Writes all buffered rows to their destination."""

    def close(self) -> None:
        """Flushes and closes files. A second call does nothing."""
        self.flush()

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Dispatcher(Logger):
    """Writes every row to each of several loggers."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = list(loggers)

    def write(self, row: Mapping[str, Any]) -> None:
        plain = to_scalars(row)
        for logger in self._loggers:
            logger.write(dict(plain))  # Each may change its own.

    def flush(self) -> None:
        for logger in self._loggers:
            logger.flush()

    def close(self) -> None:
        """Closes all loggers, the last one first. Raises the error of the first of ours that failed."""
        with contextlib.ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(close_logger, logger)


def close_logger(logger: Logger) -> None:
    """Closes a logger. The errors of one of another package are logged, not raised."""
    if is_foreign(logger):
        close(logger.close, f"logger {type(logger).__name__}")
    else:
        logger.close()


class InMemoryLogger(Logger):
    """Keeps the rows in `rows`; for tests and notebooks."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(to_scalars(row))


class TerminalLogger(Logger):
    """Prints each row as `[label] A = 1337 | B = 42.000 | C = foo`, for logs of nodes and plain terminals.

    Args:
      label: printed before every line, in brackets.
      print_fn: prints a line.
    """

    def __init__(self, label: str = "", print_fn: Callable[[str], object] = print):
        self._label, self._print = label, print_fn

    def write(self, row: Mapping[str, Any]) -> None:
        text = " | ".join(f"{name} = {format_value(value)}" for name, value in to_scalars(row).items())
        self._print(printable(f"[{self._label}] {text}" if self._label else text))


def to_scalars(row: Mapping[str, Any]) -> Row:
    """Returns the row with plain Python values; raises `ValueError` for an entry that is not a scalar."""
    return {name: _to_scalar(name, value) for name, value in row.items()}


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a row that is equal in two serial runs with the same seed."""
    return {name: value for name, value in row.items() if not name.startswith(TIME_PREFIX)}


def format_value(value: Scalar) -> str:
    """Formats a value as a short text: `1337`, `42.000`, `1.2e-05`, `foo`."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:.3f}"


def _to_scalar(name: str, value: Any) -> Scalar:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    shape = getattr(value, "shape", None)
    plain = value.item() if shape == () else value  # Numpy scalars, 0-d arrays and tensors.
    if not isinstance(plain, bool | int | float | str):
        what = type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        raise ValueError(f"Metric {name!r}: got a {what}, expected a scalar. Log its mean or norm instead.")
    return plain
