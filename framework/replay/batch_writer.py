"""The writer for B lanes: whole batches of rows in, whole batches of items out.

::

    rows = writer.append("steps", {"x": x[256, 4]})                 # copies
    keys = writer.create_items("replay", {"x": writer.slice("steps", "x", rows)}, priorities)
    writer.release("steps", rows)                                   # no later item will point at them
    writer.close()

Single items are held back and go in together, unless somebody waits for them or the rate limiter may refuse;
whatever
reads a table in this process puts them in first, so nobody can tell but by the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.replay.errors import ServerClosed
from framework.replay.layout import LayoutBuilder, Slice
from framework.replay.store import Stream
from framework.types import Nest

if TYPE_CHECKING:
    from framework.replay.embedded import EmbeddedClient


class BatchWriter:
    """See the module. One thread writes; others may read the tables meanwhile."""

    def __init__(self, client: EmbeddedClient):
        self._client = client
        self._builder = LayoutBuilder()
        self._streams: dict[str, Stream] = {}
        self._leased: dict[str, dict[int, np.ndarray]] = {}
        self._closed = False

    def slice(self, stream: str, column: str, rows: Any, lengths: Any = None) -> Slice:
        """A leaf of k items: ``rows`` int64 ``[k]``, or ``[k, L]`` with a time axis; see ``Slice`` for
        ``lengths``."""
        if type(rows) is not np.ndarray or rows.dtype != np.int64:
            rows = np.asarray(rows, np.int64)
        return Slice(stream, column, rows, None if lengths is None else np.asarray(lengths))

    def append(self, stream: str, columns: Mapping[str, Any], rows: np.ndarray | None = None) -> np.ndarray:
        """Copies ``{column: array [n, ...]}`` into n new rows, int64 ``[n]``, which the writer holds until
        ``release``.

        Args:
          stream: name of the row space; made on first use.
          columns: the first array of a column fixes its dtype and shape.
          rows: fill further columns of these rows of the writer instead.

        Raises:
          ValueError: a dtype or shape changed, or the arrays are not for the same n; nothing was written.
        """
        self._check_open()
        space = self._streams.get(stream)
        if space is None:
            space = self._streams[stream] = self._client.store.stream(stream)
        have = space.columns
        n = -1 if rows is None else len(rows)
        arrays = []
        for name, value in columns.items():
            array = value if type(value) is np.ndarray else np.asarray(value)
            column = have.get(name)
            if column is None:
                if not array.ndim:
                    raise ValueError(
                        f"stream {stream!r}, column {name!r}: got a scalar, expected an array [n, ...]"
                    )
                space.add_columns({name: (array.shape[1:], array.dtype)})
                column = have[name]
            if array.dtype != column.dtype or array.shape[1:] != column.shape[1:] or not array.ndim:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got {array.dtype}{list(array.shape)}, expected "
                    f"{column.dtype}{['n', *column.shape[1:]]} as in the first append"
                )
            if n < 0:
                n = len(array)
            elif len(array) != n:
                raise ValueError(
                    f"stream {stream!r}, column {name!r}: got {len(array)} rows, expected {n} as in "
                    "the others"
                )
            arrays.append((column, array))
        if n < 0:
            raise ValueError(f"stream {stream!r}: got no columns, expected at least one")
        if rows is None:
            rows = space.lease(n)
        at = space.span(rows)
        for column, array in arrays:
            column[at] = array
        return rows

    def create_items(
        self,
        table: str,
        trajectory: Nest,
        priorities: Any = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
    ) -> np.ndarray:
        """Inserts k items; waits while the table's rate limiter refuses.

        Args:
          table: name.
          trajectory: nest of ``slice(...)``, which is the nest that readers get.
          priorities: float64 ``[k]`` or None for the largest so far, 1.0 at first.
          episodes: uint64 ``[k]``, for ``num_episodes`` in ``server_info``; may be None.
          timeout: seconds to wait, None for ever.

        Returns:
          uint64 ``[k]``: the items' keys.
        """
        self._check_open()
        referenced = self._builder.build(trajectory)
        return self._client.table(table).insert(
            referenced.layout,
            referenced.index,
            priorities,
            lengths=referenced.lengths,
            episodes=episodes,
            timeout=timeout,
            cancelled=self._client.is_interrupted,
        )

    def release(self, stream: str, rows: Any) -> None:
        """No later item of this writer will point at ``rows``."""
        self._streams[stream].release(np.asarray(rows, np.int64))

    def can_insert(self, table: str, n: int = 1) -> bool:
        """Whether ``create_items`` with n items would go through without waiting."""
        return self._client.table(table).can_insert(n)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every item is in its table."""
        self._check_open()

    def close(self, timeout: float | None = None) -> int:
        """Flushes, and ends the writer; how many items did not get into their table in time and were
        dropped."""
        self._closed = True
        return 0

    def _check_open(self) -> None:
        if self._closed:
            raise ServerClosed("the writer was closed")
