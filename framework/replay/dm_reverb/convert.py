"""Conversion of tables to dm-reverb's, and of its descriptions and samples to this framework's types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import reverb
import tensorflow as tf

from framework import nest as nests
from framework.replay.tables.rate_limiters import RateLimiter
from framework.replay.types import (
    CallStats,
    Out,
    PaddedSample,
    RateLimiterInfo,
    ReplaySample,
    Sample,
    SampleInfo,
    TableInfo,
    TableWorkerTime,
    TensorSpec,
)
from framework.types import Nest

# The dtypes of the fields of `SampleInfo`.
_INFO = (np.uint64, np.float64, np.int64, np.float64, np.int32)


def to_native_table(table: Any) -> Any:
    """Returns the `reverb.Table` that is equivalent to a `Table`; returns a `reverb.Table` unchanged.

    Raises:
      ValueError: The table has a selector that dm-reverb does not have.
    """
    if isinstance(table, reverb.Table):
        return table
    limiter = table.rate_limiter
    return reverb.Table(
        name=table.name,
        sampler=_native_selector(table.name, table.sampler),
        remover=_native_selector(table.name, table.remover),
        max_size=table.max_size,
        max_times_sampled=table.max_times_sampled,
        rate_limiter=reverb.rate_limiters.RateLimiter(
            limiter.samples_per_insert, limiter.min_size_to_sample, limiter.min_diff, limiter.max_diff
        ),
        signature=None if table.signature is None else _native_signature(table.signature),
    )


def _native_selector(table: str, selector: Any) -> Any:
    kind = type(selector).__name__
    if kind not in ("Uniform", "Fifo", "Lifo", "MinHeap", "MaxHeap", "Prioritized"):
        raise ValueError(
            f"table {table!r}: got a selector {kind}, expected one that dm-reverb has: Uniform, Fifo, Lifo, "
            "MinHeap, MaxHeap or Prioritized."
        )
    return getattr(reverb.selectors, kind)(**selector.options)


def _native_signature(signature: Nest) -> Nest:
    leaves, structure = nests.flatten(signature)
    specs = [TensorSpec.of(leaf) for leaf in leaves]
    return nests.packer(structure)(
        [tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype), spec.name or None) for spec in specs]
    )


def _selector_options(options: Any) -> dict[str, Any]:
    """Returns a `KeyDistributionOptions` message in the format of `TableInfo`."""
    chosen = options.WhichOneof("distribution")
    if chosen == "heap":
        return {"kind": "MinHeap" if options.heap.min_heap else "MaxHeap"}
    if chosen == "prioritized":
        return {"kind": "Prioritized", "priority_exponent": options.prioritized.priority_exponent}
    return {"kind": str(chosen).capitalize()}


def to_info(native: Any, max_priority: float) -> TableInfo:
    """Returns dm-reverb's description as a `TableInfo`; `max_priority` is the largest this client knows."""
    limiter, times = native.rate_limiter_info, native.table_worker_time
    described = {
        **vars(native),
        "sampler_options": _selector_options(native.sampler_options),
        "remover_options": _selector_options(native.remover_options),
        "max_times_sampled": max(0, native.max_times_sampled),
        "rate_limiter_info": RateLimiterInfo(
            limiter.samples_per_insert,
            limiter.min_diff,
            limiter.max_diff,
            limiter.min_size_to_sample,
            CallStats(limiter.insert_stats.completed),
            CallStats(limiter.sample_stats.completed),
        ),
        "table_worker_time": TableWorkerTime(
            *[int(getattr(times, name)) for name in TableWorkerTime._fields]
        ),
    }
    info = TableInfo(**described, max_priority=max_priority)
    why_not_sample, why_not_insert = limiter_of(info).refusals()
    return info._replace(why_not_sample=why_not_sample, why_not_insert=why_not_insert)


def limiter_of(info: TableInfo) -> RateLimiter:
    """Returns a rate limiter in the state of a description, to compute what it allows."""
    rules = info.rate_limiter_info
    limiter = RateLimiter(rules.samples_per_insert, rules.min_size_to_sample, rules.min_diff, rules.max_diff)
    limiter.inserts, limiter.samples = rules.insert_stats.completed, rules.sample_stats.completed
    limiter.size = info.current_size
    return limiter


def samples_to_be_had(info: TableInfo, n: int, certain: bool) -> int:
    """Returns how many of `n` samples the table would give now.

    Items that are removed after their last sample can reduce the table below its minimum size. dm-reverb does
    not report how often each item was sampled, so the result is a lower bound if `certain`, else an upper
    bound.
    """
    allowed = limiter_of(info).allowed_samples(n)
    if info.max_times_sampled and allowed:
        spare = info.current_size - info.rate_limiter_info.min_size_to_sample + 1
        allowed = min(allowed, spare if certain else spare * info.max_times_sampled)
    return max(0, allowed)


def draw(client: Any, table: str, n: int) -> list[Any]:
    """Draws n samples with the `reverb.Client`; waits for them without a limit.

    `reverb.Client.sample` keeps one sample in flight, so each takes a round trip; it has no option for
    that. With a buffer of n, a batch of 128 takes a third of the time. The server counts n samples, not more.
    """
    sampler = client._client.NewSampler(table, n, n)
    drawn = [sampler.GetNextTrajectory() for _ in range(n)]
    return [reverb.ReplaySample(reverb.SampleInfo(*each[:5]), each[5:]) for each in drawn]


def stack(table: str, samples: Sequence[Any], signature: Nest, out: Out, pad: bool) -> Sample:
    """Returns a batch of samples of `reverb.Client.sample(emit_timesteps=False)`; see `rows.layout.gather`.

    Raises:
      ValueError: The items differ in structure, differ in length without `pad`, or do not fit `out`.
    """
    fields = zip(*[sample.info for sample in samples], strict=True)
    info = SampleInfo(*[np.array(field, kind) for field, kind in zip(fields, _INFO, strict=True)])
    data = [sample.data for sample in samples]
    if signature is not None:
        structure = nests.flatten(signature)[1]
    else:
        first = data[0][0]
        if first.dtype != np.uint8 or any(not np.array_equal(leaves[0], first) for leaves in data):
            raise ValueError(
                f"table {table!r}: got items of different structure in one batch, or items that this "
                "writer did not write. Give the table a signature, or keep them in different tables."
            )
        structure, data = json.loads(first.tobytes()), [leaves[1:] for leaves in data]
    pack = nests.packer(structure)
    leaves, lengths = [], []
    for number, arrays in enumerate(zip(*data, strict=True)):
        sizes = [array.shape[:1] for array in arrays]  # () without a time axis
        longest = max(sizes)
        if not pad and min(sizes) != longest:
            raise ValueError(
                f"table {table!r}: got items of different lengths in one batch, {np.unique(sizes).tolist()}. "
                "Ask for padding, or sample one by one."
            )
        shape = (len(arrays), *longest, *arrays[0].shape[1:])
        if out is not None and out[number].shape != shape:
            raise ValueError(f"out, leaf {number}: got shape {out[number].shape}, expected {shape}.")
        total = np.zeros(shape, arrays[0].dtype) if out is None else out[number]
        for item, array in enumerate(arrays):
            total[(item, slice(len(array))) if longest else item] = array
        leaves.append(total)
        lengths.append(np.array(sizes, np.int64).ravel() if longest else None)
    if pad:
        return PaddedSample(info, pack(leaves), pack(lengths))
    return ReplaySample(info, pack(leaves))
