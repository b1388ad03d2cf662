"""A table: items, a selector that samples, one that removes, and a rate limiter.

::

    table = Table("replay", selectors.Uniform(), selectors.Fifo(), max_size=100_000,
    rate_limiter=rate_limiters.MinSize(1))

An item that is inserted goes to both selectors first and the table is brought down to ``max_size`` after, so
the new item
may be the one that is removed. An item that was sampled ``max_times_sampled`` times is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from framework.replay.delivery import Delivery, gather_parts
from framework.replay.errors import ServerClosed
from framework.replay.items import LIMBO, LIVE
from framework.replay.rate_limiters import Queue, Stack
from framework.replay.selectors import Fifo, Lifo
from framework.replay.table_core import TableCore
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

_ONE = np.int32(1)
# Batches above this many bytes are gathered outside of the table's lock, their rows pinned meanwhile.
_GATHER_UNDER_LOCK = 1 << 18


class Table(TableCore):
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

    # Sampling.

    def sample(
        self,
        n: int,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        partial: bool = False,
    ) -> Delivery:
        """Reserves ``n`` samples and pins their rows; waits while the rate limiter refuses.

        Samples are drawn one by one as the limiter allows. What was drawn before a wait counts as handed out
        during it, so
        that writers can go on; if the call fails it is given back. With ``partial`` the call returns as soon
        as it
        has any.

        Raises:
          DeadlineExceededError: nothing was sampled.
        """
        if n < 1:
            raise ValueError(f"table {self.name!r}, n: got {n}, expected at least 1 sample")
        self._drain()
        with self._lock:
            delivery = self._reserve(n, timeout, cancelled, partial)
            delivery.pin()
            return delivery

    def commit(self, delivery: Delivery) -> None:
        """The samples were handed out: they count, and items that were sampled often enough go."""
        self._settle(delivery, True)

    def give_back(self, delivery: Delivery) -> None:
        """The samples were not used: as if they had never been drawn. Items take their old places again."""
        self._settle(delivery, False)

    def sample_batch(
        self,
        n: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> ReplaySample | PaddedSample:
        """``sample``, gather and ``commit`` in one; see ``Delivery.gather`` for ``out`` and ``pad``."""
        if n < 1:
            raise ValueError(f"table {self.name!r}, n: got {n}, expected at least 1 sample")
        if self._drains:
            self._drain()
        with self._lock:
            limiter = self.rate_limiter
            if self.max_times_sampled or self._closed is not None or not limiter.can_sample(n, self._limbo):
                delivery = self._reserve(n, timeout, cancelled)
                delivery.pin()
            else:
                slots, info = self._draw(n)
                limiter.samples += n
                if self._waiting[1]:
                    self._may_insert.notify_all()
                parts = self._parts(slots)
                if n * max([part[0].item_bytes for part in parts]) <= _GATHER_UNDER_LOCK:
                    try:
                        return gather_parts(self.name, info, n, parts, out, pad)
                    except BaseException:
                        limiter.samples -= n
                        np.subtract.at(self._items.times, slots, _ONE)
                        raise
                delivery = Delivery(self.name, info, slots, parts)
                limiter.samples -= n
                limiter.reserved += n
                np.add.at(self._items.pending, slots, _ONE)
                delivery.pin()
        try:
            sample = delivery.gather(out, pad)
        except BaseException:
            self.give_back(delivery)
            raise
        else:
            self.commit(delivery)
            return sample
        finally:
            delivery.unpin()

    def _draw(self, n: int) -> tuple[np.ndarray, SampleInfo]:
        """``n`` samples none of which removes an item; the limiter has allowed them."""
        items = self._items
        slots, probabilities = self.sampler.sample(n, self._rng)
        times = items.times
        before = times.take(slots)
        np.add.at(times, slots, _ONE)
        before += _ONE
        repeated = np.flatnonzero(times.take(slots) != before)
        if len(repeated):  # some item more than once: its k-th sample says k
            earlier: dict[int, int] = {}
            for at, slot in zip(repeated.tolist(), slots[repeated].tolist(), strict=True):
                earlier[slot] = count = earlier.get(slot, -1) + 1
                before[at] += count
        size = np.empty(n, np.int64)
        size.fill(items.size - self._limbo)
        info = SampleInfo(items.keys.take(slots), probabilities, size, items.priorities.take(slots), before)
        return slots, info

    def _draw_some(self, n: int) -> tuple[np.ndarray, SampleInfo] | None:
        """Reserves up to ``n`` samples, as far as limiter and items go without an intermediate step; None for
        none."""
        items, limiter, sampler = self._items, self.rate_limiter, self.sampler
        allowed = limiter.allowed_samples(n, self._limbo)
        if not allowed or not len(sampler):
            return None
        limit = self.max_times_sampled
        if not limit:
            drawn = self._draw(allowed)
        elif sampler.deterministic and limit == 1:
            # Each sample removes its item, so the minimum size ends the row too.
            allowed = min(allowed, len(sampler) - limiter.min_size_to_sample + 1)
            slots = sampler.first(allowed)
            assert slots is not None  # every deterministic selector knows
            items.times[slots] = 1
            sizes = np.arange(len(sampler), len(sampler) - len(slots), -1, dtype=np.int64)
            ones = np.ones(len(slots))
            info = SampleInfo(
                items.keys.take(slots), ones, sizes, items.priorities.take(slots), items.times.take(slots)
            )
            drawn = slots, info
            self._to_limbo(slots)
        else:
            if sampler.deterministic:  # the same item until it leaves
                slots, _ = sampler.sample(1, self._rng)
                allowed = min(allowed, limit - int(items.times[slots[0]]))
                drawn = self._draw(allowed)
            else:
                drawn = self._draw_until_removal(allowed, limit)
            slots, info = drawn
            spent = slots[info.times_sampled >= limit]
            if len(spent):
                self._to_limbo(spent)
        slots = drawn[0]
        limiter.reserved += len(slots)
        np.add.at(items.pending, slots, _ONE)
        return drawn

    def _draw_until_removal(self, n: int, limit: int) -> tuple[np.ndarray, SampleInfo]:
        """Random samples up to and with the first that makes an item leave: what comes after must not see
        it."""
        items = self._items
        slots, info = self._draw(n)
        last = np.flatnonzero(info.times_sampled >= limit)
        if len(last) and last[0] + 1 < n:
            keep = int(last[0]) + 1
            np.subtract.at(items.times, slots[keep:], _ONE)
            slots, info = slots[:keep], SampleInfo(*[array[:keep] for array in info])
        return slots, info

    def _to_limbo(self, slots: np.ndarray) -> None:
        """Takes items out of both selectors that go for good when their last samples are committed."""
        self.sampler.delete(slots)
        self.remover.delete(slots)
        self._items.state[slots] = LIMBO
        self._limbo += len(slots)

    def _reserve(
        self, n: int, timeout: float | None, cancelled: Callable[[], bool] | None, partial: bool = False
    ) -> Delivery:
        """``n`` samples, waiting for them if need be. Called with the lock held."""
        pieces: list[tuple[np.ndarray, SampleInfo]] = []
        got = 0
        deadline: float | None = None
        try:
            while True:
                if self._closed is not None:
                    raise ServerClosed(f"table {self.name!r}: {self._closed}")
                drawn = self._draw_some(n - got)
                if drawn is not None:
                    pieces.append(drawn)
                    got += len(drawn[0])
                if got == n or (partial and got and drawn is None):
                    break
                if drawn is None:
                    if deadline is None and timeout is not None:
                        deadline = time.monotonic() + timeout
                    if got and self.concurrent:
                        self._wait_as_if_handed_out(got, deadline, cancelled, n)
                    else:
                        self._wait(0, deadline, cancelled, got, n)
        except BaseException:
            for slots, info in pieces:
                self._undo(slots, info.key, False)
            raise
        if len(pieces) == 1:
            slots, info = pieces[0]
        else:
            slots = np.concatenate([piece[0] for piece in pieces])
            info = SampleInfo(
                *[np.concatenate(arrays) for arrays in zip(*[piece[1] for piece in pieces], strict=True)]
            )
        return Delivery(self.name, info, slots, self._parts(slots))

    def _wait_as_if_handed_out(
        self, got: int, deadline: float | None, cancelled: Callable[[], bool] | None, n: int
    ) -> None:
        """Waits with what was drawn counted, so that a batch larger than the limiter's window can fill."""
        limiter = self.rate_limiter
        limiter.reserved -= got
        limiter.samples += got
        if self._waiting[1]:
            self._may_insert.notify_all()
        try:
            self._wait(0, deadline, cancelled, got, n)
        finally:
            limiter.reserved += got
            limiter.samples -= got

    def _drain(self) -> None:
        """Writers of this process put in what they hold back."""
        for drain in self._drains:
            drain()

    def _settle(self, delivery: Delivery, handed_out: bool) -> None:
        with self._lock:
            if not delivery.open:
                return
            delivery.open = False
            self._undo(delivery.slots, delivery.info.key, handed_out)

    def _undo(self, slots: np.ndarray, keys: np.ndarray, handed_out: bool) -> None:
        """Ends a reservation. Called with the lock held."""
        items, limiter = self._items, self.rate_limiter
        n = len(slots)
        limiter.reserved = max(0, limiter.reserved - n)  # a reset in between has forgotten it
        if handed_out:
            limiter.samples += n
        same = (items.keys.take(slots) == keys) & (items.state.take(slots) != 0)
        if not same.all():
            slots = slots[same]  # the others were removed in the meantime
        if not handed_out:
            np.subtract.at(items.times, slots, _ONE)
        np.subtract.at(items.pending, slots, _ONE)
        if self.max_times_sampled:
            mine = np.unique(slots[items.state.take(slots) == LIMBO])
            if handed_out:
                spent = mine[items.pending.take(mine) == 0]
                if len(spent):
                    self._remove(spent)
            elif len(mine):
                mine = mine[np.argsort(items.stamps.take(mine))]
                items.state[mine] = LIVE
                self._limbo -= len(mine)
                for selector in (self.sampler, self.remover):
                    selector.insert(mine, items.priorities.take(mine), items.stamps.take(mine))
                over = items.size - self._limbo - self.max_size
                for _ in range(max(0, over)):  # others have taken their places
                    self._remove(self.remover.sample(1, self._rng)[0])
        if self._waiting[1] and handed_out:
            self._may_insert.notify_all()
        if self._waiting[0] and not handed_out:
            self._may_sample.notify_all()

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
                slots = items.find(deletes)
                slots = np.unique(slots[slots >= 0])
                if len(slots):
                    self._remove(slots)
                    changed += len(slots)
                    self._may_insert.notify_all()
            if len(keys):
                slots = items.find(keys)
                if np.minimum.reduce(slots) < 0:
                    here = slots >= 0
                    slots, priorities = slots[here], priorities[here]
                if len(slots):
                    changed += self._update(slots, priorities)
            return changed

    def _update(self, slots: np.ndarray, priorities: np.ndarray) -> int:
        items = self._items
        items.priorities[slots] = priorities
        high = float(np.maximum.reduce(priorities))
        if self.max_priority is None or high > self.max_priority:
            self.max_priority = high
        if self._limbo:
            live = items.state.take(slots) == LIVE
            slots, priorities = slots[live], priorities[live]
        for selector in (self.sampler, self.remover):
            if selector.uses_priorities and len(slots):
                selector.update(slots, priorities)
        return len(slots)

    def reset(self) -> None:
        """Removes every item and sets every counter to 0; the store's rows are freed as far as nobody else
        holds them."""
        with self._lock:
            items = self._items
            slots = items.in_order()
            if len(slots):
                self._release(slots)
                items.put_back(slots)
            self.sampler.clear()
            self.remover.clear()
            self.rate_limiter.reset()
            self._limbo = 0
            self._episodes.clear()
            self._num_deleted_episodes = self._num_unique_deleted = 0
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
        if not limiter.can_sample(n, self._limbo) or not len(self.sampler):
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

    @property
    def size(self) -> int:
        """Items in the table."""
        return self._items.size

    def __len__(self) -> int:
        return self._items.size

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
                current_size=items.size,
                num_episodes=len(self._episodes),
                num_deleted_episodes=self._num_deleted_episodes,
                num_unique_samples=self._num_unique_deleted + int(np.count_nonzero(items.times[in_use])),
                table_worker_time=TableWorkerTime(
                    waiting_for_sampling_ms=blocked[1], waiting_for_inserts_ms=blocked[0]
                ),
                max_priority=1.0 if self.max_priority is None else self.max_priority,
                reserved=limiter.reserved,
                why_not_sample=limiter.why_not_sample(1, self._limbo),
                why_not_insert=limiter.why_not_insert(1),
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
