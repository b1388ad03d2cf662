"""`Dataset`: batches from replay, on the learner's device, fetched ahead.

::

    dataset = Dataset(client, "replay", batch_size=256, device="cuda")
    for sample in dataset:                             # ReplaySample, leaves [N, ...]
        result = learner.step(sample)
        dataset.update_priorities(sample.info.key, result.priorities)
    dataset.close()
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from framework.datasets.transfer import Transfer
from framework.replay.batches import join
from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost
from framework.replay.types import SampleInfo

# Where the number of the table is kept in the keys of mixed batches: bits 56 to 60 belong to shards.
_TABLE_SHIFT = 61
MAX_TABLES = 8


class Dataset:
    """An iterator of ``ReplaySample``: ``info`` of numpy arrays ``[N]``, ``data`` of leaves ``[N, ...]``.

    A batch counts for the rate limiter when it is drawn. Batches that were fetched ahead and are left over
    when the dataset is closed are given back, as if they had never been drawn.

    The iteration ends when the server is stopped, the client interrupted, or ``rate_limiter_timeout`` is
    over. Any other error of the thread that fetches ahead is raised here.

    Args:
      client: any client of replay.
      table: a name, or ``{name: weight}`` to put batches together from several tables. The shares of a batch
        are the weights', rounded so that they hold exactly in the long run; the items of the first table
        come first. Use `update_priorities` of the dataset then.
      batch_size: N.
      max_in_flight: at most so many items are drawn and not handed out; fixes ``prefetch`` if that is not
        given.
      rate_limiter_timeout: seconds without a batch after which the iteration ends; None waits for ever.
      device: None for numpy arrays, else tensors on this torch device; through pinned memory to a GPU.
      prefetch: batches fetched ahead by a thread; 0 for no thread. No thread either if the client is not
        concurrent.
      ragged: items of different lengths are an ``"error"``, or zero-padded with ``"pad"``: then
        `PaddedSample`s come, with the lengths.
    """

    def __init__(
        self,
        client: Any,
        table: str | Mapping[str, float],
        batch_size: int,
        *,
        max_in_flight: int | None = None,
        rate_limiter_timeout: float | None = None,
        device: Any = None,
        prefetch: int | None = None,
        ragged: str = "error",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
        if max_in_flight is not None and max_in_flight < batch_size:
            raise ValueError(
                f"max_in_flight: got {max_in_flight}, expected at least the batch size, {batch_size}"
            )
        if ragged not in ("error", "pad"):
            raise ValueError(f"ragged: got {ragged!r}, expected 'error' or 'pad'")
        if prefetch is None:
            prefetch = 2 if max_in_flight is None else max_in_flight // batch_size
        elif max_in_flight is not None:
            prefetch = min(prefetch, max_in_flight // batch_size)
        if prefetch < 0:
            raise ValueError(f"prefetch: got {prefetch}, expected 0 or more batches")
        weights = {table: 1.0} if isinstance(table, str) else {str(k): float(v) for k, v in table.items()}
        if (
            not weights
            or len(weights) > MAX_TABLES
            or not all(0 < v < float("inf") for v in weights.values())
        ):
            raise ValueError(
                f"table: got {table!r}, expected a name or 1 to {MAX_TABLES} names with weights > 0"
            )
        self._client = client
        self._tables = list(weights)
        self._shares = np.array(list(weights.values())) / sum(weights.values()) * batch_size
        self._owed = np.zeros(len(weights))
        self._batch_size = batch_size
        self._timeout = rate_limiter_timeout
        self._pad = ragged == "pad"
        self._prefetch = prefetch if client.concurrent else 0
        self._source = client.source()
        self._transfer = None if device is None else Transfer(device)
        self._changed = threading.Condition()
        self._batches: collections.deque[tuple[Any, list[Any]]] = collections.deque()
        self._waiting = False
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._out: list[Any] | None = None

    def __iter__(self) -> Dataset:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        batch = self._take() if self._prefetch else self._fetch()
        if batch is None:
            raise StopIteration
        sample, reservations = batch
        self._source.settle(reservations, True)
        if self._transfer is not None:
            sample = self._transfer.receive(sample)
        return sample

    def ready(self) -> bool:
        """Whether ``next()`` would go through, or end, without blocking."""
        if self._closed or self._ended:
            return True
        if not self._prefetch:
            if len(self._tables) == 1:
                return bool(self._source.can_sample(self._tables[0], self._batch_size))
            counts = self._counts(commit=False)
            return all(
                self._source.can_sample(t, int(n)) for t, n in zip(self._tables, counts, strict=True) if n
            )
        with self._changed:
            self._start()
            return bool(self._batches or self._ended)

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """New priorities for items of batches of this dataset; keys and priorities ``[N]``."""
        if len(self._tables) == 1:
            self._client.update_priorities(self._tables[0], keys, priorities)
            return
        keys, priorities = np.asarray(keys, np.uint64), np.asarray(priorities, np.float64)
        numbers = keys >> np.uint64(_TABLE_SHIFT)
        plain = keys & np.uint64((1 << _TABLE_SHIFT) - 1)
        for number, table in enumerate(self._tables):
            mine = numbers == number
            if mine.any():
                self._client.update_priorities(table, plain[mine], priorities[mine])

    def close(self) -> None:
        """Ends the iteration; gives back what was fetched and not handed out."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._source.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        left = [each for _, reservations in self._batches for each in reservations]
        self._batches.clear()
        if left:
            self._source.settle(left, False)
        self._source.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # Fetching.

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="replay-dataset", daemon=True)
            self._thread.start()

    def _take(self) -> tuple[Any, list[Any]] | None:
        with self._changed:
            self._start()
            self._waiting = True
            try:
                while not (self._batches or self._ended or self._closed):
                    self._changed.wait()
            finally:
                self._waiting = False
            if self._batches:
                batch = self._batches.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            return None

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                with self._changed:
                    while len(self._batches) >= self._prefetch and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                batch = self._fetch(ahead=True)
                with self._changed:
                    if batch is None:
                        if not (self._waiting and not self._batches) and not self._ended:
                            continue  # nobody has waited for it
                        return
                    self._batches.append(batch)
                    self._changed.notify_all()
        except BaseException as raised:
            error = raised
        finally:
            with self._changed:
                self._error = error
                self._ended = True
                self._changed.notify_all()

    def _fetch(self, ahead: bool = False) -> tuple[Any, list[Any]] | None:
        """One batch, gathered; None if the time is over or the server was stopped."""
        reservations: list[Any] = []
        counts = self._counts(commit=False)
        out = None if self._transfer is None or self._pad else self._transfer.buffers()
        begin = 0
        try:
            for table, n in zip(self._tables, counts.tolist(), strict=True):
                if not n:
                    continue
                part = None if out is None else [array[begin : begin + n] for array in out]
                reservations.append(self._source.draw(table, n, self._timeout, part, self._pad))
                begin += n
            sample = self._join(reservations, counts, out)
            if self._transfer is not None:
                sample = self._transfer.send(sample, out is not None)
        except BaseException as error:
            if reservations:
                self._source.settle(reservations, False)
            if isinstance(error, DeadlineExceededError):
                self._ended |= not ahead
                return None
            if isinstance(error, ServerClosed) and not isinstance(error, ServerLost):
                self._ended = True
                return None
            raise
        self._counts(commit=True)
        return sample, reservations

    def _counts(self, commit: bool) -> np.ndarray:
        """How many items of each table make the next batch: what is owed to the weights, largest debts
        first."""
        if len(self._tables) == 1:
            return np.array([self._batch_size])
        owed = self._owed + self._shares
        counts = np.maximum(np.floor(owed), 0).astype(np.int64)
        missing = self._batch_size - int(counts.sum())
        counts[np.argsort(counts - owed, kind="stable")[:missing]] += 1
        if commit:
            self._owed = owed - counts
        return counts

    def _join(self, reservations: list[Any], counts: np.ndarray, out: list[Any] | None) -> Any:
        samples = [each.sample for each in reservations]
        if len(self._tables) == 1:
            return samples[0]
        keys = [
            sample.info.key | (np.uint64(number) << np.uint64(_TABLE_SHIFT))
            for sample, number in zip(samples, np.flatnonzero(counts).tolist(), strict=True)
        ]
        rest = [
            np.concatenate(arrays) for arrays in zip(*[sample.info[1:] for sample in samples], strict=True)
        ]
        info = SampleInfo(np.concatenate(keys), *rest)
        return join(samples, info, out)
