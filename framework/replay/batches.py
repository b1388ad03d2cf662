"""Batches that are joined from several tables or servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.base import BaseSource
from framework.replay.contracts import Source
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo


def join(
    samples: Sequence[ReplaySample | PaddedSample], out: list[Any] | None = None
) -> ReplaySample | PaddedSample:
    """Joins batches of the same structure; shorter sequences of padded batches are padded with zeros.

    Args:
      samples: the batches, at least one.
      out: the joined leaves, if the batches were gathered into parts of them; None copies.

    Raises:
      ValueError: The structures differ, or the shapes of items in batches that are not padded.
    """
    first = samples[0]
    if len(samples) == 1:
        return first
    info = SampleInfo(*map(np.concatenate, zip(*[sample.info for sample in samples], strict=True)))
    flat = [nests.flatten(sample.data) for sample in samples]
    if any(structure != flat[0][1] for _, structure in flat):
        raise ValueError(f"batches: got structures {[s for _, s in flat]} of items, expected equal ones.")
    pack = nests.packer(flat[0][1])
    if out is not None:
        return ReplaySample(info, pack(out))
    columns = list(zip(*[leaves for leaves, _ in flat], strict=True))
    if not isinstance(first, PaddedSample):
        shapes = {tuple(array.shape[1:] for array in leaves) for leaves, _ in flat}
        if len(shapes) > 1:
            raise ValueError(
                "batches: got items of different lengths from several tables or servers, with shapes "
                f"{sorted(shapes)}. Ask for padding, or sample one by one."
            )
        return ReplaySample(info, pack([np.concatenate(arrays) for arrays in columns]))
    leaves = [_stack(arrays) for arrays in columns]
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
        out: list[Any] | None,
        pad: bool,
    ) -> tuple[ReplaySample | PaddedSample, list[tuple[Source, Any]]]:
        """Draws `counts[i]` samples from the source and table `parts[i]`, in order of the parts: all or none.

        The keys of part i have the number i from bit `shift` on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        drawn: list[tuple[Source, Any]] = []
        samples = []
        begin = 0
        try:
            for number in np.flatnonzero(counts).tolist():
                source, table = parts[number]
                end = begin + int(counts[number])
                piece = None if out is None else [array[begin:end] for array in out]
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                sample, part = source.draw(table, end - begin, left, piece, pad)
                drawn.append((source, part))
                key = self.mark_keys(sample.info.key, number, shift)
                samples.append(sample._replace(info=sample.info._replace(key=key)))
                begin = end
            return join(samples, out), drawn
        except BaseException:
            self.give_back(drawn)
            raise

    def mark_keys(self, keys: np.ndarray, number: int, shift: int) -> np.ndarray:
        """Returns `keys` with `number` from bit `shift` on."""
        return keys | (np.uint64(number) << np.uint64(shift))

    def release(self, drawn: list[tuple[Source, Any]]) -> None:
        for source, part in drawn:
            source.release(part)

    def give_back(self, drawn: list[tuple[Source, Any]]) -> None:
        for source, part in drawn:
            source.give_back(part)
