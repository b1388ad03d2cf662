"""The rows that a writer holds, as the writer and the server of its items know them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from framework.replay.rows.store import ColumnSpec, grown, span


@dataclasses.dataclass(slots=True, eq=False)
class HeldRows:
    """A stream as one writer knows it, and which of its rows the writer holds.

    Attributes:
      stream: the store's name of the stream.
      names: the store's names of the columns, by the writer's.
      specs: shape of one row and dtype of each column, by the writer's names.
      columns: the arrays, by the writer's names; empty if rows travel to a server on another machine.
      held: bool `[rows]`.
      spare: where rows are leased in blocks: the rows that are not used yet, int64.
      block: number of rows in a block.
    """

    stream: str
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    specs: dict[str, ColumnSpec] = dataclasses.field(default_factory=dict)
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    held: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1024, np.bool_))
    spare: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    block: int = 0

    def hold(self, rows: np.ndarray) -> slice | np.ndarray:
        """Notes that the writer holds `rows`, int64 `[n]`; returns the fastest index of them."""
        at = span(rows)
        end = at.stop if isinstance(at, slice) else int(at.max(initial=-1)) + 1
        if end > len(self.held):
            self.held = grown(self.held, end)
        self.held[at] = True
        return at


def check_held(what: str, held: HeldRows | None, rows: np.ndarray) -> slice | np.ndarray:
    """Returns the fastest index of `rows`; raises `ValueError` unless they are int64 `[n]` and all held."""
    if rows.shape == (0,):
        return rows
    if held is not None and rows.dtype == np.int64 and rows.ndim == 1:
        at = span(rows)
        if type(at) is slice:
            known = at.start >= 0
        else:  # As unsigned numbers, negative rows are too large.
            known = not np.count_nonzero(rows.view(np.uint64) >= np.array(len(held.held), np.uint64))
        if known and np.count_nonzero(held.held[at]) == len(rows):
            return at
    raise ValueError(f"{what}: got rows that this writer does not hold. Release each row once.")
