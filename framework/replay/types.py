"""What replay hands out: samples, their information, and descriptions of tables."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from framework.types import Nest


class SampleInfo(NamedTuple):
    """About one sampled item (scalars), or about a batch of them (arrays ``[N]``).

    Attributes:
      key: uint64, names the item in its table.
      probability: float64, with which it was drawn; 1.0 from selectors that do not draw.
      table_size: int64, items in the table when it was drawn.
      priority: float64, at that time.
      times_sampled: int32, this time included.
    """

    key: Any
    probability: Any
    table_size: Any
    priority: Any
    times_sampled: Any


class ReplaySample(NamedTuple):
    """One item or a batch: ``info`` and the nest that was written, leaves ``[...]`` or ``[N, ...]``."""

    info: SampleInfo
    data: Nest


class PaddedSample(NamedTuple):
    """A batch of items of different lengths, padded with zeros along the time axis.

    ``lengths`` is a nest like ``data`` with int64 ``[N]`` where a leaf has a time axis and None where not.
    """

    info: SampleInfo
    data: Nest
    lengths: Nest


class CallStats(NamedTuple):
    """How often a call went through (``completed``), how many wait now (``pending``), for how long they
    waited."""

    completed: int
    pending: int = 0
    blocked_ms: int = 0


class RateLimiterInfo(NamedTuple):
    """The limiter's numbers and its two counters."""

    samples_per_insert: float
    min_diff: float
    max_diff: float
    min_size_to_sample: int
    insert_stats: CallStats
    sample_stats: CallStats


class TableWorkerTime(NamedTuple):
    """Milliseconds that calls spent in a table. There is no worker thread here, so it is never running or
    asleep."""

    running_ms: int = 0
    sampling_ms: int = 0
    inserting_ms: int = 0
    sleeping_ms: int = 0
    waiting_for_sampling_ms: int = 0
    waiting_for_inserts_ms: int = 0


class TableInfo(NamedTuple):
    """What ``server_info`` says of one table: Reverb's fields first, ours after them.

    Samples count when they are drawn. ``sampled_age`` is the sum, over all samples, of how many items had
    been inserted since the one drawn was. ``why_not_sample`` and ``why_not_insert`` are empty if one more
    would go through at once, and else name the rule that refuses it, with numbers.
    """

    name: str
    sampler_options: dict[str, Any]
    remover_options: dict[str, Any]
    max_size: int
    max_times_sampled: int
    rate_limiter_info: RateLimiterInfo
    signature: Any
    current_size: int
    num_episodes: int
    num_deleted_episodes: int
    num_unique_samples: int
    table_worker_time: TableWorkerTime
    max_priority: float = 1.0
    why_not_sample: str = ""
    why_not_insert: str = ""
    sampled_age: int = 0


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a leaf of a signature; a size of None is open. Like TensorFlow's."""

    shape: tuple[int | None, ...]
    dtype: np.dtype
    name: str = ""

    @classmethod
    def of(cls, spec: Any) -> TensorSpec:
        """The same for anything with `shape` and `dtype`: specs of dm_env or TensorFlow, arrays."""
        shape = tuple([None if size is None else int(size) for size in spec.shape])
        dtype = np.dtype(getattr(spec.dtype, "as_numpy_dtype", spec.dtype))
        return cls(shape, dtype, str(getattr(spec, "name", None) or ""))
