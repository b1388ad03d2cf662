"""How items refer to rows: the layout of an item, and its binding to the columns of one store.

An item is a nest of leaves. A leaf is a column of a stream at some rows. Leaves with the same rows share a
*group*. The items of one call have one `Layout`; each item is one line of an index matrix:

```text
Layout.groups   ("steps", 1)        ("steps", 1)
index[k]        row of time t       row of time t+1         # width = 2
```
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from framework import nest as nests
from framework.replay.rows.store import RowStore, Stream
from framework.replay.types import Out, PaddedSample, ReplaySample, Sample, SampleInfo, TensorSpec
from framework.types import Nest


@dataclasses.dataclass(slots=True, eq=False)
class Slice:
    """One leaf of a trajectory: `column` of `stream` at `rows`, int64 `[k]` or `[k, L]` for k items.

    Attributes:
      lengths: int `[k]`, for rows `[k, L]` only: how many of the L rows of each item count. The rest are
        padding and repeat a row that counts.
      step: whether the table's signature may describe one step of it, as for Reverb's older writer.
    """

    stream: str
    column: str
    rows: np.ndarray
    lengths: np.ndarray | None = None
    step: bool = False


class RowGroup(NamedTuple):
    """`length` rows of `stream`; `ragged` if each item says how many of them count."""

    stream: str
    length: int
    ragged: bool = False


class LayoutLeaf(NamedTuple):
    """`column` of `groups[group]`; `time` if the leaf keeps a time axis; for `step` see `Slice`."""

    column: str
    group: int
    time: bool
    step: bool = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """What all items of one kind have in common; hashable."""

    groups: tuple[RowGroup, ...]
    leaves: tuple[LayoutLeaf, ...]
    structure: Any  # of `framework.nest`, frozen

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where each group begins and ends in a line of the index matrix."""
        ends = np.cumsum([group.length for group in self.groups]).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @functools.cached_property
    def parts(self) -> list[tuple[str, int, int]]:
        """`[(stream, begin, end)]`, the parts of an index line; neighbors of one stream are one part."""
        parts: list[tuple[str, int, int]] = []
        for group, (begin, end) in zip(self.groups, self.spans, strict=True):
            if parts and parts[-1][0] == group.stream:
                begin = parts.pop()[1]
            parts.append((group.stream, begin, end))
        return parts

    @functools.cached_property
    def width(self) -> int:
        """Rows of one item over all groups."""
        return sum(group.length for group in self.groups)

    @functools.cached_property
    def ragged(self) -> bool:
        """Whether items have lengths of their own."""
        return any(group.ragged for group in self.groups)

    @functools.cached_property
    def pack(self) -> nests.Pack:
        """The function from a list of leaves to an item's nest."""
        return nests.packer(self.structure)

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each leaf in the nest."""
        return nests.paths(self.structure)

    def check_lengths(self, lengths: np.ndarray) -> None:
        """Raises `ValueError` unless each of `lengths [k, groups]` is from 1 to the group's length."""
        most = [group.length for group in self.groups]
        if (lengths < 1).any() or (lengths > most).any():
            raise ValueError(f"lengths: got {lengths.min()} to {lengths.max()}, expected 1 to {most}.")

    def to_wire(self) -> list[Any]:
        """Returns a value that a message or JSON can hold, in which tuples become lists."""
        return [self.groups, self.leaves, self.structure]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> Layout:
        """Inverts `to_wire`; `ValueError` if the value is not valid."""
        groups = tuple(RowGroup(str(s), int(n), bool(r)) for s, n, r in value[0])
        leaves = tuple(LayoutLeaf(str(c), int(g), bool(t), bool(s)) for c, g, t, s in value[1])
        layout = cls(groups, leaves, nests.freeze(value[2]))
        if any(group.length < 1 for group in groups) or any(
            not 0 <= leaf.group < len(groups) or (not leaf.time and groups[leaf.group].length != 1)
            for leaf in leaves
        ):
            raise ValueError(f"layout: got groups {groups} and leaves {leaves}, which do not fit together.")
        if len(layout.paths) != len(leaves):
            raise ValueError(f"layout: got {len(leaves)} leaves, expected those of {value[2]}.")
        return layout


