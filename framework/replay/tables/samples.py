"""Samples on their way from a table to a reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.replay.rows.layout import Binding
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo

# (binding, places, index, lengths) of the samples of one layout; see `Samples`.
Part = tuple[Binding, np.ndarray | None, np.ndarray, np.ndarray | None]


@dataclasses.dataclass(slots=True, eq=False)
class Samples:
    """`n` samples of a table, by the numbers of their rows.

    Attributes:
      table: name of the table.
      info: `SampleInfo` of arrays `[n]`.
      parts: `[(binding, places, index, lengths)]`, one for each layout. `places` are those of its m samples
        among the n, int64 `[m]`, or None for all in order; `index` is int64 `[m, width]`; `lengths` is int32
        `[m, groups]`, or None if the layout is not ragged.
    """

    table: str
    info: SampleInfo
    parts: Sequence[Part]

    def gather(
        self, out: Sequence[np.ndarray] | None = None, pad: bool = False
    ) -> ReplaySample | PaddedSample:
        """Copies the rows into arrays `[n, ...]`.

        Args:
          out: arrays for the leaves, in the order of the flattened nest, to copy into.
          pad: whether items of different lengths become a `PaddedSample`; if not, they raise `ValueError`.
        """
        first, n = self.parts[0][0], len(self.info.key)
        if len(self.parts) == 1 and not first.ragged and not pad:
            return ReplaySample(self.info, first.pack(first.gather(self.parts[0][2], out)))
        lengths = [np.zeros(n, np.int64) if leaf.time else None for leaf in first.layout.leaves]
        pieces: list[tuple[Any, Binding, list[np.ndarray]]] = []
        for binding, places, index, given in self.parts:
            if not binding.is_like(first):
                raise ValueError(
                    f"table {self.table!r}: got items with leaves {binding.paths} and {first.paths} of "
                    "different kinds in one batch; sample them one by one, or keep them in different tables"
                )
            at = slice(None) if places is None else places
            for total, part in zip(lengths, binding.leaf_lengths(given), strict=True):
                if total is not None and part is not None:
                    total[at] = part
            pieces.append((at, binding, binding.gather(index)))
        if not pad and any(each is not None and (each != each[0]).any() for each in lengths):
            named = zip(first.paths, lengths, strict=True)
            shown = {path: np.unique(each).tolist() for path, each in named if each is not None}
            raise ValueError(
                f"table {self.table!r}: got items of different lengths in one batch, {shown}; ask for "
                "padding, or sample one by one"
            )
        leaves = []
        for leaf, (column, each) in enumerate(zip(first.columns, lengths, strict=True)):
            shape = (n, *(() if each is None else (int(each.max()),)), *column.shape[1:])
            array = np.empty(shape, column.dtype) if out is None else out[leaf]
            if array.shape != shape:
                raise ValueError(
                    f"out, leaf {first.paths[leaf]!r}: got shape {array.shape}, expected {shape}"
                )
            for at, binding, gathered in pieces:
                values = gathered[leaf]
                if each is None:
                    array[at] = values
                    continue
                values = values[:, : shape[1]]
                array[at, values.shape[1] :] = 0
                if binding.ragged:
                    valid = np.arange(values.shape[1]) < each[at][:, None]
                    values = np.where(valid.reshape(*valid.shape, *[1] * (values.ndim - 2)), values, 0)
                array[at, : values.shape[1]] = values
            leaves.append(array)
        data = first.pack(leaves)
        return PaddedSample(self.info, data, first.pack(lengths)) if pad else ReplaySample(self.info, data)
