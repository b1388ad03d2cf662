"""The rows that a writer in another process holds in one stream: its own numbers, and the server's behind
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_LEASE = 512
_FREE, _HELD, _GIVEN_UP = 0, 1, 2


class WriterRows:
    """See the module. Rows are *held* until the user gives them up, and *free* once the server knows.

    Attributes:
      specs: ``{column: (shape of one row, dtype)}``.
      columns: the arrays behind them: the server's, by its row, or this writer's own, by the writer's row.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.specs: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self.columns: dict[str, np.ndarray] = {}
        self._mapped = False
        self._rows = np.zeros(1024, np.int64)  # the server's row behind each of the writer's
        self._state = np.zeros(1024, np.int8)
        self._free = np.zeros(1024, np.int64)  # a stack
        self._num_free = 0
        self._next = 0
        self._spare: list[np.ndarray] = []  # leased, not used yet
        self.num_spare = 0
        self._unsent: list[tuple[np.ndarray, list[str]]] = []
        self._steps = np.arange(1024)
        self._old: tuple[np.ndarray, dict[str, np.ndarray]] | None = None

    @property
    def num_live(self) -> int:
        """Rows that are not free."""
        return self._next - self._num_free

    def check_arrays(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray | None) -> int:
        """The common n of arrays ``[n, ...]``; ValueError if they do not fit each other or what came
        before."""
        n = -1 if rows is None else len(rows)
        for name, array in arrays.items():
            spec = self.specs.get(name)
            if not array.ndim:
                raise ValueError(
                    f"stream {self.name!r}, column {name!r}: got a scalar, expected an array [n, ...]"
                )
            if spec is not None and (array.shape[1:] != spec[0] or array.dtype != spec[1]):
                raise ValueError(
                    f"stream {self.name!r}, column {name!r}: got {array.dtype}{list(array.shape)}, expected "
                    f"{spec[1]}{['n', *spec[0]]} as in the first append"
                )
            if n < 0:
                n = len(array)
            elif len(array) != n:
                raise ValueError(
                    f"stream {self.name!r}, column {name!r}: got {len(array)} rows, expected {n} as in "
                    "the others"
                )
        return n

    def add_columns(
        self, specs: Mapping[str, tuple[tuple[int, ...], np.dtype]], mapped: Mapping[str, np.ndarray] | None
    ) -> None:
        """New columns: ``mapped`` from the server's memory, or kept here."""
        self._mapped = mapped is not None
        for name, (shape, dtype) in specs.items():
            self.specs[name] = (shape, dtype)
            if mapped is not None:
                self.columns[name] = mapped[name]
            elif name not in self.columns:
                self.columns[name] = np.zeros((len(self._rows), *shape), dtype)

    def lease_size(self, least: int) -> int:
        """How many rows to lease when ``least`` are missing: few requests, and not many rows idle."""
        return max(_LEASE, 4 * least)

    def add_spare(self, rows: np.ndarray) -> None:
        """Rows that the server has leased to this writer."""
        self._spare.append(rows)
        self.num_spare += len(rows)

    def take(self, n: int) -> np.ndarray:
        """``n`` rows to hold, with spare rows of the server behind them."""
        reused = min(n, self._num_free)
        rows = np.empty(n, np.int64)
        self._num_free -= reused
        rows[:reused] = self._free[self._num_free : self._num_free + reused]
        end = self._next + n - reused
        rows[reused:] = np.arange(self._next, end)
        self._next = end
        if end > len(self._rows):
            self._grow(end)
        missing, begin = n, 0
        while missing:
            spare = self._spare[0]
            part = spare[:missing]
            self._rows[rows[begin : begin + len(part)]] = part
            begin += len(part)
            missing -= len(part)
            if len(part) == len(spare):
                self._spare.pop(0)
            else:
                self._spare[0] = spare[len(part) :]
        self.num_spare -= n
        self._state[rows] = _HELD
        return rows

    def write(self, rows: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies ``arrays [n, ...]`` into rows that are held."""
        at = self._span(self._rows.take(rows) if self._mapped else rows)
        for name, array in arrays.items():
            self.columns[name][at] = array
        if not self._mapped:
            self._unsent.append((rows, list(arrays)))

    def check(self, rows: np.ndarray) -> None:
        """ValueError unless all of ``rows`` are held."""
        if rows.size and (
            rows.min() < 0 or rows.max() >= self._next or (self._state.take(rows) != _HELD).any()
        ):
            raise ValueError(
                f"stream {self.name!r}: got rows that this writer does not hold; they were "
                "released, or belong to another writer"
            )

    def server_rows(self, rows: np.ndarray) -> np.ndarray:
        """The server's rows behind ``rows``."""
        return self._rows.take(rows)

    def give_up(self, rows: np.ndarray) -> None:
        """The user will not refer to ``rows`` again; ValueError if they were not held."""
        self.check(rows)
        self._state[rows] = _GIVEN_UP

    def free(self, rows: np.ndarray) -> None:
        """The server knows that ``rows`` were given up."""
        self._state[rows] = _FREE
        end = self._num_free + len(rows)
        self._free[self._num_free : end] = rows
        self._num_free = end

    def unsent(self) -> Iterator[list[Any]]:
        """What the server has not been sent yet: ``[stream, the server's rows, {column: array}]``."""
        unsent, self._unsent = self._unsent, []
        for rows, names in unsent:
            data = {name: self.columns[name][self._span(rows)].copy() for name in names}
            yield [self.name, self._rows.take(rows), data]

    def forget_server(self) -> None:
        """The server's rows are lost; what they held is kept for `move`."""
        if self._old is None:  # else the session before ended in the middle of this
            self._old = self._rows.copy(), dict(self.columns) if self._mapped else {}
        self._spare.clear()
        self.num_spare = 0
        self._unsent.clear()

    def move(self, rows: np.ndarray) -> None:
        """Brings what the old rows held into new rows of the server, as many as `num_live`."""
        assert self._old is not None
        old_rows, old_columns = self._old
        live = np.flatnonzero(self._state[: self._next] != _FREE)
        self._rows[live] = rows
        if self._mapped:
            for name, column in old_columns.items():
                self.columns[name][rows] = column[old_rows[live]]
        elif len(live):
            self._unsent.append((live, list(self.specs)))
        self._old = None

    def _grow(self, end: int) -> None:
        size = max(end, 2 * len(self._rows))
        for name in ("_rows", "_state", "_free"):
            old = getattr(self, name)
            grown = np.zeros(size, old.dtype)
            grown[: len(old)] = old
            setattr(self, name, grown)
        if not self._mapped:
            for name, old in self.columns.items():
                grown = np.zeros((size, *old.shape[1:]), old.dtype)
                grown[: len(old)] = old
                self.columns[name] = grown

    def _span(self, rows: np.ndarray) -> Any:
        """A slice if ``rows`` are consecutive, which copies several times faster."""
        n = len(rows)
        if n and rows[-1] - rows[0] == n - 1:
            if n > len(self._steps):
                self._steps = np.arange(2 * n)
            if (self._steps[:n] + rows[0] == rows).all():
                return slice(int(rows[0]), int(rows[0]) + n)
        return rows
