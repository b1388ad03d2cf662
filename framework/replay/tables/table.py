"""A table: items, a selector that samples, one that removes, and a rate limiter.

::

    table = Table("replay", selectors.Uniform(), selectors.Fifo(), max_size=100_000,
    rate_limiter=rate_limiters.MinSize(1))

An item that is inserted goes to both selectors first and the table is brought down to ``max_size`` after, so
the new item
may be the one that is removed. An item that was sampled ``max_times_sampled`` times is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.replay.errors import ServerClosed
from framework.replay.tables.items import LIVE
from framework.replay.tables.rate_limiters import Queue, Stack
from framework.replay.tables.sampling import Sampling
from framework.replay.tables.selectors import Fifo, Lifo
from framework.replay.types import (
    CallStats,
    RateLimiterInfo,
    TableInfo,
    TableWorkerTime,
)
from framework.types import Nest


class Table(Sampling):
    """See the module, and ``TableCore`` for the arguments. Every public method may be called from several
    threads."""

    @classmethod
    def queue(
        cls,
        name: str,
        max_size: int,
        extensions: Sequence[Any] = (),
        signature: Nest = None,
        seed: int | None = None,
    ) -> Table:
        """Each item is sampled once, oldest first; inserts wait while ``max_size`` items wait."""
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
        """Each item is sampled once, newest first; inserts wait while ``max_size`` items wait."""
        return cls(name, Lifo(), Lifo(), max_size, Stack(max_size), 1, extensions, signature, seed)

    # Changing items.

    def mutate(self, keys: Any = (), priorities: Any = (), deletes: Any = ()) -> int:
        """Deletes items, then sets priorities; keys that are gone are ignored. How many items were changed.

        Raises:
          ValueError: a priority is negative or not a number; nothing was changed.
        """
        keys = np.asarray(keys, np.uint64)
        priorities = self.check_priorities(priorities, len(keys))
        if len(deletes):
            deletes = np.asarray(deletes, np.uint64)
        if self._drains:
            self._drain()
        items = self._items
        with self._lock:
            if self._closed is not None:
                raise ServerClosed(f"table {self.name!r}: {self._closed}")
            changed = 0
            if len(deletes):
                slots, _ = items.find(deletes)
                slots = np.unique(slots[slots >= 0])
                if len(slots):
                    self._remove(slots)
                    changed += len(slots)
                    self._may_insert.notify_all()
            if len(keys):
                slots, complete = items.find(keys)
                if not complete:
                    here = slots >= 0
                    slots, priorities = slots[here], priorities[here]
                if len(slots):
                    changed += self._update(slots, priorities)
            return changed

    def _update(self, slots: np.ndarray, priorities: np.ndarray) -> int:
        items = self._items
        items.priorities[slots] = priorities
        compiled = self._compiled
        high = float(np.maximum.reduce(priorities) if compiled is None else compiled.bounds(priorities)[1])
        if self.max_priority is None or high > self.max_priority:
            self.max_priority = high
        if self._spent:
            live = items.state.take(slots) == LIVE
            slots, priorities = slots[live], priorities[live]
        for selector in (self.sampler, self.remover):
            if selector.uses_priorities and len(slots):
                selector.update(slots, priorities)
        return len(slots)

    def reset(self) -> None:
        """Removes every item and sets every counter to 0; the store's rows are freed as far as nobody else
        holds them."""
        self._drain()  # items that were created before and have room go too
        with self._lock:
            items = self._items
            slots = items.in_order()
            if len(slots):
                self._release(slots)
                items.put_back(slots)
            self.sampler.clear()
            self.remover.clear()
            self.rate_limiter.reset()
            self._spent = 0
            self._epoch += 1
            self._episodes.clear()
            self._num_deleted_episodes = self._num_unique_deleted = self._age_sum = 0
            self.max_priority = None
            self._may_insert.notify_all()
            self._may_sample.notify_all()

    # Looking.

    def can_sample(self, n: int = 1) -> bool:
        """Whether ``n`` could be sampled now without waiting."""
        self._drain()
        with self._lock:
            return self._can_sample(n)

    def _can_sample(self, n: int) -> bool:
        limiter = self.rate_limiter
        if not limiter.can_sample(n) or not len(self.sampler):
            return False
        if not self.max_times_sampled:
            return True
        # Every turn of every item but those that keep the table at its minimum.
        items = self._items
        live = np.flatnonzero(items.state == LIVE)
        turns = np.sort(self.max_times_sampled - items.times[live])
        spare = len(live) - limiter.min_size_to_sample
        return bool(n <= (turns.sum() if spare >= len(live) - 1 else turns[: spare + 1].sum()))

    def can_insert(self, n: int = 1) -> bool:
        """Whether ``n`` could be inserted now without waiting."""
        self._drain()
        with self._lock:
            return self.rate_limiter.can_insert(n)

    def weight(self) -> tuple[float, int]:
        """The sum of the sampler's weights, and how many items it can choose from."""
        self._drain()
        with self._lock:
            return self.sampler.total_weight(), len(self.sampler)

    @property
    def size(self) -> int:
        """Items in the table."""
        return self._items.size - self._spent

    def __len__(self) -> int:
        return self._items.size - self._spent

    def __bool__(self) -> bool:
        return True  # empty or not

    @property
    def info(self) -> TableInfo:
        """What ``server_info`` reports."""
        self._drain()
        with self._lock:
            limiter, items = self.rate_limiter, self._items
            blocked = [int(1000 * seconds) for seconds in self._blocked]
            in_use = items.state != 0
            return TableInfo(
                name=self.name,
                sampler_options={"kind": type(self.sampler).__name__, **self.sampler.options()},
                remover_options={"kind": type(self.remover).__name__, **self.remover.options()},
                max_size=self.max_size,
                max_times_sampled=self.max_times_sampled,
                rate_limiter_info=RateLimiterInfo(
                    **limiter.options(),
                    insert_stats=CallStats(limiter.inserts, self._waiting[1], blocked[1]),
                    sample_stats=CallStats(limiter.samples, self._waiting[0], blocked[0]),
                ),
                signature=self.signature,
                current_size=items.size - self._spent,
                num_episodes=len(self._episodes),
                num_deleted_episodes=self._num_deleted_episodes,
                num_unique_samples=self._num_unique_deleted + int(np.count_nonzero(items.times[in_use])),
                table_worker_time=TableWorkerTime(
                    waiting_for_sampling_ms=blocked[1], waiting_for_inserts_ms=blocked[0]
                ),
                max_priority=1.0 if self.max_priority is None else self.max_priority,
                why_not_sample=limiter.why_not_sample(1),
                why_not_insert=limiter.why_not_insert(1),
                sampled_age=self._age_sum,
            )

    def replace(self, **overrides: Any) -> Table:
        """A new, empty table like this one but for ``overrides``, by the names of the constructor's
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
