"""The rows that a writer in the process of a row store has written and still holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from framework.replay.rows.layout import Slice
from framework.replay.rows.store import ColumnSpec, RowStore, Stream, grown, span


@dataclasses.dataclass(slots=True, eq=False)
class _Space:
    """A stream of the store, as one writer sees it.

    Attributes:
      names: the store's names of the writer's columns.
      columns: the arrays, by the writer's names.
      held: which rows the writer holds, bool `[rows]`.
    """

    stream: Stream
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    held: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1024, np.bool_))


class HeldRows:
    """Writes rows into a store and holds them until `release`.

    Names of streams are this object's own. The store keeps rows of different columns in different streams, so
    two writers may use one name for different columns.
    """

    def __init__(self, store: RowStore):
        self._store = store
        self._spaces: dict[str, _Space] = {}

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """See `Writer.slice`."""
        space = self._spaces.get(stream)
        if space is None or column not in space.names:
            raise ValueError(
                f"slice: got column {column!r} of stream {stream!r}, expected one that was appended to."
            )
        if type(rows) is not np.ndarray or rows.dtype != np.int64:
            rows = np.asarray(rows, np.int64)
        return Slice(
            space.stream.name, space.names[column], rows, None if lengths is None else np.asarray(lengths)
        )

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """See `Writer.append`."""
        space = self._spaces.get(stream)
        count = -1 if rows is None else len(rows)
        arrays: dict[str, np.ndarray] = {}
        new: dict[str, ColumnSpec] = {}
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
            if space is None or name not in space.columns:
                new[name] = (array.shape[1:], array.dtype)
                continue
            column = space.columns[name]
            if array.dtype != column.dtype or array.shape[1:] != column.shape[1:]:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got {array.dtype}{list(array.shape)}, expected "
                    f"{column.dtype}{['n', *column.shape[1:]]} as in the first append."
                )
        if not arrays:
            raise ValueError(f"stream {stream!r}: got no columns, expected at least one.")
        if space is None or new:
            space = self._declare(stream, new)
        if rows is not None:
            for name, array in arrays.items():
                space.columns[name][span(rows)] = array
            return rows
        rows = space.stream.lease(count)
        at = span(rows)
        end = at.stop if isinstance(at, slice) else int(at.max(initial=-1)) + 1
        if end > len(space.held):
            space.held = grown(space.held, end)
        space.held[at] = True
        try:
            for name, array in arrays.items():
                space.columns[name][at] = array
        except BaseException:  # no room for what is compressed
            self.release(stream, rows)
            raise
        return rows

    def _declare(self, stream: str, columns: Mapping[str, ColumnSpec]) -> _Space:
        """Adds columns to a stream of this writer, which may be new."""
        space = self._spaces.get(stream)
        found, names = self._store.claim(stream, columns, None if space is None else space.stream.name)
        if space is None:
            space = self._spaces[stream] = _Space(found)
        space.names.update(names)
        space.columns.update({name: found.columns[own] for name, own in names.items()})
        return space

    def let_go(self, stream: str, rows: np.ndarray) -> Stream:
        """Forgets `rows`, which the caller releases to the stream that this returns.

        Raises:
          ValueError: a row is not held.
        """
        space = self._spaces.get(stream)
        # As unsigned numbers, negative rows are too large.
        if space is None or (
            np.count_nonzero(rows.view(np.uint64) >= len(space.held))
            or np.count_nonzero(space.held.take(rows)) < len(rows)
        ):
            raise ValueError(
                f"release, stream {stream!r}: got rows that this writer does not hold. Release each row once."
            )
        space.held[rows] = False
        return space.stream

    def release(self, stream: str, rows: Any) -> None:
        """Gives `rows` back to the store; ValueError if a row is not held."""
        rows = np.asarray(rows, np.int64)
        self.let_go(stream, rows).release(rows)

    def take_all(self) -> list[tuple[Stream, np.ndarray]]:
        """Forgets all rows, which the caller releases to their streams."""
        rows = [(space.stream, np.flatnonzero(space.held)) for space in self._spaces.values()]
        self._spaces.clear()
        return rows

    def close(self) -> None:
        """Gives all rows back."""
        for stream, rows in self.take_all():
            stream.release(rows)
