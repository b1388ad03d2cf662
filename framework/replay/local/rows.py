"""The rows that a writer in the process of a row store has written and still holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from framework.replay.rows.arrays import grown, span
from framework.replay.rows.layout import Slice
from framework.replay.rows.store import RowStore, Stream


class HeldRows:
    """Writes rows into a store and holds them until `release`.

    Names of streams are this object's own. The store keeps rows of different columns in different streams, so
    two writers may use one name for different columns.
    """

    def __init__(self, store: RowStore):
        self._store = store
        self._streams: dict[str, Stream] = {}
        # For each stream, the store's names of its columns.
        self._columns: dict[str, dict[str, str]] = {}
        # For each stream, which of its rows are held: bool [rows].
        self._held: dict[str, np.ndarray] = {}

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """See `Writer.slice`."""
        space, names = self._streams.get(stream), self._columns.get(stream, {})
        if space is None or column not in names:
            raise ValueError(
                f"slice: got column {column!r} of stream {stream!r}, expected one that was appended to."
            )
        if type(rows) is not np.ndarray or rows.dtype != np.int64:
            rows = np.asarray(rows, np.int64)
        return Slice(space.name, names[column], rows, None if lengths is None else np.asarray(lengths))

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """See `Writer.append`."""
        arrays: dict[str, np.ndarray] = {}
        count = -1 if rows is None else len(rows)
        for name, value in columns.items():
            arrays[name] = array = value if type(value) is np.ndarray else np.asarray(value)
            if not array.ndim:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got a scalar, expected an array [n, ...]."
                )
            if count < 0:
                count = len(array)
            elif len(array) != count:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got {len(array)} rows, expected {count} as in the "
                    "other columns."
                )
        if not arrays:
            raise ValueError(f"stream {stream!r}: got no columns, expected at least one.")
        space, names = self._streams.get(stream), self._columns.setdefault(stream, {})
        if space is None or not arrays.keys() <= names.keys():
            specs = {name: (a.shape[1:], a.dtype) for name, a in arrays.items() if name not in names}
            space, fresh = self._store.claim(stream, specs, None if space is None else space.name)
            names.update(fresh)
            self._streams[stream] = space
            self._held.setdefault(stream, np.zeros(1024, np.bool_))
        targets = []
        for name, array in arrays.items():
            column = space.columns[names[name]]
            if array.dtype != column.dtype or array.shape[1:] != column.shape[1:]:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got {array.dtype}{list(array.shape)}, expected "
                    f"{column.dtype}{['n', *column.shape[1:]]} as in the first append."
                )
            targets.append((column, array))
        leased = rows is None
        if rows is None:
            rows = space.lease(count)
        at = span(rows)
        if leased:
            held = self._held[stream]
            end = at.stop if isinstance(at, slice) else int(at.max(initial=-1)) + 1
            if end > len(held):
                held = self._held[stream] = grown(held, end)
            held[at] = True
        try:
            for column, array in targets:
                column[at] = array
        except BaseException:  # no room for what is compressed
            if leased:
                self.release(stream, rows)
            raise
        return rows

    def let_go(self, stream: str, rows: np.ndarray) -> Stream:
        """Forgets `rows`, which the caller releases to the stream that this returns.

        Raises:
          ValueError: a row is not held.
        """
        held = self._held.get(stream)
        # As unsigned numbers, negative rows are too large.
        if held is None or (
            len(rows)
            and not (
                np.maximum.reduce(rows.view(np.uint64)) < len(held)
                and np.count_nonzero(held.take(rows)) == len(rows)
            )
        ):
            raise ValueError(
                f"release, stream {stream!r}: got rows that this writer does not hold. Release each row once."
            )
        held[rows] = False
        return self._streams[stream]

    def release(self, stream: str, rows: Any) -> None:
        """Gives `rows` back to the store; ValueError if a row is not held."""
        rows = np.asarray(rows, np.int64)
        self.let_go(stream, rows).release(rows)

    def take_all(self) -> list[tuple[Stream, np.ndarray]]:
        """Forgets all rows, which the caller releases to their streams."""
        rows = [(self._streams[stream], np.flatnonzero(held)) for stream, held in self._held.items()]
        self._held.clear()
        self._streams.clear()
        self._columns.clear()
        return rows

    def close(self) -> None:
        """Gives all rows back."""
        for stream, rows in self.take_all():
            stream.release(rows)
