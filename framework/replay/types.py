"""The types that replay returns: samples, their information, and descriptions of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from framework import nest as nests
from framework.replay.errors import UnknownTableError
from framework.types import Nest

_T = TypeVar("_T")


class SampleInfo(NamedTuple):
    """Information about one sampled item (Python's numbers) or a batch of them (arrays `[N]`).

    Attributes:
      key: uint64, the item's key in its table.
      probability: float64, the probability with which it was drawn; 1.0 for deterministic selectors.
      table_size: int64, number of items in the table when it was drawn.
      priority: float64, its priority when it was drawn.
      times_sampled: int32, how often it was sampled, including this time.
    """

    key: Any
    probability: Any
    table_size: Any
    priority: Any
    times_sampled: Any


class ReplaySample(NamedTuple):
    """One item or a batch: `info` and the nest that was written, leaves `[...]` or `[N, ...]`."""

    info: SampleInfo
    data: Nest


class PaddedSample(NamedTuple):
    """A batch of items of different lengths, padded with zeros along the time axis.

    `lengths` is a nest like `data`: int64 `[N]` for a leaf with a time axis, None for one without.
    """

    info: SampleInfo
    data: Nest
    lengths: Nest


Sample = ReplaySample | PaddedSample
Drawn = tuple[Sample, Any]  # and the argument for a source's `release` or `give_back`
Out = list[Any] | None  # arrays for the leaves, in the order of the flattened nest; None allocates them


@nests.register_structure
class CallStats(NamedTuple):
    """Counts of one kind of call: `completed` and `pending` (waiting now), and how long they waited."""

    completed: int
    pending: int = 0
    blocked_ms: int = 0


@nests.register_structure
class RateLimiterInfo(NamedTuple):
    """A rate limiter's parameters and its two counters."""

    samples_per_insert: float
    min_diff: float
    max_diff: float
    min_size_to_sample: int
    insert_stats: CallStats
    sample_stats: CallStats


@nests.register_structure
class TableWorkerTime(NamedTuple):
    """Milliseconds that calls spent in a table, under Reverb's names.

    A table has no worker thread here, so the times of a running or sleeping worker are 0.
    """

    running_ms: int = 0
    sampling_ms: int = 0
    inserting_ms: int = 0
    sleeping_ms: int = 0
    waiting_for_sampling_ms: int = 0
    waiting_for_inserts_ms: int = 0


@nests.register_structure
class TableInfo(NamedTuple):
    """The description of one table in `server_info`: Reverb's fields first, then fields of this framework.

    Samples count when they are drawn. `sampled_age` is a sum over all samples: the number of items inserted
    after the sampled item. `why_not_sample` and `why_not_insert` are empty if one more sample or item would
    go through at once. Otherwise they name the rule that refuses it, with its numbers.
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

    def to_wire(self) -> list[Any]:
        """Returns the leaves and the structure; `[shape, dtype, name]` for the leaves of the signature."""
        leaves, structure = nests.flatten(self)
        plain = (int, float, str, type(None))
        return [
            [leaf if type(leaf) in plain else TensorSpec.of(leaf).to_wire() for leaf in leaves],
            structure,
        ]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> TableInfo:
        """Inverts `to_wire`; the signature becomes a nest of `TensorSpec`."""
        leaves, structure = value
        leaves = [TensorSpec.from_wire(*leaf) if isinstance(leaf, list) else leaf for leaf in leaves]
        info: TableInfo = nests.packer(structure)(leaves)
        return info


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a leaf of a signature, as in TensorFlow. A size of None means any size."""

    shape: tuple[int | None, ...]
    dtype: np.dtype
    name: str = ""

    @classmethod
    def of(cls, spec: Any) -> TensorSpec:
        """Returns the spec of an object with `shape` and `dtype`, such as a dm_env spec or an array."""
        shape = tuple([None if size is None else int(size) for size in spec.shape])
        dtype = np.dtype(getattr(spec.dtype, "as_numpy_dtype", spec.dtype))
        return cls(shape, dtype, str(getattr(spec, "name", None) or ""))

    def to_wire(self) -> list[Any]:
        """Returns lists, numbers and strings."""
        return [self.shape, self.dtype.str, self.name]

    @classmethod
    def from_wire(cls, shape: Sequence[int | None], dtype: str, name: str) -> TensorSpec:
        """Inverts `to_wire`."""
        return cls(tuple(shape), np.dtype(dtype), name)


class ByName(dict[str, _T]):
    """Something for each table, by its name; `UnknownTableError` for another name."""

    def __missing__(self, name: str) -> _T:
        raise UnknownTableError(f"table {name!r} was not found; there are {sorted(self)}")


def check_keys(table: str, keys: Any) -> np.ndarray:
    """Returns `keys` of a table's items as uint64 `[n]`.

    Raises:
      ValueError: They are not `[n]`.
      TypeError: They are no integers: floats do not hold all digits of a key, and would find no item.
    """
    array = np.asarray(keys)
    # numpy makes floats of lists of small and large integers.
    listed = isinstance(keys, (list, tuple)) and all(isinstance(key, (int, np.integer)) for key in keys)
    if array.size and array.dtype.kind not in "iu" and not listed:
        raise TypeError(f"table {table!r}, keys: got {array.dtype}, expected integers. Nothing was changed.")
    if array.ndim != 1:
        raise ValueError(
            f"table {table!r}, keys: got shape {array.shape}, expected [n]. Nothing was changed."
        )
    return np.asarray(keys, np.uint64)


def check_priorities(table: str, priorities: Any, n: int) -> np.ndarray:
    """Returns `priorities` of a table's items as float64 `[n]`.

    Raises:
      ValueError: There are not n, or one of them is negative or not finite.
      TypeError: They are text, which numpy would convert.
    """
    array = np.asarray(priorities)
    if array.dtype.kind in "SU":
        raise TypeError(f"priorities: got {array.ravel()[:3].tolist()}, expected numbers.")
    array = array.astype(np.float64, copy=False)
    # The smallest and the largest are NaN if one is NaN.
    if array.shape != (n,) or (
        n and not 0.0 <= np.minimum.reduce(array) <= np.maximum.reduce(array) < np.inf
    ):
        wrong = array[~((array >= 0.0) & (array < np.inf))][:3].tolist()
        raise ValueError(
            f"table {table!r}, priorities: got shape {array.shape} with {wrong}, expected finite numbers "
            f">= 0 of shape ({n},). Nothing was changed."
        )
    return array
