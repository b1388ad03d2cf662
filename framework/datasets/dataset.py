"""`Dataset`: batches from replay, on the learner's device, fetched ahead.

```python
dataset = Dataset(client, "replay", batch_size=256, device="cuda")
for sample in dataset:                             # ReplaySample, leaves [N, ...]
    result = learner.step(sample)
    dataset.update_priorities(sample.info.key, result.priorities)
dataset.close()
```
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping
from typing import Any

from framework.datasets.mixture import Mixture
from framework.datasets.transfer import PinnedTransfer, is_cuda, to_tensors
from framework.replay.contracts import Client, Source
from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost


class Dataset:
    """An iterator of `ReplaySample`: `info` of numpy arrays `[N]`, `data` of leaves `[N, ...]`.

    A batch counts for the rate limiter when it is drawn. Batches that were fetched ahead and are left over
    when the dataset is closed are given back, as if they had never been drawn.

    The iteration ends when the server is stopped, the client interrupted, or `rate_limiter_timeout` is
    over. Any other error of the thread that fetches ahead is raised here.

    Args:
      client: any client of replay.
      table: a name, or `{name: weight}` to put batches together from several tables: see `Mixture`. Use
        `update_priorities` of the dataset then.
      batch_size: N.
      max_in_flight: at most this many items are drawn and not handed out; fixes `prefetch` if that is not
        given.
      rate_limiter_timeout: seconds without a batch after which the iteration ends; None waits without limit.
      device: None for numpy arrays, else tensors on this torch device; through pinned memory to a GPU.
      prefetch: batches fetched ahead by a thread; 0 for no thread. No thread either if the client is not
        concurrent.
      ragged: items of different lengths are an `"error"`, or zero-padded with `"pad"`: then
        `PaddedSample`s come, with the lengths.

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(
        self,
        client: Client,
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
        self._client = client
        self._mixture = None if isinstance(table, str) else Mixture(client, table)
        self._source: Source = self._mixture or client.source()
        self._table = table if isinstance(table, str) else ""
        self._batch_size = batch_size
        self._timeout = rate_limiter_timeout
        self._pad = ragged == "pad"
        self._device = device
        self._pinned = PinnedTransfer(device) if device is not None and is_cuda(device) else None
        self._fetcher = _Fetcher(self._fetch, prefetch) if prefetch and client.concurrent else None
        self._ended = False
        self._closed = False

    def __iter__(self) -> Dataset:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        try:
            sample, drawn = self._fetch() if self._fetcher is None else self._fetcher.take()
        except DeadlineExceededError:
            self._ended = True
            raise StopIteration from None
        except ServerLost:
            raise
        except ServerClosed:
            self._ended = True
            raise StopIteration from None
        self._source.release(drawn)
        return sample if self._pinned is None else self._pinned.receive(sample)

    def ready(self) -> bool:
        """Whether `next()` would go through, or end, without blocking."""
        if self._closed or self._ended:
            return True
        if self._fetcher is None:
            return self._source.can_sample(self._table, self._batch_size)
        return self._fetcher.ready()

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """New priorities for items of batches of this dataset; keys and priorities `[N]`."""
        if self._mixture is None:
            self._client.update_priorities(self._table, keys, priorities)
        else:
            self._mixture.update_priorities(keys, priorities)

    def close(self) -> None:
        """Ends the iteration; gives back what was fetched and not handed out."""
        if self._closed:
            return
        self._closed = True
        self._source.interrupt()
        if self._fetcher is not None:
            for _, drawn in self._fetcher.close():
                self._source.give_back(drawn)
        self._source.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _fetch(self) -> _Batch:
        """Draws one batch, and starts its way to the device."""
        pinned = self._pinned
        out = None if pinned is None or self._pad else pinned.buffers()
        sample, drawn = self._source.draw(self._table, self._batch_size, self._timeout, out, self._pad)
        try:
            if pinned is not None:
                return pinned.send(sample, out is not None), drawn
            return sample if self._device is None else to_tensors(sample, self._device), drawn
        except BaseException:
            self._source.give_back(drawn)
            raise


_Batch = tuple[Any, Any]  # the sample, and what its source calls it


class _Fetcher:
    """A thread that keeps a few batches ready.

    Args:
      fetch: makes a batch; DeadlineExceededError if there was none in time.
      ahead: how many batches are kept.
    """

    def __init__(self, fetch: Callable[[], _Batch], ahead: int) -> None:
        self._fetch = fetch
        self._ahead = ahead
        self._changed = threading.Condition()
        self._batches: collections.deque[_Batch] = collections.deque()
        self._waiting = False  # the consumer waits for a batch
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def take(self) -> _Batch:
        """The next batch; raises the error that has ended the thread instead, once there is none."""
        with self._changed:
            if self._thread is None:
                self._start()
            self._waiting = True
            try:
                while not (self._batches or self._error is not None or self._closed):
                    self._changed.wait()
            finally:
                self._waiting = False
            if self._batches:
                self._changed.notify_all()
                return self._batches.popleft()
            raise self._error or ServerClosed("the dataset was closed")

    def ready(self) -> bool:
        """Whether `take` would return or raise at once."""
        with self._changed:
            if self._thread is None:
                self._start()
            return bool(self._batches) or self._error is not None

    def close(self) -> list[_Batch]:
        """Ends the thread, which must not be waiting in `fetch`; the batches that were not taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return list(self._batches)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="replay-dataset", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while len(self._batches) >= self._ahead and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            batch = error = None
            try:
                batch = self._fetch()
            except BaseException as raised:  # raised by `take`
                error = raised
            with self._changed:
                if batch is not None:
                    self._batches.append(batch)
                elif not isinstance(error, DeadlineExceededError) or (self._waiting and not self._batches):
                    self._error = error  # time that ran out before the consumer waits does not count
                self._changed.notify_all()
                if self._error is not None:
                    return
