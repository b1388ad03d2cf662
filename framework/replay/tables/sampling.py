"""The sampling part of a table; see ``framework.replay.tables.table``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from framework.replay.errors import ServerClosed
from framework.replay.tables.delivery import Delivery, gather_parts
from framework.replay.tables.inserting import Inserting
from framework.replay.tables.items import LIMBO, LIVE
from framework.replay.types import PaddedSample, ReplaySample, SampleInfo

_ONE = np.int32(1)
# Batches above this many bytes are gathered outside of the table's lock, their rows pinned meanwhile.
_GATHER_UNDER_LOCK = 1 << 18


class Sampling(Inserting):
    """A table that can be inserted into and sampled."""

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
            return self._reserve(n, timeout, cancelled, partial)

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
            else:
                slots, info = self._draw(n)
                age = self._age(slots)
                limiter.samples += n
                if self._waiting[1]:
                    self._may_insert.notify_all()
                parts = self._parts(slots)
                if n * max([part[0].item_bytes for part in parts]) <= _GATHER_UNDER_LOCK:
                    try:
                        sample = gather_parts(self.name, info, n, parts, out, pad)
                    except BaseException:
                        limiter.samples -= n
                        np.subtract.at(self._items.times, slots, _ONE)
                        raise
                    self._age_sum += age
                    return sample
                delivery = Delivery(self.name, info, slots, parts, self._epoch, age)
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
        size = np.empty(n, np.int64)
        size.fill(items.size - self._limbo)
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

    def _age(self, slots: np.ndarray) -> int:
        """Over these samples: how many items came after the one drawn, itself included."""
        stamps = self._items.stamps
        if self._compiled is not None:
            return len(slots) * self._stamp - int(self._compiled.sum_at(stamps, slots))
        return len(slots) * self._stamp - int(np.add.reduce(stamps.take(slots)))

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
        """``n`` samples with their rows pinned, waiting for them if need be. Called with the lock held."""
        pieces: list[Delivery] = []
        got = 0
        deadline: float | None = None
        try:
            while True:
                if self._closed is not None:
                    raise ServerClosed(f"table {self.name!r}: {self._closed}")
                if pieces and pieces[0].epoch != self._epoch:  # a reset while this call waited: begin again
                    for piece in pieces:
                        piece.unpin()
                    pieces, got = [], 0
                drawn = self._draw_some(n - got)
                if drawn is not None:
                    slots, info = drawn
                    # Pinned at once: while this call waits for the others, these may be removed.
                    pieces.append(
                        Delivery(self.name, info, slots, self._parts(slots), self._epoch, self._age(slots))
                    )
                    pieces[-1].pin()
                    got += len(slots)
                if got == n or (partial and got and drawn is None):
                    return pieces[0] if len(pieces) == 1 else self._join(pieces)
                if drawn is None:
                    if deadline is None and timeout is not None:
                        deadline = time.monotonic() + timeout
                    if got and (self.concurrent or self._drains):
                        self._wait_as_if_handed_out(got, deadline, cancelled, n)
                    else:
                        self._wait(0, deadline, cancelled, got, n)
        except BaseException:
            for piece in pieces:
                piece.unpin()
                if piece.epoch == self._epoch:
                    self._undo(piece.slots, piece.info.key, False)
            raise

    def _join(self, pieces: list[Delivery]) -> Delivery:
        """One delivery of several that are pinned."""
        slots = np.concatenate([piece.slots for piece in pieces])
        fields = zip(*[piece.info for piece in pieces], strict=True)
        info = SampleInfo(*[np.concatenate(arrays) for arrays in fields])
        by_binding: dict[Any, list[tuple]] = {}
        begin = 0
        for piece in pieces:
            for binding, places, index, lengths in piece.parts:
                at = np.arange(len(piece)) if places is None else places
                by_binding.setdefault(binding, []).append((at + begin, index, lengths))
            begin += len(piece)
        parts: list[tuple] = []
        for binding, found in by_binding.items():
            places = np.concatenate([each[0] for each in found]) if len(by_binding) > 1 else None
            index = np.concatenate([each[1] for each in found])
            lengths = None if found[0][2] is None else np.concatenate([each[2] for each in found])
            parts.append((binding, places, index, lengths))
        age = sum(piece.age for piece in pieces)
        joined = Delivery(self.name, info, slots, parts, pieces[0].epoch, age)
        joined.pinned = True  # the pieces' pins are its own now
        return joined

    def _wait_as_if_handed_out(
        self, got: int, deadline: float | None, cancelled: Callable[[], bool] | None, n: int
    ) -> None:
        """Waits with what was drawn counted, so that a batch larger than the limiter's window can fill."""
        limiter, epoch = self.rate_limiter, self._epoch
        limiter.reserved -= got
        limiter.samples += got
        if self._waiting[1]:
            self._may_insert.notify_all()
        try:
            self._wait(0, deadline, cancelled, got, n)
        finally:
            if epoch == self._epoch:
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
            if delivery.epoch != self._epoch:
                return  # a reset has forgotten it
            if handed_out:
                self._age_sum += delivery.age
            self._undo(delivery.slots, delivery.info.key, handed_out)

    def _undo(self, slots: np.ndarray, keys: np.ndarray, handed_out: bool) -> None:
        """Ends a reservation. Called with the lock held."""
        items, limiter = self._items, self.rate_limiter
        n = len(slots)
        limiter.reserved -= n
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