class LayoutBuilder:
    """Turns nests of `Slice` into layouts and index matrices. Each writer has one."""

    def __init__(self) -> None:
        self._known: dict[Any, Layout] = {}

    def build(self, trajectory: Nest) -> tuple[Layout, np.ndarray, np.ndarray | None]:
        """Returns the layout of k items, their index int64 `[k, width]`, and lengths int32 `[k, groups]`.

        The lengths are None if the layout is not ragged.

        Raises:
          ValueError: The nest has no leaves, or the leaves are not for the same number of items.
        """
        # Flattens the nest; `kinds` is equal for nests of the same structure. A recursion would take longer.
        slices: list[Slice] = []
        kinds: list[Any] = []
        waiting = [trajectory]
        while waiting:
            node = waiting.pop()
            kind = type(node)
            if kind is Slice:
                slices.append(node)
                kinds.append(None)
            elif kind is dict:
                keys = sorted(node)
                kinds.append(tuple(keys))
                waiting.extend([node[key] for key in reversed(keys)])
            elif kind is list or isinstance(node, tuple):
                kinds.append((kind, len(node)))
                waiting.extend(node[::-1])
            else:
                raise ValueError(
                    f"trajectory: got {kind.__name__} at a leaf, expected writer.slice(stream, column, rows)."
                )
        if not slices:
            raise ValueError("trajectory: got a nest without leaves, expected a writer.slice(...) or more.")
        firsts: list[Slice] = []  # one leaf of each group
        group_of: dict[tuple[str, int, int], int] = {}
        leaves = []
        for leaf in slices:
            at = group_of.setdefault((leaf.stream, id(leaf.rows), id(leaf.lengths)), len(firsts))
            if at == len(firsts):
                firsts.append(leaf)
            ragged = leaf.lengths is not None
            leaves.append((leaf.stream, leaf.column, at, leaf.rows.shape[1:], ragged, leaf.step))
        key = (*kinds, *leaves)
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = _layout(trajectory, slices, firsts, leaves)
        if layout.width == 1 and not layout.ragged:  # the most frequent layout, in half the time
            return layout, firsts[0].rows.reshape(-1, 1).copy(), None
        items = len(firsts[0].rows)
        index = np.empty((items, layout.width), np.int64)
        for (begin, end), leaf in zip(layout.spans, firsts, strict=True):
            rows = leaf.rows
            if len(rows) != items:
                raise ValueError(
                    f"trajectory: got rows for {len(rows)} items in one leaf, expected {items} as in another."
                )
            index[:, begin:end] = rows if rows.ndim == 2 else rows[:, None]
        if not layout.ragged:
            return layout, index, None
        lengths = np.empty((items, len(firsts)), np.int32)
        for at, (group, leaf) in enumerate(zip(layout.groups, firsts, strict=True)):
            lengths[:, at] = group.length if leaf.lengths is None else leaf.lengths
        layout.check_lengths(lengths)
        return layout, index, lengths


def _layout(trajectory: Nest, slices: list[Slice], firsts: list[Slice], leaves: list[Any]) -> Layout:
    for leaf in slices:
        if leaf.rows.ndim not in (1, 2) or (leaf.rows.ndim == 2 and not leaf.rows.shape[1]):
            raise ValueError(
                f"slice of column {leaf.column!r}: got rows of shape {leaf.rows.shape}, expected [k] or "
                "[k, L > 0]."
            )
        if leaf.lengths is not None and leaf.rows.ndim != 2:
            raise ValueError(f"slice of column {leaf.column!r}: got rows [k], expected [k, L] with lengths.")
    return Layout(
        tuple(RowGroup(leaf.stream, (*leaf.rows.shape, 1)[1], leaf.lengths is not None) for leaf in firsts),
        tuple(LayoutLeaf(column, at, bool(tail), step) for _, column, at, tail, _, step in leaves),
        nests.freeze(nests.flatten(trajectory)[1]),
    )


