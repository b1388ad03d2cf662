"""Samples on their way from a table to a reader."""

from __future__ import annotations

from typing import Any

import numpy as np

from framework.replay.rows.binding import Binding
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo


class Delivery:
    """``n`` samples of a table: counted, with their rows pinned until they are released or given back.

    ::

        delivery = table.sample(256, timeout=1.0)   # drawn: nobody else gets these turns
        sample = delivery.gather()                  # or: send delivery.parts to a reader with shared memory
        table.release(delivery)                     # the rows may be used again; or
        table.give_back(delivery)                   # as if never drawn

    Attributes:
      info: ``SampleInfo`` of arrays ``[n]``.
      slots: the table's own names of the items, int64 ``[n]``.
      parts: ``[(binding, places, index, lengths)]``, one for each layout: ``places`` int64 ``[m]`` or None
      for all in order,
        ``index`` int64 ``[m, width]``, ``lengths`` int32 ``[m, groups]`` or None.
    """

    __slots__ = ("age", "epoch", "info", "open", "parts", "pinned", "slots", "table")

    def __init__(
        self,
        table: str,
        info: SampleInfo,
        slots: np.ndarray,
        parts: list[tuple],
        epoch: int = 0,
        age: int = 0,
    ):
        self.table = table
        self.info = info
        self.slots = slots
        self.parts = parts
        self.epoch = epoch  # of the table; a reset begins another
        self.age = age  # see ``TableInfo.sampled_age``
        self.open = True  # neither released nor given back
        self.pinned = False

    def __len__(self) -> int:
        return len(self.slots)

    def pin(self) -> None:
        """Holds the rows, whatever becomes of the items."""
        for binding, _, index, _ in self.parts:
            binding.acquire(index)
        self.pinned = True

    def unpin(self) -> None:
        """Lets the rows go. May be called twice."""
        if self.pinned:
            self.pinned = False
            for binding, _, index, _ in self.parts:
                binding.drop(index)

    def joined(self, other: Delivery) -> Delivery:
        """One delivery of this and then ``other``, which both end."""
        info = SampleInfo(*map(np.concatenate, zip(self.info, other.info, strict=True)))
        found: dict[int, tuple[Binding, list[tuple]]] = {}
        for begin, parts in ((0, self.parts), (len(self), other.parts)):
            for binding, places, index, lengths in parts:
                at = begin + (np.arange(len(index)) if places is None else places)
                found.setdefault(id(binding), (binding, []))[1].append((at, index, lengths))
        joined = []
        for binding, pieces in found.values():
            places, index, lengths = zip(*pieces, strict=True)
            joined.append(
                (
                    binding,
                    np.concatenate(places) if len(found) > 1 else None,
                    np.concatenate(index),
                    None if lengths[0] is None else np.concatenate(lengths),
                )
            )
        result = Delivery(
            self.table,
            info,
            np.concatenate([self.slots, other.slots]),
            joined,
            self.epoch,
            self.age + other.age,
        )
        result.pinned = True  # their pins are its own now
        self.open = other.open = self.pinned = other.pinned = False
        return result

    def gather(self, out: list[Any] | None = None, pad: bool = False) -> ReplaySample | PaddedSample:
        """Copies the rows into arrays ``[n, ...]``.

        Args:
          out: arrays for the leaves, in the order of the flattened nest, to copy into.
          pad: items of different lengths become a ``PaddedSample``; without it they are a ValueError.
        """
        return gather_parts(self.table, self.info, len(self.slots), self.parts, out, pad)


def gather_parts(
    table: str, info: SampleInfo, n: int, parts: list[tuple], out: list[Any] | None = None, pad: bool = False
) -> ReplaySample | PaddedSample:
    """What ``Delivery.gather`` does."""
    binding: Binding
    if len(parts) == 1 and not parts[0][0].ragged and not pad:
        binding, _, index, _ = parts[0]
        return ReplaySample(info, binding.pack(binding.gather(index, out)))
    first: Binding = parts[0][0]
    structure = first.layout.structure
    times = [leaf.time for leaf in first.layout.leaves]
    for binding, *_ in parts[1:]:
        same = (
            binding.layout.structure == structure
            and [leaf.time for leaf in binding.layout.leaves] == times
            and all(
                a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
                for a, b in zip(binding.columns, first.columns, strict=True)
            )
        )
        if not same:
            raise ValueError(
                f"table {table!r}: got items with leaves {binding.paths} and {first.paths} of "
                "different kinds in one batch; "
                "sample them one by one, or keep them in different tables"
            )
    lengths = [np.zeros(n, np.int64) if time else None for time in times]
    pieces = []
    for binding, places, index, given in parts:
        at = np.arange(n) if places is None else places
        for total, part in zip(lengths, binding.leaf_lengths(given, len(at)), strict=True):
            if total is not None and part is not None:
                total[at] = part
        pieces.append((at, binding.gather(index)))
    if not pad and any(each is not None and (each != each[0]).any() for each in lengths):
        shown = {
            p: np.unique(each).tolist()
            for p, each in zip(first.paths, lengths, strict=True)
            if each is not None
        }
        raise ValueError(
            f"table {table!r}: got items of different lengths in one batch, {shown}; ask for padding, "
            "or sample one by one"
        )
    leaves = []
    for at_leaf, (column, each) in enumerate(zip(first.columns, lengths, strict=True)):
        lead: tuple[int, ...] = () if each is None else (int(each.max()),)
        shape = (n, *lead, *column.shape[1:])
        array = np.zeros(shape, column.dtype) if out is None else out[at_leaf]
        if array.shape != shape:
            raise ValueError(f"out, leaf {first.paths[at_leaf]!r}: got shape {array.shape}, expected {shape}")
        for at, piece in pieces:
            if each is None:
                array[at] = piece[at_leaf]
                continue
            length = min(piece[at_leaf].shape[1], lead[0])
            valid = np.arange(length) < each[at][:, None]
            valid = valid.reshape(*valid.shape, *[1] * (array.ndim - 2))
            block = np.zeros((len(at), *array.shape[1:]), array.dtype)
            block[:, :length] = np.where(valid, piece[at_leaf][:, :length], np.zeros((), array.dtype))
            array[at] = block
        leaves.append(array)
    data = first.pack(leaves)
    return PaddedSample(info, data, first.pack(lengths)) if pad else ReplaySample(info, data)
