"""Joins batches from several tables or servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from framework import nest as nests
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo


def join(
    samples: Sequence[ReplaySample | PaddedSample], out: list[Any] | None = None
) -> ReplaySample | PaddedSample:
    """Joins batches of the same structure; shorter sequences are padded with zeros.

    Args:
      samples: the batches, at least one.
      out: the joined leaves, if the batches were gathered into parts of them; None copies.

    Raises:
      ValueError: The structures differ.
    """
    first = samples[0]
    if len(samples) == 1:
        return first
    info = SampleInfo(*map(np.concatenate, zip(*[sample.info for sample in samples], strict=True)))
    flat = [nests.flatten(sample.data) for sample in samples]
    if any(structure != flat[0][1] for _, structure in flat):
        raise ValueError(
            f"batches: got items of different structures, {[s for _, s in flat]}, expected equal ones."
        )
    pack = nests.packer(flat[0][1])
    if out is not None:
        return ReplaySample(info, pack(out))
    leaves = [_stack(arrays) for arrays in zip(*[leaves for leaves, _ in flat], strict=True)]
    if not isinstance(first, PaddedSample):
        return ReplaySample(info, pack(leaves))
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