class Binding:
    """A layout with the columns of one store: counts references to rows, and gathers items.

    Attributes:
      kinds: for each leaf, what the items in one batch must have in common: everything except the length.
      item_bytes: bytes of one gathered item.
      parts: as in `Layout`, with the streams themselves.

    Raises:
      ValueError: A stream or a column of the layout does not exist, or the layout does not fit the signature.
    """

    def __init__(self, layout: Layout, store: RowStore, table: str, signature: Nest = None):
        self.layout = layout
        self.width, self.ragged, self.spans = layout.width, layout.ragged, layout.spans
        self.pack, self.paths = layout.pack, layout.paths
        self.kinds: list[tuple[bool, np.dtype, tuple[int, ...]]] = []
        # What `gather` needs of each leaf, in one tuple.
        self._plan: list[tuple[int, bool, Any, np.dtype, tuple[int, ...]]] = []
        self.item_bytes = 0
        self.parts: list[tuple[Stream, int, int]] = []
        for name, begin, end in layout.parts:
            if name not in store.streams:
                raise ValueError(f"table {table!r}: got stream {name!r} in an item, expected a written one.")
            self.parts.append((store.streams[name], begin, end))
        for path, leaf in zip(self.paths, layout.leaves, strict=True):
            group = layout.groups[leaf.group]
            columns = store.streams[group.stream].columns
            if leaf.column not in columns:
                raise ValueError(
                    f"table {table!r}, leaf {path!r}: got column {leaf.column!r} of stream {group.stream!r}, "
                    f"expected one of {sorted(columns)}."
                )
            column = columns[leaf.column]
            shape = (group.length, *column.shape[1:]) if leaf.time else column.shape[1:]
            self.kinds.append((leaf.time, column.dtype, column.shape[1:]))
            self._plan.append((leaf.group, leaf.time, column.take, column.dtype, shape))
            self.item_bytes += int(np.prod(shape, dtype=np.int64)) * column.itemsize
        if signature is not None:
            self._check(table, signature)

    def _check(self, table: str, signature: Nest) -> None:
        """Compares leaves in order, whatever their names are."""
        specs = [TensorSpec.of(spec) for spec in nests.flatten(signature)[0]]
        if len(specs) != len(self.paths):
            raise ValueError(
                f"table {table!r}: got a trajectory of {len(self.paths)} leaves {self.paths}, its signature "
                f"has {len(specs)}: {nests.paths(nests.flatten(signature)[1])}."
            )
        leaves = zip(self.paths, self._plan, self.layout.leaves, specs, strict=True)
        for path, (_, _, _, dtype, shape), leaf, spec in leaves:
            sizes: list[tuple[int | None, ...]] = [shape]
            if leaf.time and self.layout.groups[leaf.group].ragged:
                sizes = [(None, *shape[1:])]
            if leaf.step:
                sizes.append(shape[1:])
            if spec.dtype != dtype or not any(_fits(each, spec.shape) for each in sizes):
                raise ValueError(
                    f"table {table!r}, leaf {path!r}: got {dtype}{list(shape)}, the signature says "
                    f"{spec.dtype}{list(spec.shape)}."
                )

    def acquire(self, index: np.ndarray) -> None:
        """Counts references of the items with these index lines `[k, width]` to their rows."""
        for stream, begin, end in self.parts:
            stream.acquire(index[:, begin:end].ravel())

    def release(self, index: np.ndarray) -> None:
        """Inverts `acquire`."""
        for stream, begin, end in self.parts:
            stream.release(index[:, begin:end].ravel())

    def clear(self) -> None:
        """Lets go of the columns: there are no items, and there will be none."""
        self.ragged = True  # so that no caller takes all items for items of this layout
        self._plan.clear()
        self.parts.clear()

    def gather(self, index: np.ndarray, out: Out = None) -> list[np.ndarray]:
        """Returns the leaves of the items with index lines `[N, width]`: one copy, into `out` if given."""
        n = len(index)
        rows: list[np.ndarray | None] = [None] * len(self.spans)
        leaves = []
        for at, (group, time, take, dtype, shape) in enumerate(self._plan):
            lines = rows[group]
            if lines is None:
                begin, end = self.spans[group]
                lines = rows[group] = (index[:, begin] if end - begin == 1 else index[:, begin:end]).copy()
            array = np.empty((n, *shape), dtype) if out is None else out[at]
            if out is not None and array.shape != (n, *shape):
                raise ValueError(
                    f"out, leaf {self.paths[at]!r}: got shape {array.shape}, expected {(n, *shape)}."
                )
            # "clip" because "raise" would gather into a buffer first; rows were checked when they came in.
            take(lines, 0, array[:, 0] if time and lines.ndim == 1 else array, "clip")
            leaves.append(array)
        return leaves


# (binding, places, index, lengths) of the m samples of one layout among n: `places` are theirs, int64 `[m]`,
# or None for all in order; `index` is int64 `[m, width]`; `lengths` int32 `[m, groups]`, None if not ragged.
Part = tuple[Binding, np.ndarray | None, np.ndarray, np.ndarray | None]


