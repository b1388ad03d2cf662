"""Many rows into few, with nothing dropped: means of values, sums of amounts, the newest of counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from framework.loggers.base import TIME_PREFIX, Logger, Row, to_scalars

HOW = ("mean", "sum", "max", "min", "last")


class Aggregator(Logger):
    """Collects rows and writes one that stands for all of them.

    A row is due when ``every_rows`` rows came in, or when ``every_seconds`` seconds passed since the last one
    was written, whichever comes first; on the serial engine use ``every_rows`` alone, for then no clock
    decides. ``flush`` and ``close`` write what is left. ``rows`` in the result says how many it stands for.

    Args:
      logger: gets the aggregated rows.
      every_rows: rows per aggregate, or None.
      every_seconds: seconds per aggregate, or None.
      how: name to one of ``mean``, ``sum``, ``max``, ``min``, ``last``. Floats not named here are averaged
        over the rows that have them (NaN counts); ints, bools and strings keep the newest.
      rates: name to new name: the growth of a count per second, ``{"env_steps": "steps_per_second"}``
        gives ``time/steps_per_second``.
      clock: seconds, for tests.
    """

    def __init__(
        self,
        logger: Logger,
        every_rows: int | None = None,
        every_seconds: float | None = None,
        how: Mapping[str, str] | None = None,
        rates: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        for name, kind in (how or {}).items():
            if kind not in HOW:
                raise ValueError(f"Aggregator: how[{name!r}] is {kind!r}; expected one of {', '.join(HOW)}.")
        self._logger = logger
        self._every_rows = every_rows
        self._every_seconds = every_seconds
        self._how = dict(how or {})
        self._rates = dict(rates or {})
        self._clock = clock
        self._pending: list[Row] = []
        self._since = clock()
        self._rate_time = self._since
        self._rate_counts: dict[str, float] = {}

    def write(self, row: Mapping[str, Any]) -> None:
        self._pending.append(to_scalars(row))
        full = self._every_rows is not None and len(self._pending) >= self._every_rows
        late = self._every_seconds is not None and self._clock() - self._since >= self._every_seconds
        if full or late:
            self._emit()

    def flush(self) -> None:
        if self._pending:
            self._emit()
        self._logger.flush()

    def close(self) -> None:
        self.flush()
        self._logger.close()

    def _emit(self) -> None:
        rows, self._pending = self._pending, []
        result = aggregate(rows, self._how)
        result["rows"] = len(rows)
        result.update(self._take_rates(rows))
        self._since = self._clock()
        self._logger.write(result)

    def _take_rates(self, rows: list[Row]) -> Row:
        now = self._clock()
        seconds = now - self._rate_time
        result: Row = {}
        for name, new_name in self._rates.items():
            values = [value for row in rows if isinstance(value := row.get(name), int | float)]
            if not values:
                continue
            if name in self._rate_counts and seconds > 0:
                result[TIME_PREFIX + new_name] = (values[-1] - self._rate_counts[name]) / seconds
            self._rate_counts[name] = values[-1]
        self._rate_time = now
        return result


def aggregate(rows: list[Row], how: Mapping[str, str] | None = None) -> Row:
    """One row for several; names keep the order in which they first came. See ``Aggregator``."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: _combine(values, (how or {}).get(name)) for name, values in columns.items()}


def _combine(values: list[Any], how: str | None) -> Any:
    numbers = [value for value in values if isinstance(value, int | float)]
    if how is None:
        how = "mean" if any(type(value) is float for value in values) else "last"
    if how == "last" or not numbers:
        return values[-1]
    if how == "mean":
        return (
            math.fsum(numbers) / len(numbers)
            if all(map(math.isfinite, numbers))
            else sum(numbers) / len(numbers)
        )
    if how == "sum":
        return sum(numbers)
    return max(numbers) if how == "max" else min(numbers)
