"""A layout bound to the streams of one store: checks of what comes in, references, and the gather."""

from __future__ import annotations

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
        """The items with these index lines ``[k, width]`` refer to their rows."""
        for stream, begin, end in self.parts:
            stream.acquire(index[:, begin:end].ravel())

    def drop(self, index: np.ndarray) -> None:
        """They do no more."""
        for stream, begin, end in self.parts:
            stream.drop(index[:, begin:end].ravel())

    def check_rows(self, index: np.ndarray) -> None:
        """ValueError unless every row is one that somebody holds: for index lines from another process."""
        for stream, begin, end in self.parts:
            stream.check(index[:, begin:end])

    def gather(self, index: np.ndarray, out: list[Any] | None = None) -> list[np.ndarray]:
        """The leaves of the items with index lines ``[N, width]``: one copy, straight into ``out`` if
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

    def leaf_lengths(self, lengths: np.ndarray | None, n: int) -> list[np.ndarray | None]:
        """For each leaf int64 ``[n]``, or None if it has no time axis; ``lengths`` is int32
        ``[n, groups]``."""
        result: list[np.ndarray | None] = []
        for leaf in self.layout.leaves:
            group = self.layout.groups[leaf.group]
            if not leaf.time:
                result.append(None)
            elif group.ragged and lengths is not None:
                result.append(lengths[:, leaf.group].astype(np.int64))
            else:
                result.append(np.full(n, group.length, np.int64))
        return result


def _fits(shape: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether the sizes are the same; None is any size."""
    return len(shape) == len(wanted) and all(
        size == other or size is None or other is None for size, other in zip(shape, wanted, strict=True)
    )
