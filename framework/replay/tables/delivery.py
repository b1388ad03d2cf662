"""Samples on their way from a table to a reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.replay.rows.layout import Binding
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo

# (binding, places, index, lengths) of the samples of one layout; see `Delivery`.
Part = tuple[Binding, np.ndarray | None, np.ndarray, np.ndarray | None]


@dataclasses.dataclass(slots=True, eq=False)
class Delivery:
    """`n` samples of a table: counted, and their rows kept until they are released or given back.

    ```python
    delivery = table.sample(256, timeout=1.0)   # drawn: no other reader gets these turns
    sample = delivery.gather()                  # or: send delivery.parts to a reader with shared memory
    table.release(delivery)                     # the rows may be used again; or
    table.give_back(delivery)                   # as if never drawn
    ```

    Attributes:
      table: name of the table.
      info: `SampleInfo` of arrays `[n]`.
      slots: the table's own numbers of the items, int64 `[n]`.
      parts: `[(binding, places, index, lengths)]`, one for each layout. `places` are those of its m samples
        among the n, int64 `[m]`, or None for all in order; `index` is int64 `[m, width]`; `lengths` is int32
        `[m, groups]`, or None if the layout is not ragged.
      contents: what the samples were drawn from; a reset of the table makes other contents.
      age: how many items came after those drawn; see `TableInfo.sampled_age`.
      open: whether the delivery was neither released nor given back.
    """

    table: str
    info: SampleInfo
    slots: np.ndarray
    parts: list[Part]
    contents: Any
    age: int
    open: bool = True

    def __len__(self) -> int:
        return len(self.slots)

    def gather(
        self, out: Sequence[np.ndarray] | None = None, pad: bool = False
    ) -> ReplaySample | PaddedSample:
        """Copies the rows into arrays `[n, ...]`.

        Args:
          out: arrays for the leaves, in the order of the flattened nest, to copy into.
          pad: items of different lengths become a `PaddedSample`; without it they are a ValueError.
        """
        return gather_parts(self.table, self.info, len(self.slots), self.parts, out, pad)


def join(first: Delivery, second: Delivery) -> Delivery:
    """One delivery of two of the same contents, which both end."""
    info = SampleInfo(*map(np.concatenate, zip(first.info, second.info, strict=True)))
    found: dict[int, list[tuple[Binding, np.ndarray, np.ndarray, np.ndarray | None]]] = {}
    for begin, parts in ((0, first.parts), (len(first), second.parts)):
        for binding, places, index, lengths in parts:
            at = begin + (np.arange(len(index)) if places is None else places)
            found.setdefault(id(binding), []).append((binding, at, index, lengths))
    joined: list[Part] = []
    for pieces in found.values():
        bindings, places, index, lengths = zip(*pieces, strict=True)
        joined.append(
            (
                bindings[0],
                np.concatenate(places) if len(found) > 1 else None,
                np.concatenate(index),
                np.concatenate(lengths) if bindings[0].ragged else None,
            )
        )
    first.open = second.open = False
    slots = np.concatenate([first.slots, second.slots])
    return Delivery(first.table, info, slots, joined, first.contents, first.age + second.age)


def gather_parts(
    table: str,
    info: SampleInfo,
    n: int,
    parts: Sequence[Part],
    out: Sequence[np.ndarray] | None = None,
    pad: bool = False,
) -> ReplaySample | PaddedSample:
    """See `Delivery.gather`."""
    first = parts[0][0]
    if len(parts) == 1 and not first.ragged and not pad:
        return ReplaySample(info, first.pack(first.gather(parts[0][2], out)))
    lengths = [np.zeros(n, np.int64) if leaf.time else None for leaf in first.layout.leaves]
    pieces: list[tuple[Any, Binding, list[np.ndarray]]] = []
    for binding, places, index, given in parts:
        if not binding.is_like(first):
            raise ValueError(
                f"table {table!r}: got items with leaves {binding.paths} and {first.paths} of different "
                "kinds in one batch; sample them one by one, or keep them in different tables"
            )
        at = slice(None) if places is None else places
        for total, part in zip(lengths, binding.leaf_lengths(given), strict=True):
            if total is not None and part is not None:
                total[at] = part
        pieces.append((at, binding, binding.gather(index)))
    if not pad and any(each is not None and (each != each[0]).any() for each in lengths):
        shown = {
            path: np.unique(each).tolist()
            for path, each in zip(first.paths, lengths, strict=True)
            if each is not None
        }
        raise ValueError(
            f"table {table!r}: got items of different lengths in one batch, {shown}; ask for padding, or "
            "sample one by one"
        )
    leaves = []
    for leaf, (column, each) in enumerate(zip(first.columns, lengths, strict=True)):
        shape = (n, *(() if each is None else (int(each.max()),)), *column.shape[1:])
        array = np.empty(shape, column.dtype) if out is None else out[leaf]
        if array.shape != shape:
            raise ValueError(f"out, leaf {first.paths[leaf]!r}: got shape {array.shape}, expected {shape}")
        for at, binding, gathered in pieces:
            values = gathered[leaf]
            if each is not None:
                values = values[:, : shape[1]]
                array[at, values.shape[1] :] = 0
                if binding.ragged:
                    valid = np.arange(values.shape[1]) < each[at][:, None]
                    values = np.where(valid.reshape(*valid.shape, *[1] * (values.ndim - 2)), values, 0)
                array[at, : values.shape[1]] = values
            else:
                array[at] = values
        leaves.append(array)
    data = first.pack(leaves)
    return PaddedSample(info, data, first.pack(lengths)) if pad else ReplaySample(info, data)
