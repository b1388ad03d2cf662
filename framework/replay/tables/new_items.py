"""Items on their way to a table."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

MAX_EPISODES = 256  # of the rows of one item; `num_episodes` does not count those before

_Table = TypeVar("_Table")


@dataclasses.dataclass(slots=True, eq=False)
class NewItems:
    """Items of one layout for one table, which has checked them: see `Table.check_items`.

    Attributes:
      index: int64 `[k, width]`, the rows of each item.
      keys: uint64 `[k]`.
      priorities: float64 `[k]`, or None for the largest so far.
      lengths: int32 `[k, groups]`, or None if the layout is not ragged.
      episodes: uint64 `[k, m]`, the episodes of each item's rows, filled up with 0; or None.
      layout: the table's number for the layout.
      done: how many of them are in the table, the first ones.
    """

    index: np.ndarray
    keys: np.ndarray
    priorities: np.ndarray | None = None
    lengths: np.ndarray | None = None
    episodes: np.ndarray | None = None
    layout: int = 0
    done: int = 0

    def part(self, begin: int, end: int) -> NewItems:
        """Returns items `begin` to `end`."""
        cut: Any = [array if array is None else array[begin:end] for array in _arrays(self)]
        return NewItems(*[*cut, self.layout])


# The fields that are arrays or None, in the order of the constructor.
_arrays = operator.attrgetter("index", "keys", "priorities", "lengths", "episodes")


def joined(items: Iterable[tuple[_Table, NewItems]]) -> Iterator[tuple[_Table, NewItems]]:
    """Joins consecutive items of one kind and table, because inserting many costs hardly more than one.

    Items that are in their table are left out.
    """
    for (table, layout, *_), run in itertools.groupby(items, _kind):
        parts = [new.part(new.done, len(new.keys)) if new.done else new for _, new in run]
        if len(parts) > 1:
            columns = zip(*map(_arrays, parts), strict=True)
            arrays: Any = [each[0] if each[0] is None else np.concatenate(each) for each in columns]
            parts = [NewItems(*[*arrays, layout])]
        yield table, parts[0]


def _kind(item: tuple[Any, NewItems]) -> tuple[Any, ...]:
    """Returns what is equal for items that can be joined."""
    table, new = item
    width = None if new.episodes is None else new.episodes.shape[1]
    return table, new.layout, width, new.priorities is None, new.lengths is None
