"""How items refer to rows, and how nests are described without pickles.

An item is a nest of leaves; a leaf is a column of a stream at some rows. Leaves with the same rows share a
*group*. The
items of one call have one `Layout`; what differs between them is one line of an index matrix:

```python
Layout.groups   ("steps", 1)        ("steps", 1)
index[k]        row of time t       row of time t+1         # width = 2
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from framework import nest as nests
from framework.types import Nest


@dataclasses.dataclass(slots=True, eq=False)
class Slice:
    """One leaf of a trajectory: `column` of `stream` at `rows`, int64 `[k]` or `[k, L]` for k items.

    Attributes:
      lengths: int `[k]`, for rows `[k, L]` only: how many of the L rows of each item count. The rest are
        padding and repeat a row that does.
      step: whether the table's signature may describe one step of it, as for Reverb's older writer.
    """

    stream: str
    column: str
    rows: np.ndarray
    lengths: np.ndarray | None = None
    step: bool = False


class Group(NamedTuple):
    """`length` rows of `stream`; `ragged` if each item says how many of them count."""

    stream: str
    length: int
    ragged: bool = False


class Leaf(NamedTuple):
    """`column` of `groups[group]`; `time` if the leaf keeps a time axis; for `step` see `Slice`."""

    column: str
    group: int
    time: bool
    step: bool = False


class Layout(NamedTuple):
    """What all items of one kind have in common; `structure` is that of `framework.nest`, frozen."""

    groups: tuple[Group, ...]
    leaves: tuple[Leaf, ...]
    structure: Any  # tuples all the way, so that layouts hash

    @property
    def width(self) -> int:
        """Rows of one item over all groups."""
        return sum(group.length for group in self.groups)

    @property
    def offsets(self) -> list[int]:
        """Where each group begins in a line of the index matrix."""
        offsets, at = [], 0
        for group in self.groups:
            offsets.append(at)
            at += group.length
        return offsets

    def to_wire(self) -> list[Any]:
        """Lists, strings, numbers and booleans only."""
        return [
            [list(g) for g in self.groups],
            [list(leaf) for leaf in self.leaves],
            nests.thaw(self.structure),
        ]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> Layout:
        """The opposite of `to_wire`; ValueError if it is not sound."""
        groups = tuple(Group(str(s), int(n), bool(r)) for s, n, r in value[0])
        leaves = tuple(Leaf(str(c), int(g), bool(t), bool(s)) for c, g, t, s in value[1])
        layout = cls(groups, leaves, nests.freeze(value[2]))
        if any(group.length < 1 for group in groups) or any(
            not 0 <= leaf.group < len(groups) or (not leaf.time and groups[leaf.group].length != 1)
            for leaf in leaves
        ):
            raise ValueError(f"layout: got groups {groups} and leaves {leaves}, which do not fit together")
        if len(nests.paths(nests.thaw(layout.structure))) != len(leaves):
            raise ValueError(f"layout: the structure does not have {len(leaves)} leaves: {value[2]}")
        return layout


def pack_function(layout: Layout) -> Callable[[Sequence[Any]], Nest]:
    """`nest.packer` for a layout's structure."""
    return nests.packer(nests.thaw(layout.structure))


def layout_paths(layout: Layout) -> list[str]:
    """`nest.paths` for a layout's structure."""
    return nests.paths(nests.thaw(layout.structure))


