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

import atexit
import collections
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import tree

from framework.config_checks import whole_number
from framework.datasets.mixture import Mixture
from framework.datasets.transfer import PinnedTransfer, Transfer
from framework.replay.contracts import Batches, Source
from framework.replay.errors import DeadlineExceededError, ServerClosed, ServerLost
from launch.locks import InterruptSafeCondition

_LOG = logging.getLogger(__name__)
_KEPT = 16  # batches whose samples are drawn ahead from several servers, unless the caller says how many
_EXIT_S = 5.0  # for which the end of the interpreter waits for a dataset that was not closed


class Dataset:
    """An iterator of `ReplaySample`: `info` of numpy arrays `[N]`, `data` of leaves `[N, ...]`.

    A batch counts for the rate limiter when it is drawn. When the dataset is closed, it gives back the
    batches that it fetched ahead and did not hand out, as if they had never been drawn.

    The iteration ends when the server is stopped, the client is interrupted, or `rate_limiter_timeout` is
    over. Any other error of the thread that fetches ahead is raised by `next()`.

    Tensors on the CPU share memory with the arrays. Arrays that torch has no dtype for (strings) stay numpy
    arrays.

    Args:
      client: any client of replay, a `Mixture` of several, or other `Batches`.
      table: a name, or `{name: weight}` for batches with items of several tables; see `Mixture`. In that
        case, call `update_priorities` of the dataset, not of the client.
      batch_size: number of items N in a batch.
      max_in_flight: largest number of items that are drawn but not handed out. Sets `prefetch` if that is
        None.
      rate_limiter_timeout: seconds without a batch after which the iteration ends; None waits without a
        limit.
      device: torch device of the batches' tensors; None for numpy arrays. Pinned memory is used for a GPU.
      prefetch: number of batches that a thread fetches ahead; 0 for no thread. There is no thread either if
        the client is not concurrent. None means 2, or 16 from several servers if the items are small.
      ragged: `"error"` refuses items of different lengths; `"pad"` pads them with zeros and returns
        `PaddedSample`s, which hold the lengths.
      only_first: number of batches of the first table alone, before batches of all tables; see `Mixture`.
      while_waiting: called every `look_s` seconds without a batch, in the thread that fetches it. It may
        insert items that a server lost when it was restarted.

    Attributes:
      batch_size: the argument.
      look_s: seconds between two calls of `while_waiting`; five.
      stall_s: seconds of a wait for a batch after which a warning says what the tables wait for; a minute,
        and twice as long after each warning.

    Raises:
      ValueError: An argument is out of range.
    """

    look_s = 5.0
    stall_s = 60.0

    def __init__(
        self,
        client: Batches,
        table: str | Mapping[str, float],
        batch_size: int,
        *,
        max_in_flight: int | None = None,
        rate_limiter_timeout: float | None = None,
        device: Any = None,
        prefetch: int | None = None,
        ragged: str = "error",
        only_first: int = 0,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        self.batch_size = whole_number("batch_size", batch_size, 1)
        if max_in_flight is not None:
            whole_number("max_in_flight", max_in_flight, batch_size)
        if ragged not in ("error", "pad"):
            raise ValueError(f"ragged: got {ragged!r}, expected 'error' or 'pad'.")
        if rate_limiter_timeout is not None and not rate_limiter_timeout >= 0:  # It would end at once.
            text = f"rate_limiter_timeout: got {rate_limiter_timeout}, expected seconds >= 0, or None"
            raise ValueError(f"{text} for no limit, which is -1 in dm-reverb.")
        self._ahead = 0  # How many batches' samples may be drawn and not handed out; 0 for `prefetch`.
        if prefetch is None:
            self._ahead = _KEPT if max_in_flight is None else 0
            prefetch = 2 if max_in_flight is None else max_in_flight // batch_size
        elif max_in_flight is not None:
            prefetch = min(prefetch, max_in_flight // batch_size)
        whole_number("prefetch", prefetch, 0)
        if not isinstance(table, str):
            client, table = Mixture({(client, name): share for name, share in table.items()}, only_first), ""
        self._source: Source = client.source()
        self._items, self._table = client, table  # The first sets priorities.
        self._timeout, self._while_waiting = rate_limiter_timeout, while_waiting
        self._pad = ragged == "pad"
        self._device = device
        self._transfer: Transfer | None = None
        if device is not None and torch.device(device).type == "cuda":
            self._transfer = PinnedTransfer(device)
        self._ended = False
        self._closed = False
        # What the thread that fetches ahead shares with the consumer.
        self._prefetch = prefetch if client.concurrent else 0
        self._changed = InterruptSafeCondition()
        # Held while this dataset draws without such a thread: `close` lets another thread's draw end first.
        self._drawing = threading.RLock()
        self._batches: collections.deque[_Batch] = collections.deque()
        self._waiting = False  # whether the consumer waits for a batch
        self._asked = False  # whether the consumer has asked `ready` since the last fetch began
        self._error: BaseException | None = None  # ended the thread; raised when there is no batch
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Dataset:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        try:
            if not self._prefetch:
                with self._drawing:
                    if self._closed:
                        raise StopIteration
                    sample, drawn = self._fetch()
                    self._source.release(drawn)
            else:
                with self._changed:
                    if self._thread is None:
                        self._start()
                    self._waiting = True
                    self._changed.notify_all()  # the thread may have had a timeout
                    try:
                        while not (self._batches or self._error is not None or self._closed):
                            self._changed.wait()
                    finally:
                        self._waiting = False
                    if self._closed:
                        raise StopIteration
                    if not self._batches:
                        raise self._error  # type: ignore[misc]  # It is set: the loop has ended.
                    self._changed.notify_all()
                    sample, drawn = self._batches.popleft()
                    self._source.release(drawn)
        except ServerLost:
            raise
        except (DeadlineExceededError, ServerClosed):
            self._ended = True
            raise StopIteration from None
        return sample if self._transfer is None else self._transfer.receive(sample)

    def ready(self) -> bool:
        """Returns whether `next()` would return or end without waiting."""
        if self._closed or self._ended:
            return True
        if not self._prefetch:
            return self._source.can_sample(self._table, self.batch_size)
        with self._changed:
            if self._thread is None:
                self._start()
            self._asked = True
            self._changed.notify_all()
            return bool(self._batches) or self._error is not None

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Sets the priorities `[N]` of items in batches of this dataset by their keys `[N]`."""
        self._items.update_priorities(self._table, keys, priorities)

    def close(self) -> None:
        """Ends the iteration, and gives back the batches that were fetched but not handed out."""
        self._end_thread(None)
        with self._drawing:
            try:
                while self._batches:
                    self._source.give_back(self._batches.pop()[1])
            finally:
                self._source.close()

    def _end_thread(self, timeout: float | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._source.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _fetch(self) -> _Batch:
        """Draws a batch and starts to copy it to the device."""
        transfer, n, timeout = self._transfer, self.batch_size, self._timeout
        out = None if transfer is None or self._pad else transfer.buffers(n)
        began = time.monotonic()
        while True:
            left = timeout
            if timeout is None and self._items.concurrent:
                left = self.stall_s if self._while_waiting is None else self.look_s
            try:
                sample, drawn = self._source.draw(self._table, n, left, out, self._pad)
                break
            except DeadlineExceededError as error:
                if timeout is not None:
                    raise
                if self._while_waiting is not None:
                    self._while_waiting()
                waits = (self._waiting and not self._batches) or self._thread is None
                if waits and (waited := time.monotonic() - began) >= self.stall_s:
                    self.stall_s = 2.0 * waited
                    self._say_why(waited, error)
            except ValueError:  # These items may be longer or shorter than those that the buffers are for.
                if out is None:
                    raise
                out = None
        try:
            if self._device is not None and out is None:
                device = self._device if transfer is None else "cpu"
                leaves = [
                    torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy()).to(device)
                    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
                    else leaf
                    for leaf in tree.flatten(sample.data)
                ]
                sample = sample._replace(data=tree.unflatten_as(sample.data, leaves))
            return sample if transfer is None else transfer.send(sample, out is not None), drawn
        except BaseException:
            self._source.give_back(drawn)
            raise

    def _say_why(self, waited: float, error: DeadlineExceededError) -> None:
        """Warns that no batch came, and of what each table waits for: another one may hold up the writers."""
        texts = []
        with contextlib.suppress(DeadlineExceededError, ServerClosed):
            texts = self._items.refusals(self.look_s)
        _LOG.warning(
            "dataset: got no batch in %.0f s (%s), expected one: %s. If all of this stays, give the tables "
            "limiters that can be met together.",
            waited,
            error,
            "; ".join(texts) or "its tables refuse nothing now",
        )

    def _start(self) -> None:
        _ahead.add(self)
        threading.Thread(target=self._run, name="replay-dataset", daemon=True).start()

    def _run(self) -> None:
        """Fetches ahead until the dataset is closed or a fetch fails."""
        with self._changed:
            if self._thread is not None:  # `_start` was interrupted, and called again
                return
            self._thread = threading.current_thread()
        while True:
            with self._changed:
                # A source that keeps samples has the other batches, of which a message brings several.
                most = 1 if self._source.keeps else self._prefetch
                while len(self._batches) >= most and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._asked = False
                left = (self._ahead or self._prefetch) - len(self._batches) - 1
            self._source.spare = left * self.batch_size
            batch = error = None
            try:
                batch = self._fetch()
            except BaseException as raised:  # raised by `next()`
                error = raised
            with self._changed:
                if batch is not None:
                    self._batches.append(batch)
                elif not isinstance(error, DeadlineExceededError) or (self._waiting and not self._batches):
                    self._error = error  # A timeout does not count while the consumer does not wait.
                self._changed.notify_all()
                if self._error is not None:
                    return
                # After a timeout, the next fetch is for a consumer that asks.
                while not (batch or self._asked or self._closed or (self._waiting and not self._batches)):
                    self._changed.wait()


# Datasets with such threads. A thread that runs native code at the end of the interpreter would abort it.
_ahead: weakref.WeakSet[Dataset] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    for dataset in list(_ahead):
        dataset._end_thread(_EXIT_S)


_Batch = tuple[Any, Any]  # the sample, and the argument of the source's `release`
