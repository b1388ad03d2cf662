"""The sampling part of a table; see ``framework.replay.tables.table``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.tables.delivery import Delivery
from framework.replay.tables.inserting import Inserting
from framework.replay.tables.items import LIVE, SPENT
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo

_ONE = np.int32(1)
# Samples drawn in one hold of the lock: a larger request lets others in between.
_MAX_DRAW = 1 << 16


class Sampling(Inserting):
    """A table that can be inserted into and sampled."""

    def sample(
        self,
        n: int,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Delivery:
        """Draws ``n`` samples and pins their rows; waits while the rate limiter refuses.

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
                before = delivery
                delivery = self.draw(n, before)
                got = 0 if delivery is None else len(delivery)
                if delivery is not None and got == n:
                    return delivery
                if delivery is before:
                    with self._lock:
                        if not self._can_draw():
                            self._wait(0, deadline, cancelled, got, n)
                elif timeout and deadline is not None and time.monotonic() >= deadline:
                    raise DeadlineExceededError(
                        f"table {self.name!r}: cannot sample {n} items ({got} went through) in {timeout:g} s"
                    )
        except BaseException:
            if delivery is not None:
                self.give_back(delivery)
            raise

    def draw(self, n: int, delivery: Delivery | None = None) -> Delivery | None:
        """The next samples of a request for ``n``, as far as the rate limiter allows now; never waits.

        Returns:
          ``delivery`` with what was drawn added to it, and ``delivery`` itself if nothing was. A reset of
          the table ends the old delivery, and the request begins again.
        """
        self._drain()
        with self._lock:
            if self._closed is not None:
                raise ServerClosed(f"table {self.name!r}: {self._closed}")
            if delivery is not None and delivery.epoch != self._epoch:
                delivery.unpin()
                delivery = None
            missing = min(_MAX_DRAW, n - (0 if delivery is None else len(delivery)))
            picks: list[tuple[np.ndarray, SampleInfo]] = []
            while missing > 0 and (picked := self._pick(missing)) is not None:
                picks.append(picked)
                missing -= len(picked[0])
            if not picks:
                return delivery
            if len(picks) == 1:
                slots, info = picks[0]
            else:
                slots = np.concatenate([slots for slots, _ in picks])
                info = SampleInfo(*map(np.concatenate, zip(*[info for _, info in picks], strict=True)))
            age = self._age(slots)
            self._age_sum += age
            drawn = Delivery(self.name, info, slots, self._parts(slots), self._epoch, age)
            drawn.pin()
            if self.max_times_sampled:
                np.add.at(self._items.pending, slots, _ONE)
            if self._waiting[1]:
                self._may_insert.notify_all()
        return drawn if delivery is None else delivery.joined(drawn)

    def release(self, delivery: Delivery) -> None:
        """The reader has its copy: the rows may be used again, and items that have no turn left are gone."""
        self._settle(delivery, used=True)

    def give_back(self, delivery: Delivery) -> None:
        """The samples were not used: as if they had never been drawn. Items take their old places again."""
        self._settle(delivery, used=False)

    def sample_batch(
        self,
        n: int,
        timeout: float | None = None,
        out: list[Any] | None = None,
        pad: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> ReplaySample | PaddedSample:
        """``sample``, gather and ``release`` in one; see ``Delivery.gather`` for ``out`` and ``pad``."""
        delivery = self.sample(n, timeout, cancelled)
        try:
            sample = delivery.gather(out, pad)
        except BaseException:
            self.give_back(delivery)
            raise
        self.release(delivery)
        return sample

    def _can_draw(self) -> bool:
        return len(self.sampler) > 0 and self.rate_limiter.can_sample(1)

    def _pick(self, n: int) -> tuple[np.ndarray, SampleInfo] | None:
        """Counts up to ``n`` samples, as far as limiter and items go in one step; None for none."""
        limiter, sampler, limit = self.rate_limiter, self.sampler, self.max_times_sampled
        allowed = limiter.allowed_samples(n)
        if not allowed or not len(sampler):
            return None
        if not limit:
            drawn = self._count(*sampler.sample(allowed, self._rng))
        elif sampler.deterministic and limit == 1:
            # Each sample removes its item, so the minimum size ends the row too.
            slots = sampler.first(min(allowed, len(sampler) - limiter.min_size_to_sample + 1))
            assert slots is not None  # every deterministic selector knows
            drawn = self._count(slots, np.ones(len(slots)))
            drawn[1].table_size[:] -= np.arange(len(slots))
        elif sampler.deterministic:  # the same item until it leaves
            slots, probabilities = sampler.sample(allowed, self._rng)
            turns = limit - int(self._items.times[slots[0]])
            drawn = self._count(slots[:turns], probabilities[:turns])
        else:
            drawn = self._count_until_removal(*sampler.sample(allowed, self._rng))
        slots, info = drawn
        limiter.samples += len(slots)
        if limit:
            spent = slots[info.times_sampled >= limit]
            if len(spent):  # they are kept aside until their readers are done with them
                self.sampler.delete(spent)
                self.remover.delete(spent)
                self._items.state[spent] = SPENT
                self._spent += len(spent)
                limiter.deletes += len(spent)
        return drawn

    def _count(self, slots: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, SampleInfo]:
        """Counts one more sample of each of ``slots``, and says what a sample says."""
        items = self._items
        n = len(slots)
        size = np.empty(n, np.int64)
        size.fill(items.size - self._spent)
        times = items.times
        if self._compiled is not None:
            counts, keys, priorities = np.empty(n, np.int32), np.empty(n, np.uint64), np.empty(n)
            self._compiled.draw(slots, times, items.keys, items.priorities, counts, keys, priorities)
            return slots, SampleInfo(keys, probabilities, size, priorities, counts)
        before = times.take(slots)
        np.add.at(times, slots, _ONE)
        before += _ONE
        repeated = np.flatnonzero(times.take(slots) != before)
        if len(repeated):  # some item more than once: its k-th sample says k
            earlier: dict[int, int] = {}
            for at, slot in zip(repeated.tolist(), slots[repeated].tolist(), strict=True):
                earlier[slot] = count = earlier.get(slot, -1) + 1
                before[at] += count
        info = SampleInfo(items.keys.take(slots), probabilities, size, items.priorities.take(slots), before)
        return slots, info

    def _count_until_removal(
        self, slots: np.ndarray, probabilities: np.ndarray
    ) -> tuple[np.ndarray, SampleInfo]:
        """Random samples up to and with the first that makes an item leave: what comes after must not see
        it."""
        slots, info = self._count(slots, probabilities)
        last = np.flatnonzero(info.times_sampled >= self.max_times_sampled)
        if len(last) and last[0] + 1 < len(slots):
            keep = int(last[0]) + 1
            np.subtract.at(self._items.times, slots[keep:], _ONE)
            slots, info = slots[:keep], SampleInfo(*[array[:keep] for array in info])
        return slots, info

    def _age(self, slots: np.ndarray) -> int:
        """Over these samples: how many items came after the one drawn, itself included."""
        stamps = self._items.stamps
        if self._compiled is not None:
            return len(slots) * self._stamp - int(self._compiled.sum_at(stamps, slots))
        return len(slots) * self._stamp - int(np.add.reduce(stamps.take(slots)))

    def _drain(self) -> None:
        """Writers of this process put in what they hold back."""
        for drain in self._drains:
            drain()

    def _settle(self, delivery: Delivery, used: bool) -> None:
        """Ends a delivery. What a reset or a removal has forgotten meanwhile is left alone."""
        with self._lock:
            if not delivery.open:
                return
            delivery.open = False
            if delivery.epoch == self._epoch and (self.max_times_sampled or not used):
                items = self._items
                slots = delivery.slots[items.keys.take(delivery.slots) == delivery.info.key]
                if not used:
                    self.rate_limiter.samples -= len(delivery)
                    self._age_sum -= delivery.age
                    np.subtract.at(items.times, slots, _ONE)
                if self.max_times_sampled:
                    np.subtract.at(items.pending, slots, _ONE)
                    spent = np.unique(slots[items.state.take(slots) == SPENT])
                    if not used:
                        self._revive(spent)
                    else:
                        self._remove(spent[items.pending.take(spent) == 0])
                if not used and self._waiting[0]:
                    self._may_sample.notify_all()
        delivery.unpin()

    def _revive(self, slots: np.ndarray) -> None:
        """Items that had no turn left have one again."""
        if not len(slots):
            return
        items = self._items
        slots = slots[np.argsort(items.stamps.take(slots))]
        items.state[slots] = LIVE
        self._spent -= len(slots)
        self.rate_limiter.deletes -= len(slots)
        for selector in (self.sampler, self.remover):
            selector.insert(slots, items.priorities.take(slots), items.stamps.take(slots))
        for _ in range(items.size - self._spent - self.max_size):  # others have taken their places
            self._remove(self.remover.sample(1, self._rng)[0])