class LayoutBuilder:
    """Turns nests of `Slice` into layouts and index matrices; remembers layouts, so one per writer."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Layout, int, bool]] = {}  # with its width, and whether it is ragged

    def build(self, trajectory: Nest) -> tuple[Layout, np.ndarray, np.ndarray | None]:
        """The layout of k items, their index int64 `[k, width]`, and lengths int32 `[k, groups]` if ragged.

        Raises:
          ValueError: the nest has no leaves, or the leaves are not for the same number of items.
        """
        slices: list[Slice] = []
        shape = _signature(trajectory, slices)
        if not slices:
            raise ValueError("trajectory: got a nest without leaves, expected at least one writer.slice(...)")
        arrays: list[np.ndarray] = []
        group_of: dict[tuple[str, int], int] = {}
        lengths: list[np.ndarray | None] = []
        leaves = []
        for leaf in slices:
            rows = leaf.rows
            at = group_of.get((leaf.stream, id(rows)))
            if at is None or lengths[at] is not leaf.lengths:
                at = group_of[(leaf.stream, id(rows))] = len(arrays)
                arrays.append(rows)
                lengths.append(leaf.lengths)
            leaves.append((leaf.stream, leaf.column, at, rows.shape[1:], leaf.lengths is not None, leaf.step))
        key = (shape, tuple(leaves))
        known = self._known.get(key)
        if known is None:
            layout = self._make(trajectory, slices, arrays, lengths, leaves)
            ragged = any(group.ragged for group in layout.groups)
            known = self._known[key] = (layout, layout.width, ragged)
        layout, width, ragged = known
        items = len(arrays[0])
        if width == 1 and not ragged:
            return layout, arrays[0].reshape(-1, 1).copy(), None
        index = np.empty((items, width), np.int64)
        at = 0
        for group, rows in zip(layout.groups, arrays, strict=True):
            if len(rows) != items:
                raise ValueError(
                    f"trajectory: got rows for {len(rows)} items in one leaf and {items} in another"
                )
            if rows.ndim == 1:
                index[:, at] = rows
            else:
                index[:, at : at + group.length] = rows
            at += group.length
        if not ragged:
            return layout, index, None
        table = np.empty((items, len(layout.groups)), np.int32)
        for at, (group, given) in enumerate(zip(layout.groups, lengths, strict=True)):
            table[:, at] = group.length if given is None else given
            if (
                given is not None
                and items
                and not (1 <= table[:, at].min() <= table[:, at].max() <= group.length)
            ):
                raise ValueError(
                    f"lengths: got {given}, expected 1 to {group.length} for each of {items} items"
                )
        return layout, index, table

    def _make(self, trajectory: Nest, slices: list, arrays: list, lengths: list, leaves: list) -> Layout:
        for leaf in slices:
            if leaf.rows.ndim not in (1, 2) or (leaf.rows.ndim == 2 and not leaf.rows.shape[1]):
                raise ValueError(
                    f"slice of column {leaf.column!r}: got rows of shape {leaf.rows.shape}, expected "
                    "[k] or [k, L > 0]"
                )
            if leaf.lengths is not None and leaf.rows.ndim != 2:
                raise ValueError(f"slice of column {leaf.column!r}: lengths need rows [k, L], got [k]")
        _, structure = nests.flatten(trajectory, Slice)
        groups: dict[int, Group] = {}
        for stream, _, at, tail, ragged, _ in leaves:
            groups[at] = Group(stream, tail[0] if tail else 1, ragged)
        return Layout(
            tuple(groups[at] for at in range(len(arrays))),
            tuple(Leaf(column, at, bool(tail), step) for _, column, at, tail, _, step in leaves),
            nests.freeze(structure),
        )


def _signature(nest: Any, leaves: list[Slice]) -> Any:
    """A hashable that is equal for nests of the same structure; collects the leaves on the way."""
    kind = type(nest)
    if kind is Slice:
        leaves.append(nest)
        return None
    if isinstance(nest, tuple):
        return (kind, *[_signature(child, leaves) for child in nest])
    if kind is dict:
        keys = sorted(nest)
        return (kind, *keys, *[_signature(nest[key], leaves) for key in keys])
    if kind is list:
        return (kind, *[_signature(child, leaves) for child in nest])
    raise ValueError(
        f"trajectory: got {kind.__name__} at a leaf, expected writer.slice(stream, column, rows)"
    )
