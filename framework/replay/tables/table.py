"""A table: items, a selector that samples, one that removes, and a rate limiter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from framework.replay.rows.layout import Bindings, Layout
from framework.replay.rows.store import RowStore
from framework.replay.tables.delivery import Delivery
from framework.replay.tables.items import Items
from framework.replay.tables.rate_limiters import INSERTERS, SAMPLERS, Queue, RateLimiter, Stack, Waiting
from framework.replay.tables.selectors import Fifo, Lifo, Selector
from framework.replay.types import SampleInfo, TableInfo, check_keys, check_priorities
from framework.replay.writers import NewItems
from framework.types import Nest

# Samples drawn in one hold of the lock: a larger request lets others in between.
_MAX_DRAW = 1 << 16


class Table:
    """Items in the order of two selectors, as far as a rate limiter lets them in and out.

    ```python
    table = Table("replay", selectors.Uniform(), selectors.Fifo(), max_size=100_000,
                  rate_limiter=rate_limiters.MinSize(1))
    ```

    A new item first goes to both selectors. Then the table is reduced to `max_size`, so the new item may be
    the one that is removed. An item that was sampled `max_times_sampled` times is removed. Every public
    method may be called from several threads.

    Args:
      name: name of the table.
      sampler: chooses what is sampled. One selector serves one table, in one role.
      remover: chooses what is removed from a full table.
      max_size: largest number of items that the table holds.
      rate_limiter: when the table may be sampled and inserted into.
      max_times_sampled: number of samples after which an item is removed; below 1 for never.
      extensions: kept for Reverb's signature; must be empty.
      signature: nest of specs (anything with `shape` and `dtype`) that every item must match; None checks
        nothing.
      seed: seed of the sampler's random numbers; None takes one from the system.

    Attributes:
      lock: guards the table. A caller that holds it must not call the table.
      items: those in the table; a reset makes new ones. The lock guards them.
      waiting: the calls that the rate limiter holds back.
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
            raise ValueError("name: got an empty one, expected a name for the table.")
        if max_size <= 0:
            raise ValueError(f"table {name!r}, max_size: got {max_size}, expected at least 1.")
        if rate_limiter.min_size_to_sample > max_size:
            raise ValueError(
                f"table {name!r}, min_size_to_sample: got {rate_limiter.min_size_to_sample}, expected at "
                f"most max_size, {max_size}: it could never be sampled."
            )
        if extensions:
            raise ValueError(f"table {name!r}, extensions: got {extensions}, expected none: there are none.")
        owners = {"sampler": sampler.owner, "remover": remover.owner, "rate_limiter": rate_limiter.owner}
        if remover is sampler:
            owners["remover"] = name
        for role, owner in owners.items():
            if owner is not None:
                raise ValueError(
                    f"table {name!r}, {role}: got one that belongs to table {owner!r}, expected a new one. "
                    "Make one for each use."
                )
        self.name = name
        self.signature = signature
        self.lock = threading.Lock()
        self.waiting = Waiting(name, rate_limiter, self.lock)
        self._rng = np.random.default_rng(seed)
        sampler.owner = remover.owner = rate_limiter.owner = name
        self.sampler = sampler
        self.remover = remover
        self.max_size = int(max_size)
        self.rate_limiter = rate_limiter
        self.max_times_sampled = max(0, int(max_times_sampled))
        self.attach(RowStore())

    def attach(
        self, store: RowStore, concurrent: bool = True, drain: Callable[[], object] = lambda: None
    ) -> None:
        """Makes `store` the one that items refer to. A client calls it before anything is inserted.

        Args:
          store: has the rows.
          concurrent: see `Waiting`.
          drain: has the writers of this process insert what they hold back, before the table is read.
        """
        if len(self):
            raise ValueError(f"table {self.name!r}: got a new store while it holds items.")
        self.store = store
        self.drain = drain
        self.waiting.concurrent = concurrent
        self.bindings = Bindings(store, self.name, self.signature)
        self.empty()

    def empty(self) -> None:
        """Begins without items. A caller that has any removes them first; it holds the lock."""
        self.items = Items(
            self.sampler,
            self.remover,
            self.rate_limiter,
            self.max_size,
            self.max_times_sampled,
            self.bindings,
            self._rng,
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
        """Returns a table of items sampled once, oldest first; inserts wait while it holds `max_size`."""
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
        """Returns a table of items sampled once, newest first; inserts wait while it holds `max_size`."""
        return cls(name, Lifo(), Lifo(), max_size, Stack(max_size), 1, extensions, signature, seed)

    def replace(self, **overrides: Any) -> Table:
        """Returns a new, empty table like this one, except for `overrides` of the constructor's arguments."""
        same: dict[str, Any] = {
            name: getattr(self, name) for name in ("name", "max_size", "max_times_sampled", "signature")
        }
        copies = {name: getattr(self, name).copy() for name in ("sampler", "remover", "rate_limiter")}
        return Table(**{**same, **copies, **overrides})

    def __repr__(self) -> str:
        return (
            f"Table({self.name!r}, sampler={self.sampler}, remover={self.remover}, max_size={self.max_size}, "
            f"rate_limiter={self.rate_limiter}, max_times_sampled={self.max_times_sampled})"
        )

    # Wiring.

    def set_seed(self, seed: int | None) -> None:
        """Restarts the sampler's random numbers."""
        with self.lock:
            self._rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    # Insertion.

    def check_items(self, layout: Layout, new: NewItems) -> None:
        """Checks items that `insert_now` is to insert, and notes the number of their layout.

        Raises:
          ValueError: The table cannot hold items with these priorities or this layout.
        """
        if new.priorities is not None:
            new.priorities = self._check_priorities(new.priorities, len(new.index))
        new.layout = self.bindings[layout]

    def _check_priorities(self, priorities: Any, n: int) -> np.ndarray:
        array = check_priorities(self.name, priorities, n)
        for selector in (self.sampler, self.remover):
            if n and selector.uses_priorities:
                selector.check(array)
        return array

    def insert_now(self, new: NewItems) -> int:
        """Inserts the next of the items, as many as the rate limiter allows, and returns how many.

        It never waits. `new.done` counts them, too, so that after an interrupt none is inserted twice.
        """
        n, before, limiter = len(new.keys), new.done, self.rate_limiter
        with self.lock:
            self.waiting.check_open()
            with self.waiting.change:
                while new.done < n and (allowed := limiter.allowed_inserts(min(n - new.done, self.max_size))):
                    self.items.insert(new if allowed == n else new.part(new.done, new.done + allowed))
                    limiter.inserts += allowed
                    new.done += allowed
            if new.done > before:
                self.waiting.notify(SAMPLERS)
        return new.done - before

    def wait_to_insert(self, timeout: float | None, cancelled: Callable[[], bool] | None = None) -> None:
        """Waits until one item could be inserted.

        Args:
          timeout: seconds; None waits without a limit, and 0 does not wait.
          cancelled: asked while it waits; the call ends with `ServerClosed` when it returns True.

        Raises:
          DeadlineExceededError: The timeout expired.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.waiting.counted(INSERTERS), self.lock:
            while not self.rate_limiter.allowed_inserts(1):
                self.waiting.wait(INSERTERS, 1, 0, deadline, cancelled)

    # Samples.

    def sample(
        self, n: int, timeout: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> Delivery:
        """Draws `n` samples and keeps their rows; waits while the rate limiter refuses.

        Samples count when they are drawn, one by one as the limiter allows, so that writers can continue
        while this call waits for the rest. If the call fails, what it has drawn is given back.

        Args:
          n: number of samples.
          timeout: seconds; None waits without a limit, and 0 does not wait.
          cancelled: asked while it waits; the call ends with `ServerClosed` when it returns True.

        Raises:
          DeadlineExceededError: The timeout expired. Nothing was sampled.
        """
        if n < 1:
            raise ValueError(f"table {self.name!r}, n: got {n}, expected at least 1 sample.")
        deadline = None if timeout is None else time.monotonic() + timeout
        delivery = Delivery()
        try:
            if self.draw(n, delivery):
                return delivery
            with self.waiting.counted(SAMPLERS):  # From now on, writers hold nothing back.
                while True:
                    before = len(delivery.slots)
                    if self.draw(n, delivery):
                        return delivery
                    with self.lock:
                        # A large request takes several draws; its time is limited even if it never waits.
                        late = timeout and deadline is not None and time.monotonic() >= deadline
                        got = len(delivery.slots)
                        if late or (got == before and not self.rate_limiter.allowed_samples(1)):
                            self.waiting.wait(SAMPLERS, n, got, deadline, cancelled)
        except BaseException:
            self.give_back(delivery)
            raise

    def draw(self, n: int, delivery: Delivery) -> bool:
        """Draws the next samples of a delivery of `n`, as far as the rate limiter allows; never waits.

        If the table was reset, the delivery drops what it holds and begins again.

        Returns:
          Whether the delivery is complete.
        """
        self.drain()
        with self.lock:
            self.waiting.check_open()
            with self.waiting.change:
                items, limiter = self.items, self.rate_limiter
                if delivery.items is not items:
                    if delivery.items is not None:
                        delivery.items.release(delivery.slots)
                    delivery.items = items
                    delivery.slots, delivery.ages = delivery.slots[:0], delivery.ages[:0]
                known = len(delivery.slots)
                picks = [(delivery.slots, delivery.ages, delivery.info)] if known else []
                missing = min(_MAX_DRAW, n - known)
                while missing and (allowed := limiter.allowed_samples(missing)):
                    slots, info = items.draw(allowed)
                    missing -= len(slots)
                    limiter.samples += len(slots)
                    ages = items.stamp - items.stamps.take(slots)
                    items.sampled_age += int(np.add.reduce(ages))
                    picks.append((slots, ages, info))
                if len(picks) > bool(known):
                    if len(picks) > 1:
                        slots, ages = (np.concatenate([pick[at] for pick in picks]) for at in (0, 1))
                        info = SampleInfo(
                            *map(np.concatenate, zip(*[pick[2] for pick in picks], strict=True))
                        )
                    delivery.slots, delivery.ages, delivery.info = slots, ages, info
                    delivery.parts = items.parts(slots)
            if len(picks) > bool(known):
                self.waiting.notify(INSERTERS)
            return len(delivery.slots) == n

    def release(self, delivery: Delivery) -> None:
        """Ends a delivery whose samples were copied: its rows may be used again."""
        with self.lock:
            items, delivery.items = delivery.items, None
            if items is not None and not self.waiting.change.open:
                with self.waiting.change:
                    items.release(delivery.slots)

    def give_back(self, delivery: Delivery, used: int = 0) -> None:
        """Undoes a draw but for its first `used` samples. Items take their old places again."""
        with self.lock:
            items, delivery.items = delivery.items, None
            if items is None or self.waiting.change.open:  # an interrupt has ended the table
                return
            with self.waiting.change:
                if used:
                    items.release(delivery.slots[:used])
                unused = delivery.slots[used:]
                items.give_back(unused)
                if items is self.items:  # no reset since the draw
                    items.sampled_age -= int(np.add.reduce(delivery.ages[used:]))
                    self.rate_limiter.samples -= len(unused)
                    self.waiting.notify(SAMPLERS)

    # Changes of items.

    def mutate(self, keys: Any = (), priorities: Any = (), deletes: Any = ()) -> int:
        """Deletes items, then sets priorities, and returns how many items were changed.

        Keys that are gone are ignored.

        Raises:
          ValueError: A priority is negative or not a number, or keys are not `[n]`. Nothing was changed.
          TypeError: Keys are not integers. Nothing was changed.
        """
        keys, deletes = check_keys(self.name, keys), check_keys(self.name, deletes)
        priorities = self._check_priorities(priorities, len(keys))
        self.drain()
        with self.lock:
            self.waiting.check_open()
            with self.waiting.change:
                items, changed = self.items, 0
                if len(deletes):
                    slots = np.unique(items.find(deletes))
                    slots = slots[slots >= 0]
                    items.remove(slots)
                    changed += len(slots)
                    self.waiting.notify(INSERTERS)
                if len(keys):
                    slots = items.find(keys)
                    here = slots >= 0
                    if np.count_nonzero(here) < len(slots):
                        slots, priorities = slots[here], priorities[here]
                    if len(slots):
                        items.update(slots, priorities)
                        changed += len(slots)
            return changed

    def reset(self) -> None:
        """Removes every item and sets every counter to 0. Rows are freed unless a delivery holds them."""
        self.drain()  # items that were created before and that the limiter allows go too
        with self.lock:
            self.waiting.check_open()
            with self.waiting.change:
                self.items.remove(np.flatnonzero(self.items.keys))
                self.empty()
                self.rate_limiter.reset()
                self.waiting.notify(INSERTERS)
                self.waiting.notify(SAMPLERS)

    # State.

    def can_sample(self, num_samples: int = 1) -> bool:
        """Returns whether `num_samples` can be sampled now without waiting."""
        self.drain()
        with self.lock:
            return self._allowed_samples(num_samples) == num_samples

    def can_insert(self, num_inserts: int = 1) -> bool:
        """Returns whether `num_inserts` can be inserted now without waiting."""
        self.drain()
        with self.lock:
            return self.rate_limiter.allowed_inserts(num_inserts) == num_inserts

    def weight(self) -> tuple[float, int, int]:
        """The sum of the weights, the number of items, and how many samples need not wait."""
        self.drain()
        with self.lock:
            return self.sampler.total_weight(), len(self.sampler), self._allowed_samples(1 << 31)

    def _allowed_samples(self, n: int) -> int:
        allowed = self.rate_limiter.allowed_samples(n)
        return min(allowed, self.items.turns()) if allowed and self.max_times_sampled else allowed

    def __len__(self) -> int:
        return self.rate_limiter.size

    def __bool__(self) -> bool:
        return True  # empty or not

    @property
    def info(self) -> TableInfo:
        """The description in `server_info`."""
        self.drain()
        with self.lock:
            if self.waiting.change.open:
                self.waiting.check_open()
            return self.items.info(self.name, self.signature, self.waiting)
