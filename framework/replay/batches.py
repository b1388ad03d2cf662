"""Batches that are joined from several tables or servers."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.base import BaseSource
from framework.replay.contracts import Source
from framework.replay.types import Drawn, Out, PaddedSample, ReplaySample, Sample, SampleInfo


class Piece(list[np.ndarray]):
    """A part of a batch, for `join`: the arrays of its `SampleInfo`, and then the leaves of its items.

    Attributes:
      structure: the structure of the items.
      pack: makes a nest of leaves.
    """

    def __init__(
        self, arrays: Iterable[np.ndarray], structure: nests.Structure, pack: nests.Pack | None = None
    ) -> None:
        super().__init__(arrays)
        self.structure = structure
        self.pack = pack or nests.packer(structure)

    @classmethod
    def of(cls, sample: Sample | Piece) -> Piece:
        """Returns a batch as a piece."""
        if isinstance(sample, Piece):
            return sample
        leaves, structure = nests.flatten(sample.data)
        return Piece([*sample.info, *leaves], structure)

    def part(self, begin: int, end: int) -> Piece:
        """Returns samples `begin` to `end`."""
        return Piece([each[begin:end] for each in self], self.structure, self.pack)


_INFO = len(SampleInfo._fields)


def join(samples: Sequence[Sample | Piece], out: Out = None) -> Sample:
    """Joins batches of the same structure; shorter sequences of padded batches are padded with zeros.

    Args:
      samples: the batches, at least one.
      out: the joined leaves, if the batches were gathered into parts of them; None copies.

    Raises:
      ValueError: The structures differ, or the shapes of items in batches that are not padded.
    """
    first = samples[0]
    if len(samples) == 1 and not isinstance(first, Piece):
        return first
    pieces = [Piece.of(sample) for sample in samples]
    structure, pack = pieces[0].structure, pieces[0].pack
    if any(piece.structure != structure for piece in pieces):
        structures = [piece.structure for piece in pieces]
        raise ValueError(f"batches: got structures {structures} of items, expected equal ones.")
    columns = list(zip(*pieces, strict=True))
    info = SampleInfo(*map(np.concatenate, columns[:_INFO]))
    if out is not None:
        return ReplaySample(info, pack(out))
    if not isinstance(first, PaddedSample):
        try:
            return ReplaySample(info, pack([np.concatenate(arrays) for arrays in columns[_INFO:]]))
        except ValueError:
            shapes = sorted({tuple(array.shape[1:] for array in piece[_INFO:]) for piece in pieces})
            raise ValueError(
                "batches: got items of different lengths from several tables or servers, with shapes "
                f"{shapes}. Ask for padding, or sample one by one."
            ) from None
    leaves = [_stack(arrays) for arrays in columns[_INFO:]]
    lengths = [nests.flatten(sample.lengths)[0] for sample in samples if isinstance(sample, PaddedSample)]
    joined = [None if each[0] is None else np.concatenate(each) for each in zip(*lengths, strict=True)]
    return PaddedSample(info, pack(leaves), pack(joined))


def _stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if len({array.shape[1:] for array in arrays}) == 1 or arrays[0].ndim < 2:
        return np.concatenate(arrays)
    length = max(array.shape[1] for array in arrays)
    total = np.zeros((sum(map(len, arrays)), length, *arrays[0].shape[2:]), arrays[0].dtype)
    begin = 0
    for array in arrays:
        total[begin : begin + len(array), : array.shape[1]] = array
        begin += len(array)
    return total


class JoinedSource(BaseSource):
    """A source whose batches are joined from several draws; see `contracts.Source`.

    `drawn` is a list of sources, each with what its `draw` returned.
    """

    def draw_parts(
        self,
        parts: Sequence[tuple[Source, str]],
        counts: np.ndarray,
        shift: int,
        timeout: float | None,
        out: Out,
        pad: bool,
    ) -> Drawn:
        """Draws `counts[i]` samples from the source and table `parts[i]`, in order of the parts: all or none.

        All sources are asked before the first answer is waited for. The keys of part i have the number i from
        bit `shift` on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        drawn: list[tuple[Source, Any]] = []
        asked: collections.deque[tuple[Source, Any]] = collections.deque()
        samples = []
        begin = 0
        numbers = np.flatnonzero(counts).tolist()
        try:
            for number in numbers:
                source, table = parts[number]
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                asked.append((source, source.ask(table, int(counts[number]), left, pad)))
            for number in numbers:
                end = begin + int(counts[number])
                piece = None if out is None else [array[begin:end] for array in out]
                source, question = asked.popleft()
                pieces, part = source.answer(question, piece)
                drawn.append((source, part))
                samples += pieces
                begin = end
            sample = join(samples, out)
            key = self.mark_keys(sample.info.key, np.repeat(np.arange(len(counts)), counts), shift)
            return sample._replace(info=sample.info._replace(key=key)), drawn
        except BaseException:
            for source, question in asked:
                source.drop(question)
            self.give_back(drawn)
            raise

    def mark_keys(self, keys: np.ndarray, numbers: np.ndarray, shift: int) -> np.ndarray:
        """Returns `keys` with `numbers` from bit `shift` on."""
        return keys | (numbers.astype(np.uint64) << np.uint64(shift))

    def release(self, drawn: list[tuple[Source, Any]]) -> None:
        for source, part in drawn:
            source.release(part)

    def give_back(self, drawn: list[tuple[Source, Any]]) -> None:
        for source, part in drawn:
            source.give_back(part)
