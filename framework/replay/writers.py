"""What writers share: the rows that they hold, items on their way to tables, and when they are written."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from framework.replay.rows.store import ColumnSpec, grown, span

MAX_EPISODES = 256  # of the rows of one item; `num_episodes` does not count those before
_EXIT_S = 10.0  # for which the end of the interpreter waits for writers that were not closed

_Table = TypeVar("_Table")


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
        else:  # Negative rows are too large as unsigned numbers.
            known = not np.count_nonzero(rows.view(np.uint64) >= np.array(len(held.held), np.uint64))
        if known and np.count_nonzero(held.held[at]) == len(rows):
            return at
    raise ValueError(f"{what}: got rows that this writer does not hold. Release each row once.")


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


class Writers:
    """The writers of a client, or of a row store, which insert what they hold back before something is read.

    A writer that was dropped without `close` is ended then, because garbage collection must wait for neither
    locks nor servers.

    Args:
      elsewhere: whether the tables outlive this process, whose end then ends the writers, too.

    Attributes:
      dropped: the writers that were dropped and have not been ended.
    """

    def __init__(self, elsewhere: bool = False) -> None:
        self.dropped: collections.deque[Any] = collections.deque()
        self._live: tuple[tuple[weakref.ref[Any], Any], ...] = ()
        self._lock = threading.Lock()
        if elsewhere:
            _elsewhere.add(self)

    def add(self, writer: Any, needs: Any = None) -> None:
        """Adds a `BatchWriter`, and keeps what it needs to be ended if it is garbage in a cycle."""
        with self._lock:
            self._live = (*self._live, (weakref.ref(writer), needs))

    def remove(self, writer: Any) -> None:
        """Removes a writer that is closed."""
        with self._lock:
            self._live = tuple(each for each in self._live if each[0]() not in (writer, None))

    def show(self) -> None:
        """Has the writers insert what they hold back; ends the dropped ones."""
        if self.dropped:
            self.end_dropped()
        for reference, _ in self._live:
            writer = reference()
            if writer is not None:
                writer.show()

    def end_dropped(self, until: float | None = None) -> None:
        """Ends the dropped writers; see `BatchWriter.end`."""
        with contextlib.suppress(IndexError):  # another thread was faster
            while self.dropped:
                self.dropped.popleft().end(until)

    def call_all(self, method: str, *arguments: Any) -> None:
        """Calls a method of each writer, even if one raises an error."""
        with contextlib.ExitStack() as stack:
            for reference, _ in self._live:
                writer = reference()
                if writer is not None:
                    stack.callback(getattr(writer, method), *arguments)


_elsewhere: weakref.WeakSet[Writers] = weakref.WeakSet()


@atexit.register
def end_writers() -> None:
    """Ends the writers that were not closed."""
    until = time.monotonic() + _EXIT_S
    for writers in list(_elsewhere):
        writers.end_dropped(until)
        writers.call_all("end", until)


def push_all() -> None:
    """Has all writers to other processes send what they hold back: this thread is about to wait for room.

    A server may wait for items of one of them before it makes room for another.
    """
    for writers in list(_elsewhere):
        writers.call_all("show", False)
