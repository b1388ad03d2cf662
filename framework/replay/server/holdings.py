"""What the clients of a replay server hold of its store: rows that they have leased, and declared columns.

Both are bounded for one client and for all of them, and go with the client. Columns of a client that has
gone are dropped once no item uses them. A client holds a row until it releases it, whether items use the row
or not.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from framework.replay.errors import StoreFullError
from framework.replay.rows.store import ColumnSpec, RowStore, bytes_of
from framework.replay.tables.table import Table
from framework.replay.writers import HeldRows

MAX_COLUMNS, MAX_ALL_COLUMNS = 1 << 12, 1 << 13  # declared by one client, and by all
MAX_NAME = 1 << 10  # characters in the name of a stream or a column


@dataclasses.dataclass(eq=False)
class Held:
    """What one client holds.

    Attributes:
      rows: the leased rows, by stream.
      leased: the number of them, by stream.
      columns: the declared columns, `(stream, column)`.
      added: bytes of the columns that it has added to rows that existed.
    """

    rows: dict[str, HeldRows] = dataclasses.field(default_factory=dict)
    leased: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    columns: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    added: int = 0


class Holdings:
    """Leases rows and declares columns for clients, within limits; takes back what a client held.

    Args:
      store: has the rows.
      tables: those whose items may use the columns.
      max_bytes: bytes of rows that one client may hold; all together may hold one and a half times as much.
    """

    def __init__(self, store: RowStore, tables: Collection[Table], max_bytes: int) -> None:
        self._store = store
        self._tables = tables
        self._max_bytes = max_bytes
        self._leased: collections.Counter[str] = collections.Counter()
        self._added = 0
        self._declared: collections.Counter[tuple[str, str]] = collections.Counter()

    def declare(
        self, held: Held, name: str, columns: Mapping[str, ColumnSpec], stream: str | None
    ) -> tuple[str, dict[str, str]]:
        """Returns the stream of a writer with its columns; see `RowStore.claim`.

        Raises:
          ValueError: There are too many columns, or a name is too long or empty.
          StoreFullError: There is no memory, or too much of it would go to rows that exist already.
        """
        if any(not isinstance(key, str) or not 0 < len(key) <= MAX_NAME for key in (name, *columns)):
            raise ValueError(f"names: got an invalid one, expected strings of 1 to {MAX_NAME} characters")
        if len(held.columns) + len(columns) > MAX_COLUMNS:
            raise ValueError(f"columns: got more than {MAX_COLUMNS} from one client")
        if len(self._declared) + len(columns) > MAX_ALL_COLUMNS:
            self._sweep()
            if len(self._declared) + len(columns) > MAX_ALL_COLUMNS:
                raise StoreFullError(f"columns: got more than {MAX_ALL_COLUMNS} from all clients together")
        if stream is not None:  # Rows that exist get the columns, too.
            known = self._store.streams[stream]
            added = {key: spec for key, spec in columns.items() if key not in known.specs}
            more = bytes_of(added) * known.num_reserved
            self._check_bytes(held, more)
            held.added += more
            self._added += more
        claimed, names = self._store.claim(name, columns, stream, keep=False)
        for own in names.values():
            if (claimed.name, own) not in held.columns:
                held.columns.add((claimed.name, own))
                self._declared[claimed.name, own] += 1
        return claimed.name, names

    def lease(self, held: Held, stream: str, n: int) -> np.ndarray:
        """Returns `n` rows, int64 `[n]`, which the client holds from now on.

        Raises:
          StoreFullError: There is no memory, or the client holds too much of it already.
        """
        self._check_bytes(held, n * self._store.streams[stream].row_bytes)
        rows = self._store.streams[stream].lease(n)
        held.rows.setdefault(stream, HeldRows(stream)).hold(rows)
        held.leased[stream] += n
        self._leased[stream] += n
        return rows

    def release(self, held: Held, stream: str, rows: np.ndarray) -> None:
        """Takes back rows, each given once, that the client holds."""
        held.rows[stream].held[rows] = False
        held.leased[stream] -= len(rows)
        self._leased[stream] -= len(rows)
        self._store.streams[stream].release(rows)

    def close(self, held: Held) -> None:
        """Takes back everything that a client holds."""
        for name, mine in held.rows.items():
            self.release(held, name, np.flatnonzero(mine.held))
        self._added -= held.added
        for key in held.columns:
            self._declared[key] -= 1
            if not self._declared[key]:
                del self._declared[key]
        if held.columns:
            self._sweep()

    def _check_bytes(self, held: Held, more: int) -> None:
        for whose, leased, added, most in (
            ("this client", held.leased, held.added, self._max_bytes),
            ("all clients together", self._leased, self._added, self._max_bytes * 3 // 2),
        ):
            now = added + sum(
                count * self._store.streams[name].row_bytes for name, count in leased.items() if count
            )
            if now + more > most:
                raise StoreFullError(
                    f"rows: {whose} would hold {now + more} bytes of rows without having released them, "
                    f"expected at most {most}. Release rows sooner, or give the server a larger "
                    "max_leased_bytes."
                )

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
                del self._leased[name]
                continue
            for column in idle:
                if not any(table.bindings.uses(name, column) for table in self._tables):
                    stream.drop(column)
