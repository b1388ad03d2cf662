"""`as_tf`: batches from replay as a `tf.data.Dataset`.

```python
dataset = datasets.as_tf(client, "replay", batch_size=256)
for sample in dataset:                                    # ReplaySample of TensorFlow's tensors, [N, ...]
    priorities = train(sample.data)
    client.update_priorities("replay", sample.info.key.numpy(), priorities.numpy())
```

A loop outside of a `tf.function` gets tensors that lie where `Dataset` gathered the batch. A `tf.function`
and transformations such as `map` get the same batches through `tf.data.Dataset.from_generator`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from framework import nest as nests
from framework.config_checks import whole_number
from framework.datasets.dataset import Dataset
from framework.datasets.transfer import AlignedTransfer
from framework.replay.contracts import ReplayClient
from framework.replay.types import ReplaySample, SampleInfo, TensorSpec
from framework.types import Nest

# The dtypes of the fields of `SampleInfo`, as in dm-reverb.
_INFO = tuple(map(np.dtype, (np.uint64, np.float64, np.int64, np.float64, np.int32)))


def as_tf(
    client: ReplayClient,
    table: str,
    *,
    batch_size: int | None,
    signature: Nest | None = None,
    prefetch_size: int | None = None,
    max_in_flight_samples_per_worker: int | None = None,
    rate_limiter_timeout_ms: int = -1,
    max_samples: int = -1,
    num_workers_per_iterator: int = -1,
    max_samples_per_stream: int = -1,
    get_signature_timeout_secs: float | None = None,
) -> Any:
    """Returns a `tf.data.Dataset` of `ReplaySample`s, with the arguments of dm-reverb and Acme.

    Each of its iterators has a `Dataset`, which is closed with it: batches that it fetched ahead count as
    drawn, and are given back when the iterator is deleted. What TensorFlow's own `prefetch` fetches is not
    given back. The end of an iterator, see `Dataset`, is the end of the sequence.

    Args:
      client: any client of replay.
      table: name of the table.
      batch_size: number of items N in a batch; None yields single items, as `reverb.TrajectoryDataset` does.
      signature: a nest like an item, whose leaves have a `shape` (None is any size) and a `dtype`. None takes
        the table's. If there is none, the call waits for a sample, and gives it back.
      prefetch_size: see `prefetch` of `Dataset`.
      max_in_flight_samples_per_worker: see `max_in_flight` of `Dataset`, at least N.
      rate_limiter_timeout_ms: milliseconds without a batch after which the sequence ends; -1 for no limit.
      max_samples: number of samples after which the sequence ends, less those that fill no batch; -1 for no
        limit.
      num_workers_per_iterator: 1, or -1, which means 1: whole batches are drawn.
      max_samples_per_stream: only -1: each draw is of one batch.
      get_signature_timeout_secs: seconds to wait for the signature; None waits without a limit.

    Raises:
      ImportError: TensorFlow is not installed.
      ValueError: An argument is out of range.
      DeadlineExceededError: There was no signature, nor a sample, in time.
    """
    try:
        make = _make()
    except ModuleNotFoundError as error:
        raise ImportError("TensorFlow is not installed. Run pip install tensorflow.") from error
    if num_workers_per_iterator not in (-1, 1):
        raise ValueError(
            f"num_workers_per_iterator: got {num_workers_per_iterator}, expected 1, or -1: one thread draws "
            "whole batches. Leave it out."
        )
    if max_samples_per_stream != -1:
        raise ValueError(
            f"max_samples_per_stream: got {max_samples_per_stream}, expected -1: each draw is of one batch, "
            "by the table's state at that time. Leave it out."
        )
    n = 1 if batch_size is None else whole_number("batch_size", batch_size, 1)
    for name, value, none, least in (
        ("prefetch_size", prefetch_size, None, 0),
        ("max_in_flight_samples_per_worker", max_in_flight_samples_per_worker, None, n),
        ("rate_limiter_timeout_ms", rate_limiter_timeout_ms, -1, 0),
        ("max_samples", max_samples, -1, n),
    ):
        if value != none:
            whole_number(name, value, least)
    if signature is None:
        signature = client.server_info(get_signature_timeout_secs)[table].signature
    if signature is None:
        signature = _signature_of_a_sample(client, table, get_signature_timeout_secs)
    settings = {
        "prefetch": prefetch_size,
        "max_in_flight": max_in_flight_samples_per_worker,
        "rate_limiter_timeout": None if rate_limiter_timeout_ms == -1 else rate_limiter_timeout_ms / 1000,
    }
    limit = None if max_samples == -1 else max_samples // n
    return make(_Reader(client, table, batch_size, signature, limit, settings))


def _signature_of_a_sample(client: ReplayClient, table: str, timeout: float | None) -> Nest:
    source = client.source()
    try:
        sample, drawn = source.draw(table, 1, timeout, None, False)
        source.give_back(drawn)
    finally:
        source.close()
    leaves, structure = nests.flatten(sample.data)
    return nests.packer(structure)([TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in leaves])


class _AlignedDataset(Dataset):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._transfer = AlignedTransfer()


class _Reader:
    """Opens `Dataset`s, and says what their batches are like.

    Attributes:
      specs: shape and dtype of each array of `batches`.
      pack: makes a `ReplaySample` of as many values. Lists become tuples, because `tf.data` knows no lists.
    """

    def __init__(
        self,
        client: ReplayClient,
        table: str,
        batch_size: int | None,
        signature: Nest,
        limit: int | None,
        settings: dict[str, Any],
    ) -> None:
        leaves, structure = nests.flatten(signature)
        self._form = [TensorSpec.of(leaf) for leaf in leaves]
        self._open = functools.partial(_AlignedDataset, client, table, batch_size or 1, **settings)
        self._flatten = nests.flattener(signature)
        self._paths, self._limit, self._is_single = nests.paths(structure), limit, batch_size is None
        rows = () if batch_size is None else (batch_size,)
        self.specs = [TensorSpec(rows, dtype) for dtype in _INFO]
        self.specs += [TensorSpec(rows + each.shape, each.dtype) for each in self._form]
        pack = nests.packer(_without_lists(structure))
        self.pack = lambda values: ReplaySample(SampleInfo(*values[: len(_INFO)]), pack(values[len(_INFO) :]))

    def batches(self) -> Iterator[list[np.ndarray]]:
        """Yields the arrays of each batch from a new `Dataset`, which is closed with the iterator."""
        with self._open() as dataset:
            for sample in itertools.islice(dataset, self._limit):
                leaves = self._flatten(sample.data)
                self._check(leaves)
                arrays = [*sample.info, *leaves]
                yield [array[0, ...] for array in arrays] if self._is_single else arrays

    def _check(self, leaves: list[np.ndarray]) -> None:
        for leaf, spec, path in zip(leaves, self._form, self._paths, strict=True):
            if leaf.dtype != spec.dtype or not _fits(leaf.shape[1:], spec.shape):
                raise ValueError(
                    f"item: got {leaf.dtype}{list(leaf.shape[1:])} at {path!r}, expected {spec}. Give "
                    "signature=, with None for a size that differs from item to item."
                )


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return shape == expected or (
        len(shape) == len(expected) and all(b in (None, a) for a, b in zip(shape, expected, strict=True))
    )


def _without_lists(node: Any) -> Any:
    """Returns a structure of `nests` with tuples in place of lists."""
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        return [_without_lists(each) for each in node] if isinstance(node, list) else node
    kind = "tuple" if node[0] == "list" else node[0]
    return [kind, *node[1:-1], [_without_lists(each) for each in node[-1]]]


@functools.cache
def _make() -> Callable[[_Reader], Any]:
    """Returns the class of the datasets, which inherits TensorFlow's."""
    import tensorflow as tf

    from_dlpack = tf.experimental.dlpack.from_dlpack

    def tensor(array: np.ndarray) -> Any:
        if array.dtype.kind not in "iuf":
            return tf.constant(array)  # All versions of DLPack have these numbers, and some have no others.
        return from_dlpack(array.__dlpack__())

    class ReplayIterator(type(iter(tf.data.Dataset.range(0)))):  # type: ignore[misc]  # TensorFlow's, in eager mode.
        def __init__(self, dataset: ReplayDataset) -> None:
            super().__init__(dataset)
            self._batches, self._pack = dataset.reader.batches(), dataset.reader.pack

        def __next__(self) -> Any:
            if not tf.executing_eagerly():  # It becomes a node of a graph.
                return super().__next__()
            return self._pack(list(map(tensor, next(self._batches))))

        def get_next(self, name: str | None = None) -> Any:
            try:
                return next(self) if tf.executing_eagerly() else super().get_next(name)
            except StopIteration:
                raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    class ReplayDataset(tf.data.Dataset):
        def __init__(self, reader: _Reader) -> None:
            self.reader = reader
            specs = [tf.TensorSpec(each.shape, tf.as_dtype(each.dtype)) for each in reader.specs]
            self._spec = reader.pack(specs)
            options = tf.data.Options()  # What TensorFlow would fetch ahead by itself is not given back.
            with contextlib.suppress(AttributeError):  # It does not in TensorFlow 2.8.
                options.experimental_optimization.inject_prefetch = False
            generated = tf.data.Dataset.from_generator(
                lambda: map(reader.pack, reader.batches()), output_signature=self._spec
            )
            super().__init__(generated.with_options(options)._variant_tensor)

        def __iter__(self) -> Any:
            return ReplayIterator(self) if tf.executing_eagerly() else super().__iter__()

        def _inputs(self) -> list[Any]:
            return []

        @property
        def element_spec(self) -> Any:
            return self._spec

    return ReplayDataset
