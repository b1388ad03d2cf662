"""What the clients of a replay server hold of its store: rows that they have leased, and declared columns.

Both go with the client. Columns of a client that has gone are dropped once no item uses them. A client holds
a row until it releases it, whether items use the row or not.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from framework.replay.rows.store import ColumnSpec, RowStore
from framework.replay.tables.table import Table
from framework.replay.writers import HeldRows


@dataclasses.dataclass(eq=False)
class Held:
    """What one client holds.

    Attributes:
      rows: the leased rows, by stream.
      columns: the declared columns, `(stream, column)`.
    """

    rows: dict[str, HeldRows] = dataclasses.field(default_factory=dict)
    columns: set[tuple[str, str]] = dataclasses.field(default_factory=set)


class Holdings:
    """Leases rows and declares columns for clients; takes back what a client held.

    Args:
      store: has the rows.
      tables: those whose items may use the columns.
    """

    def __init__(self, store: RowStore, tables: Collection[Table]) -> None:
        self._store = store
        self._tables = tables
        self._declared: collections.Counter[tuple[str, str]] = collections.Counter()

    def declare(
        self, held: Held, name: str, columns: Mapping[str, ColumnSpec], stream: str | None
    ) -> tuple[str, dict[str, str]]:
        """Returns the stream of a writer with its columns; see `RowStore.claim`."""
        claimed, names = self._store.claim(name, columns, stream, keep=False)
        for own in names.values():
            if (claimed.name, own) not in held.columns:
                held.columns.add((claimed.name, own))
                self._declared[claimed.name, own] += 1
        return claimed.name, names

    def lease(self, held: Held, stream: str, n: int) -> np.ndarray:
        """Returns `n` rows, int64 `[n]`, which the client holds from now on."""
        rows = self._store.streams[stream].lease(n)
        held.rows.setdefault(stream, HeldRows(stream)).hold(rows)
        return rows

    def release(self, held: Held, stream: str, rows: np.ndarray) -> None:
        """Takes back rows, each given once, that the client holds."""
        held.rows[stream].held[rows] = False
        self._store.streams[stream].release(rows)

    def close(self, held: Held) -> None:
        """Takes back everything that a client holds."""
        for name, mine in held.rows.items():
            self.release(held, name, np.flatnonzero(mine.held))
        for key in held.columns:
            self._declared[key] -= 1
            if not self._declared[key]:
                del self._declared[key]
        if held.columns:
            self._sweep()

    def _sweep(self) -> None:
        """Drops streams without rows and columns without items that no client has declared."""
        store = self._store
        for name, stream in list(store.streams.items()):
            idle = [
                column
                for column in stream.columns
                if column not in stream.kept and (name, column) not in self._declared
            ]
            if len(idle) == len(stream.columns) and not stream.num_rows:
                for table in self._tables:
                    table.bindings.forget(name)
                store.drop(stream)
                continue
            for column in idle:
                if not any(table.bindings.uses(name, column) for table in self._tables):
                    stream.drop(column)