def gather(table: str, info: SampleInfo, parts: Sequence[Part], out: Out = None, pad: bool = False) -> Sample:
    """Copies the rows of the n samples `parts` of a table into arrays `[n, ...]`.

    Args:
      table: name of the table.
      info: `SampleInfo` of arrays `[n]`.
      parts: the samples, one part for each layout.
      out: arrays for the leaves, in the order of the flattened nest, to copy into; None allocates them.
      pad: whether items of different lengths become a `PaddedSample`; if not, they raise `ValueError`.
    """
    first, n = parts[0][0], len(info.key)
    if len(parts) == 1 and not first.ragged and not pad:
        return ReplaySample(info, first.pack(first.gather(parts[0][2], out)))
    lengths = [np.zeros(n, np.int64) if leaf.time else None for leaf in first.layout.leaves]
    pieces: list[tuple[Any, list[np.ndarray]]] = []
    for binding, places, index, given in parts:
        if (binding.layout.structure, binding.kinds) != (first.layout.structure, first.kinds):
            raise ValueError(
                f"table {table!r}: got items with leaves {binding.paths} and {first.paths} of different "
                "kinds in one batch. Sample them one by one, or keep them in different tables."
            )
        at = slice(None) if places is None else places
        for leaf, each in zip(binding.layout.leaves, lengths, strict=True):
            if each is not None:
                group = binding.layout.groups[leaf.group]
                each[at] = given[:, leaf.group] if given is not None and group.ragged else group.length
        pieces.append((at, binding.gather(index)))
    if not pad and any(each is not None and (each != each[0]).any() for each in lengths):
        named = zip(first.paths, lengths, strict=True)
        shown = {path: np.unique(each).tolist() for path, each in named if each is not None}
        raise ValueError(
            f"table {table!r}: got items of different lengths in one batch, {shown}. Ask for padding, or "
            "sample one by one."
        )
    leaves = []
    for number, ((_, dtype, row), each) in enumerate(zip(first.kinds, lengths, strict=True)):
        shape = (n, *(() if each is None else (int(each.max()),)), *row)
        array = np.empty(shape, dtype) if out is None else out[number]
        if array.shape != shape:
            raise ValueError(f"out, leaf {first.paths[number]!r}: got shape {array.shape}, expected {shape}.")
        for at, gathered in pieces:
            values = gathered[number]
            if each is None:
                array[at] = values
            else:
                array[at, : values.shape[1]] = values[:, : shape[1]]
        if each is not None:
            array[np.arange(shape[1]) >= each[:, None]] = np.zeros((), array.dtype)  # "" for strings, not "0"
        leaves.append(array)
    data = first.pack(leaves)
    return PaddedSample(info, data, first.pack(lengths)) if pad else ReplaySample(info, data)


class Bindings(dict[Layout, int]):
    """The number of each layout of one table's items; a new layout is bound when it is looked up.

    May be used by several threads. A lookup raises `ValueError` as `Binding` does.

    Attributes:
      known: the bindings by number.
    """

    def __init__(self, store: RowStore, table: str, signature: Nest = None):
        super().__init__()
        self._arguments = (store, table, signature)
        self.known: list[Binding] = []
        self._unused: list[int] = []
        self._lock = threading.Lock()

    def __missing__(self, layout: Layout) -> int:
        with self._lock:
            if layout not in self:
                binding = Binding(layout, *self._arguments)
                number = self._unused.pop() if self._unused else len(self.known)
                self.known[number : number + 1] = [binding]
                self[layout] = number
            return self[layout]

    def uses(self, stream: str, column: str) -> bool:
        """Returns whether a layout has this column."""
        with self._lock:
            return any(
                leaf.column == column and layout.groups[leaf.group].stream == stream
                for layout in self
                for leaf in layout.leaves
            )

    def forget(self, stream: str) -> None:
        """Drops the bindings of a stream of whose rows there are no items."""
        with self._lock:
            for layout in [each for each in self if any(part[0] == stream for part in each.parts)]:
                number = self.pop(layout)
                self.known[number].clear()
                self._unused.append(number)


def _fits(shape: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether the sizes are the same; None is any size."""
    return len(shape) == len(wanted) and all(
        size == other or size is None or other is None for size, other in zip(shape, wanted, strict=True)
    )
