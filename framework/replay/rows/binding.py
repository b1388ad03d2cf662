"""Layouts bound to the streams of one store: checks of what comes in, references, and the gather."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.rows.layout import Layout, layout_paths, pack_function
from framework.replay.rows.store import RowStore, Stream
from framework.replay.types import TensorSpec
from framework.types import Nest


class Binding:
    """What a table knows of one layout.

    Raises:
      ValueError: a stream or a column of the layout does not exist, or the layout does not fit the signature.
    """

    def __init__(self, layout: Layout, store: RowStore, table: str, signature: Nest = None):
        self.layout = layout
        self.width = layout.width
        self.pack = pack_function(layout)
        self.paths = layout_paths(layout)
        self.ragged = any(group.ragged for group in layout.groups)
        streams: list[Stream] = []
        for group in layout.groups:
            if group.stream not in store.streams:
                raise ValueError(
                    f"table {table!r}: an item refers to stream {group.stream!r}, which was never written"
                )
            streams.append(store.streams[group.stream])
        offsets = layout.offsets
        # (begin, end, squeeze) of each group in a line of the index matrix.
        self.spans = [(at, at + g.length) for at, g in zip(offsets, layout.groups, strict=True)]
        self.columns: list[np.ndarray] = []
        for path, leaf in zip(self.paths, layout.leaves, strict=True):
            stream = streams[leaf.group]
            if leaf.column not in stream.columns:
                raise ValueError(
                    f"table {table!r}, leaf {path!r}: stream {stream.name!r} has no column "
                    f"{leaf.column!r}; it has "
                    f"{sorted(stream.columns)}"
                )
            self.columns.append(stream.columns[leaf.column])
        self.shapes = [
            ((layout.groups[leaf.group].length,) if leaf.time else ()) + column.shape[1:]
            for leaf, column in zip(layout.leaves, self.columns, strict=True)
        ]
        #: Bytes of one gathered item.
        self.item_bytes = sum(
            int(np.prod(shape, dtype=np.int64)) * column.itemsize
            for shape, column in zip(self.shapes, self.columns, strict=True)
        )
        # What gather needs of each leaf, in one tuple.
        self._plan = [
            (leaf.group, leaf.time, column.take, column.dtype, shape)
            for leaf, column, shape in zip(layout.leaves, self.columns, self.shapes, strict=True)
        ]
        # Adjacent groups of one stream are counted in one call.
        self.parts: list[tuple[Stream, int, int]] = []
        for stream, (begin, end) in zip(streams, self.spans, strict=True):
            if self.parts and self.parts[-1][0] is stream:
                self.parts[-1] = (stream, self.parts[-1][1], end)
            else:
                self.parts.append((stream, begin, end))
        if signature is not None:
            self._check(table, signature)

    def _check(self, table: str, signature: Nest) -> None:
        """Compares leaves in order, whatever their names are."""
        specs = [TensorSpec.of(spec) for spec in nests.flatten(signature)[0]]
        if len(specs) != len(self.paths):
            raise ValueError(
                f"table {table!r}: got a trajectory of {len(self.paths)} leaves {self.paths}, its signature "
                f"has {len(specs)}: {nests.paths(nests.flatten(signature)[1])}"
            )
        for path, shape, column, leaf, spec in zip(
            self.paths, self.shapes, self.columns, self.layout.leaves, specs, strict=True
        ):
            group = self.layout.groups[leaf.group]
            sizes: list[tuple[int | None, ...]] = [shape]
            if leaf.time and group.ragged:
                sizes = [(None, *shape[1:])]
            if leaf.step:
                sizes.append(shape[1:])
            if spec.dtype != column.dtype or not any(_fits(each, spec.shape) for each in sizes):
                raise ValueError(
                    f"table {table!r}, leaf {path!r}: got {column.dtype}{list(shape)}, the signature says "
                    f"{spec.dtype}{list(spec.shape)}"
                )

    def acquire(self, index: np.ndarray) -> None:
        """The items with these index lines `[k, width]` refer to their rows."""
        for stream, begin, end in self.parts:
            stream.acquire(index[:, begin:end].ravel())

    def drop(self, index: np.ndarray) -> None:
        """They do no more."""
        for stream, begin, end in self.parts:
            stream.drop(index[:, begin:end].ravel())

    def gather(self, index: np.ndarray, out: Sequence[Any] | None = None) -> list[np.ndarray]:
        """The leaves of the items with index lines `[N, width]`: one copy, straight into `out` if
        given."""
        n = len(index)
        rows: list[np.ndarray | None] = [None] * len(self.spans)
        leaves = []
        for at, (group, time, take, dtype, shape) in enumerate(self._plan):
            lines = rows[group]
            if lines is None:
                begin, end = self.spans[group]
                lines = rows[group] = (index[:, begin] if end - begin == 1 else index[:, begin:end]).copy()
            array = np.empty((n, *shape), dtype) if out is None else out[at]
            # "clip" because "raise" would gather into a buffer first; rows were checked when they came in.
            take(lines, 0, array[:, 0] if time and lines.ndim == 1 else array, "clip")
            leaves.append(array)
        return leaves

    def leaf_lengths(self, lengths: np.ndarray | None) -> list[np.ndarray | int | None]:
        """The length of each leaf, or its lengths `[n]` if it is ragged; None if it has no time axis.

        `lengths` is int32 `[n, groups]`.
        """
        result: list[np.ndarray | int | None] = []
        for leaf in self.layout.leaves:
            group = self.layout.groups[leaf.group]
            if not leaf.time:
                result.append(None)
            elif lengths is None or not group.ragged:
                result.append(group.length)
            else:
                result.append(lengths[:, leaf.group])
        return result

    def is_like(self, other: Binding) -> bool:
        """Whether items of both can be in one batch: equal up to their lengths."""
        return self is other or (
            self.layout.structure == other.layout.structure and self._kinds() == other._kinds()
        )

    def _kinds(self) -> list[Any]:
        pairs = zip(self.layout.leaves, self.columns, strict=True)
        return [(leaf.time, column.dtype, column.shape[1:]) for leaf, column in pairs]


class Bindings:
    """The layouts of one table's items. May be used by several threads.

    Attributes:
      known: by number, in the order in which they came.
    """

    def __init__(self, store: RowStore, table: str, signature: Nest = None):
        self._store = store
        self._table = table
        self._signature = signature
        self.known: list[Binding] = []
        self._numbers: dict[Layout, int] = {}
        self._latest: tuple[Layout | None, int] = (None, 0)
        self._lock = threading.Lock()

    def number(self, layout: Layout) -> int:
        """The number of `layout`; ValueError if its streams, columns or the signature do not fit."""
        latest = self._latest
        if latest[0] is layout:  # a layout's hash takes its time
            return latest[1]
        with self._lock:
            number = self._numbers.get(layout)
            if number is None:
                self.known.append(Binding(layout, self._store, self._table, self._signature))
                number = self._numbers[layout] = len(self.known) - 1
        self._latest = (layout, number)
        return number


def _fits(shape: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether the sizes are the same; None is any size."""
    return len(shape) == len(wanted) and all(
        size == other or size is None or other is None for size, other in zip(shape, wanted, strict=True)
    )
