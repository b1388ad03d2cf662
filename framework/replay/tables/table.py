"""A table: items, a selector that samples, one that removes, and a rate limiter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from framework.replay.errors import DeadlineExceededError, ServerClosed, UnknownTableError, WouldBlockError
from framework.replay.rows.layout import Bindings, Layout
from framework.replay.rows.store import RowStore
from framework.replay.tables.contents import Contents
from framework.replay.tables.delivery import Delivery, join
from framework.replay.tables.items import NewItems, make_keys
from framework.replay.tables.rate_limiters import Queue, RateLimiter, Stack
from framework.replay.tables.selectors import Fifo, Lifo, Selector
from framework.replay.tables.waiting import INSERTERS, SAMPLERS, Waiting
from framework.replay.types import (
    CallStats,
    PaddedSample,
    RateLimiterInfo,
    ReplaySample,
    SampleInfo,
    TableInfo,
    TableWorkerTime,
)
from framework.types import Nest


class ShownWriter(Protocol):
    """A writer that holds items back until a table is read."""

    def show(self) -> None:
        """Inserts them."""


# Samples drawn in one hold of the lock: a larger request lets others in between.
_MAX_DRAW = 1 << 16


class Table:
    """Items in the order of two selectors, as far as a rate limiter lets them in and out.

    ```python
    table = Table("replay", selectors.Uniform(), selectors.Fifo(), max_size=100_000,
                  rate_limiter=rate_limiters.MinSize(1))
    ```

    A new item goes to both selectors first, and the table is brought down to `max_size` after that, so the
    new item may be the one that is removed. An item that was sampled `max_times_sampled` times is removed.
    Every public method may be called from several threads.

    Args:
      name: of the table.
      sampler: chooses what is sampled. One selector serves one table, in one role.
      remover: chooses what is removed from a full table.
      max_size: items that the table holds.
      rate_limiter: when the table may be sampled and inserted into.
      max_times_sampled: an item is removed when it was sampled that often; below 1 for never.
      extensions: kept for Reverb's signature; must be empty.
      signature: nest of specs (anything with `shape` and `dtype`) that every item must match; None checks
        nothing.
      seed: of the sampler's random numbers; None takes one from the system.

    Attributes:
      concurrent: False where no other thread uses the table: a call that would wait is a `WouldBlockError`
        then.
    """

    def __init__(
        self,
        name: str,
        sampler: Selector,
        remover: Selector,
        max_size: int,
        rate_limiter: RateLimiter,
        max_times_sampled: int = 0,
        extensions: Sequence[Any] = (),
        signature: Nest = None,
        seed: int | None = None,
    ):
        if not name:
            raise ValueError("name: got an empty one, expected a name for the table")
        if max_size <= 0:
            raise ValueError(f"table {name!r}, max_size: got {max_size}, expected at least 1")
        if rate_limiter.min_size_to_sample > max_size:
            raise ValueError(
                f"table {name!r}, min_size_to_sample: got {rate_limiter.min_size_to_sample}, expected at "
                f"most max_size, {max_size}: it could never be sampled"
            )
        if extensions:
            raise ValueError(
                f"table {name!r}, extensions: got {extensions}, expected none; they are not supported"
            )
        for role, selector in (("sampler", sampler), ("remover", remover)):
            if len(selector) or selector.owner is not None or sampler is remover:
                raise ValueError(
                    f"table {name!r}, {role}: got one that is used elsewhere; make one for each use"
                )
        self.name = name
        self.signature = signature
        self.concurrent = True
        self.store = RowStore()
        self._bindings = Bindings(self.store, name, signature)
        self._rng = np.random.default_rng(seed)
        self._waiting = Waiting()
        self._lock = self._waiting.lock
        self._closed: str | None = None
        self._writers: tuple[Callable[[], ShownWriter | None], ...] = ()
        self._compose(sampler, remover, int(max_size), rate_limiter, max(0, int(max_times_sampled)))

    def _compose(
        self,
        sampler: Selector,
        remover: Selector,
        max_size: int,
        rate_limiter: RateLimiter,
        max_times_sampled: int,
    ) -> None:
        """Becomes an empty table of these parts."""
        rate_limiter.bind(self.name)
        sampler.owner = remover.owner = self.name
        self.sampler = sampler
        self.remover = remover
        self.max_size = max_size
        self.rate_limiter = rate_limiter
        self.max_times_sampled = max_times_sampled
        self._empty()

    def _empty(self) -> None:
        self._contents = Contents(
            self.sampler, self.remover, self.max_size, self.max_times_sampled, self._bindings, self._rng
        )

    @classmethod
    def queue(
        cls,
        name: str,
        max_size: int,
        extensions: Sequence[Any] = (),
        signature: Nest = None,
        seed: int | None = None,
    ) -> Table:
        """Each item is sampled once, oldest first; inserts wait while `max_size` items wait."""
        return cls(name, Fifo(), Fifo(), max_size, Queue(max_size), 1, extensions, signature, seed)

    @classmethod
    def stack(
        cls,
        name: str,
        max_size: int,
        extensions: Sequence[Any] = (),
        signature: Nest = None,
        seed: int | None = None,
    ) -> Table:
        """Each item is sampled once, newest first; inserts wait while `max_size` items wait."""
        return cls(name, Lifo(), Lifo(), max_size, Stack(max_size), 1, extensions, signature, seed)

    def replace(self, **overrides: Any) -> Table:
        """A new, empty table like this one but for `overrides`, by the names of the constructor's
        arguments."""
        options: dict[str, Any] = {
            "name": self.name,
            "sampler": self.sampler,
            "remover": self.remover,
            "max_size": self.max_size,
            "rate_limiter": self.rate_limiter,
            "max_times_sampled": self.max_times_sampled,
            "signature": self.signature,
            **overrides,
        }
        for name in ("sampler", "remover", "rate_limiter"):
            if name not in overrides:
                options[name] = options[name].copy()
        return Table(**options)

    def __repr__(self) -> str:
        return (
            f"Table({self.name!r}, sampler={self.sampler}, remover={self.remover}, max_size={self.max_size}, "
            f"rate_limiter={self.rate_limiter}, max_times_sampled={self.max_times_sampled})"
        )

    # Wiring.

    def attach(self, store: RowStore, concurrent: bool = True) -> None:
        """Makes `store` the one that items point into. A server calls it once, before anything is
        inserted."""
        if self.size:
            raise ValueError(f"table {self.name!r}: got a new store while it holds items")
        self.store = store
        self.concurrent = concurrent
        self._bindings = Bindings(store, self.name, self.signature)
        self._empty()

    def add_writer(self, reference: Callable[[], ShownWriter | None]) -> None:
        """Adds a weak reference to a writer of this process: it inserts before a read."""
        with self._lock:
            self._writers = (*self._writers, reference)

    def remove_writer(self, reference: Callable[[], ShownWriter | None]) -> None:
        """Inverts `add_writer`."""
        with self._lock:
            self._writers = tuple(each for each in self._writers if each is not reference)

    def _drain(self) -> None:
        if self.store.dropped_writers:
            self.store.end_dropped_writers()
        for reference in self._writers:
            writer = reference()
            if writer is not None:
                writer.show()

    def watch(self, listener: Callable[[], None]) -> None:
        """`listener` is called, with the table's lock held, when calls that wait should look again."""
        self._waiting.listeners.append(listener)

    def count_waiting(self, side: int, change: int) -> None:
        """A call of another process begins (1) or ceases (-1) to wait; `side` 0 samples, 1 inserts."""
        with self._lock:
            self._waiting.counts[side] += change

    @property
    def sampler_waits(self) -> bool:
        """Whether a call waits for items now; a writer then holds nothing back."""
        return self._waiting.counts[SAMPLERS] > 0

    def set_seed(self, seed: int | None) -> None:
        """Restarts the sampler's random numbers."""
        with self._lock:
            self._rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    def close(self, reason: str = "the server was stopped") -> None:
        """Every call that waits, and every later one, is a `ServerClosed`."""
        with self._lock:
            self._closed = f"table {self.name!r}: {reason}"
        self.wake()

    def wake(self) -> None:
        """Makes calls that wait look at their `cancelled` again."""
        self._waiting.wake()

    def _wait(
        self,
        side: int,
        n: int,
        done: int,
        deadline: float | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        """Waits until the other side has done something. Called with the lock held."""
        if self._closed is not None:
            raise ServerClosed(self._closed)
        if cancelled is not None and cancelled():
            raise ServerClosed(f"table {self.name!r}: the client was interrupted")
        expired = deadline is not None and time.monotonic() >= deadline
        if self.concurrent and not expired:
            self._waiting.wait(side, deadline)
            return
        limiter = self.rate_limiter
        why = limiter.why_not_insert() if side == INSERTERS else limiter.why_not_sample()
        text = (
            f"table {self.name!r}: cannot {('sample', 'insert')[side]} {n} items ({done} went through): "
            f"{why or 'no item is left to sample'}"
        )
        if expired:
            raise DeadlineExceededError(f"{text}; the timeout is over", done)
        raise WouldBlockError(f"{text}; nothing else runs in this thread, so the wait would never end")

    # Inserting.

    def check_priorities(self, priorities: Any, n: int) -> np.ndarray:
        """`priorities` as float64 `[n]`; ValueError if a selector cannot use one of them."""
        array = np.asarray(priorities, np.float64)
        if array.shape != (n,):
            raise ValueError(f"table {self.name!r}, priorities: got shape {array.shape}, expected ({n},)")
        if n:
            low, high = np.minimum.reduce(array), np.maximum.reduce(array)  # NaN if one is NaN
            if not (low >= 0.0 and high < np.inf):
                bad = array[~((array >= 0.0) & (array < np.inf))]
                raise ValueError(
                    f"table {self.name!r}, priorities: got {bad[:3].tolist()}, expected finite numbers >= 0; "
                    "nothing was changed"
                )
            for selector in (self.sampler, self.remover):
                if selector.uses_priorities:
                    selector.check(float(low), float(high))
        return array

    def new_items(
        self,
        layout: Layout,
        index: np.ndarray,
        priorities: Any = None,
        keys: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        episodes: np.ndarray | None = None,
    ) -> NewItems:
        """Checks k items that `insert_now` is to insert; the arguments and errors are those of `insert`."""
        n = len(index)
        if priorities is not None:
            priorities = self.check_priorities(priorities, n)
        number = self._bindings[layout]
        return NewItems(index, make_keys(n) if keys is None else keys, priorities, lengths, episodes, number)

    def insert_now(self, new: NewItems) -> int:
        """Inserts the first of the items, as many as the rate limiter allows now; how many. Never waits."""
        n, done, limiter = len(new.keys), 0, self.rate_limiter
        with self._lock:
            if self._closed is not None:
                raise ServerClosed(self._closed)
            while done < n and (allowed := limiter.allowed_inserts(min(n - done, self.max_size))):
                self._contents.insert(new if allowed == n else new.part(done, done + allowed))
                done += allowed
                limiter.inserts += allowed
                limiter.size = self._contents.items.size
            if done:
                self._waiting.notify(SAMPLERS)
        return done

    def insert(
        self,
        layout: Layout,
        index: np.ndarray,
        priorities: Any = None,
        keys: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        episodes: np.ndarray | None = None,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> np.ndarray:
        """Inserts k items that point at rows which the caller holds; waits while the rate limiter refuses.

        Args:
          layout: what the items look like.
          index: int64 `[k, layout.width]` rows.
          priorities: float64 `[k]`, or None for the largest so far, 1.0 at first.
          keys: uint64 `[k]` of `items.make_keys`, which makes them if None.
          lengths: int32 `[k, groups]` for ragged items.
          episodes: uint64 `[k]` names of the episodes that the items belong to, for `num_episodes`; 0 for
            none.
          timeout: seconds; None for no limit, and 0 does not wait.
          cancelled: asked while waiting; the call ends with `ServerClosed` when it says so.

        Returns:
          uint64 `[k]` keys.

        Raises:
          ValueError: wrong priorities, rows or layout; nothing was changed.
          DeadlineExceededError: its `args[1]` says how many were inserted before the time was over.
        """
        new = self.new_items(layout, index, priorities, keys, lengths, episodes)
        n, done = len(index), 0
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            done += self.insert_now(new.part(done, n) if done else new)
            if done == n:
                return new.keys
            with self._lock:
                if not self.rate_limiter.can_insert(1):
                    self._wait(INSERTERS, n, done, deadline, cancelled)

    def wait_to_insert(self, timeout: float | None, cancelled: Callable[[], bool] | None = None) -> None:
        """Waits until one item could be inserted; DeadlineExceededError if the timeout is over first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self.rate_limiter.can_insert(1):
                self._wait(INSERTERS, 1, 0, deadline, cancelled)

    # Sampling.

    def sample(
        self, n: int, timeout: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> Delivery:
        """Draws `n` samples and keeps their rows; waits while the rate limiter refuses.

        Samples count when they are drawn, one by one as the limiter allows, so that writers can go on while
        this call waits for the rest. If the call fails, what it has drawn is given back.

        Raises:
          DeadlineExceededError: nothing was sampled.
        """
        if n < 1:
            raise ValueError(f"table {self.name!r}, n: got {n}, expected at least 1 sample")
        deadline = None if timeout is None else time.monotonic() + timeout
        delivery: Delivery | None = None
        try:
            while True:
                before, delivery = delivery, self.draw(n, delivery)
                got = 0 if delivery is None else len(delivery.slots)
                if delivery is not None and got == n:
                    return delivery
                with self._lock:
                    # A large request takes several draws; its time is limited even if it never waits.
                    late = timeout and deadline is not None and time.monotonic() >= deadline
                    if late or (delivery is before and not self.rate_limiter.can_sample(1)):
                        self._wait(SAMPLERS, n, got, deadline, cancelled)
        except BaseException:
            if delivery is not None:
                self.give_back(delivery)
            raise

    def draw(self, n: int, delivery: Delivery | None = None) -> Delivery | None:
        """The next samples of a request for `n`, as far as the rate limiter allows now; never waits.

        Returns:
          `delivery` with what was drawn added to it, and `delivery` itself if nothing was. A reset of the
          table ends the old delivery, and the request begins again.
        """
        self._drain()
        with self._lock:
            if self._closed is not None:
                raise ServerClosed(self._closed)
            contents, limiter = self._contents, self.rate_limiter
            if delivery is not None and delivery.contents is not contents:
                delivery.contents.release(delivery.slots)
                delivery.open, delivery = False, None
            missing = min(_MAX_DRAW, n - (0 if delivery is None else len(delivery.slots)))
            picks: list[tuple[np.ndarray, SampleInfo]] = []
            while missing > 0 and (allowed := limiter.allowed_samples(missing)):
                picks.append(contents.pick(allowed, limiter.min_size_to_sample))
                missing -= len(picks[-1][0])
                limiter.samples += len(picks[-1][0])
                limiter.size = contents.items.size
            if not picks:
                return delivery
            slots, info = picks[0]
            if len(picks) > 1:
                slots = np.concatenate([slots for slots, _ in picks])
                info = SampleInfo(*map(np.concatenate, zip(*[info for _, info in picks], strict=True)))
            age = len(slots) * contents.stamp - int(np.add.reduce(contents.items.stamps.take(slots)))
            contents.age_sum += age
            drawn = Delivery(self.name, info, slots, contents.parts(slots), contents, age)
            self._waiting.notify(INSERTERS)
        return drawn if delivery is None else join(delivery, drawn)

    def release(self, delivery: Delivery) -> None:
        """The reader has its copy: rows may be used again, and items that have left the table are gone."""
        with self._lock:
            if delivery.open:
                delivery.open = False
                delivery.contents.release(delivery.slots)

    def give_back(self, delivery: Delivery) -> None:
        """The samples were not used: as if they had never been drawn. Items take their old places again."""
        with self._lock:
            if not delivery.open:
                return
            delivery.open = False
            delivery.contents.give_back(delivery.slots)
            if delivery.contents is self._contents:  # no reset since the draw
                self._contents.age_sum -= delivery.age
                self.rate_limiter.samples -= len(delivery)
                self.rate_limiter.size = self.size
                self._waiting.notify(SAMPLERS)

    def sample_batch(
        self,
        n: int,
        timeout: float | None = None,
        out: Sequence[np.ndarray] | None = None,
        pad: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> ReplaySample | PaddedSample:
        """`sample`, gather and `release` in one; see `Delivery.gather` for `out` and `pad`."""
        delivery = self.sample(n, timeout, cancelled)
        try:
            sample = delivery.gather(out, pad)
        except BaseException:
            self.give_back(delivery)
            raise
        self.release(delivery)
        return sample

    # Changing items.

    def mutate(self, keys: Any = (), priorities: Any = (), deletes: Any = ()) -> int:
        """Deletes items, then sets priorities; keys that are gone are ignored. How many items were changed.

        Raises:
          ValueError: a priority is negative or not a number; nothing was changed.
        """
        keys = np.asarray(keys, np.uint64)
        priorities = self.check_priorities(priorities, len(keys))
        self._drain()
        with self._lock:
            if self._closed is not None:
                raise ServerClosed(self._closed)
            contents, changed = self._contents, 0
            if len(deletes):
                slots = np.unique(contents.items.find(np.asarray(deletes, np.uint64)))
                slots = slots[slots >= 0]
                if len(slots):
                    contents.remove(slots)
                    changed += len(slots)
                    self.rate_limiter.size = contents.items.size
                    self._waiting.notify(INSERTERS)
            if len(keys):
                slots = contents.items.find(keys)
                here = slots >= 0
                if np.count_nonzero(here) < len(slots):
                    slots, priorities = slots[here], priorities[here]
                if len(slots):
                    contents.update(slots, priorities)
                    changed += len(slots)
            return changed

    def reset(self) -> None:
        """Removes every item and sets every counter to 0. Rows are freed unless a delivery holds them."""
        self._drain()  # items that were created before and have room go too
        with self._lock:
            self._contents.clear()
            self._empty()
            self.rate_limiter.reset()
            self._waiting.notify(INSERTERS)
            self._waiting.notify(SAMPLERS)

    # Looking.

    def can_sample(self, num_samples: int = 1) -> bool:
        """Whether `num_samples` could be sampled now without waiting."""
        self._drain()
        with self._lock:
            limiter = self.rate_limiter
            return limiter.can_sample(num_samples) and (
                not self.max_times_sampled or num_samples <= self._contents.turns(limiter.min_size_to_sample)
            )

    def can_insert(self, num_inserts: int = 1) -> bool:
        """Whether `num_inserts` could be inserted now without waiting."""
        self._drain()
        with self._lock:
            return self.rate_limiter.can_insert(num_inserts)

    def weight(self) -> tuple[float, int]:
        """The sum of the sampler's weights, and how many items it can choose from."""
        self._drain()
        with self._lock:
            return self.sampler.total_weight(), len(self.sampler)

    @property
    def max_priority(self) -> float | None:
        """The largest priority so far, which items without one get; None before the first."""
        return self._contents.max_priority

    @property
    def size(self) -> int:
        """Items in the table."""
        return self._contents.items.size

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return True  # empty or not

    @property
    def info(self) -> TableInfo:
        """What `server_info` reports."""
        self._drain()
        with self._lock:
            limiter, contents, waiting = self.rate_limiter, self._contents, self._waiting
            sampled_ms, inserted_ms = (int(1000 * seconds) for seconds in waiting.seconds)
            return TableInfo(
                name=self.name,
                sampler_options=self.sampler.config(),
                remover_options=self.remover.config(),
                max_size=self.max_size,
                max_times_sampled=self.max_times_sampled,
                rate_limiter_info=RateLimiterInfo(
                    **limiter.options(),
                    insert_stats=CallStats(limiter.inserts, waiting.counts[INSERTERS], inserted_ms),
                    sample_stats=CallStats(limiter.samples, waiting.counts[SAMPLERS], sampled_ms),
                ),
                signature=self.signature,
                current_size=contents.items.size,
                num_episodes=len(contents.episodes),
                num_deleted_episodes=contents.num_deleted_episodes,
                num_unique_samples=contents.num_unique_samples,
                table_worker_time=TableWorkerTime(
                    waiting_for_sampling_ms=inserted_ms, waiting_for_inserts_ms=sampled_ms
                ),
                max_priority=1.0 if contents.max_priority is None else contents.max_priority,
                why_not_sample=limiter.why_not_sample(),
                why_not_insert=limiter.why_not_insert(),
                sampled_age=contents.age_sum,
            )


class Tables(dict[str, Table]):
    """Tables by name; `UnknownTableError` for another name."""

    def __missing__(self, name: str) -> Table:
        raise UnknownTableError(f"table {name!r} was not found; there are {sorted(self)}")
