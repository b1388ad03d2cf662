"""The inserting half of a table; see ``framework.replay.table``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from framework.replay.binding import Binding
from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.items import LIVE, Items
from framework.replay.layout import Layout
from framework.replay.rate_limiters import RateLimiter
from framework.replay.selectors import Fifo, Selector
from framework.replay.store import RowStore
from framework.types import Nest


class Bell(threading.Condition):
    """A condition that also rings for those who do not wait on it (a server's event loop)."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.rings: list[Callable[[], None]] = []

    def notify_all(self) -> None:
        super().notify_all()
        for ring in self.rings:
            ring()


class TableCore:
    """Items, selectors, limiter, and everything but sampling. Every public method may be called from several
    threads.

    Args:
      name: of the table.
      sampler, remover: selectors; one object serves one table.
      max_size: items that the table holds.
      rate_limiter: when it may be sampled and inserted into.
      max_times_sampled: an item is removed when it was sampled that often; below 1 for never.
      extensions: kept for Reverb's signature; must be empty.
      signature: nest of specs (anything with ``shape`` and ``dtype``) that every item must match; None checks
      nothing.
      seed: of the sampler's random numbers; None takes one from the system.
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
                f"table {name!r}: min_size_to_sample {rate_limiter.min_size_to_sample} is above "
                f"max_size {max_size}: it "
                "could never be sampled"
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
        rate_limiter.bind(name)
        sampler.owner = remover.owner = name
        self.name = name
        self.sampler = sampler
        self.remover = remover
        self.max_size = int(max_size)
        self.rate_limiter = rate_limiter
        self.max_times_sampled = max(0, int(max_times_sampled))
        self.signature = signature
        self.max_priority: float | None = None
        #: False where nobody else runs in this thread's process: what would wait for ever is an error
        #: instead.
        self.concurrent = True
        self.store = RowStore()
        self._rng = np.random.default_rng(seed)
        self._items = Items(self.max_size)
        self._bindings: list[Binding] = []
        self._binding_of: dict[Layout, int] = {}
        self._limbo = 0
        self._stamp = 0
        self._num_unique_deleted = 0
        self._episodes: dict[int, int] = {}
        self._num_deleted_episodes = 0
        self._lock = threading.Lock()
        self._may_sample = Bell(self._lock)
        self._may_insert = Bell(self._lock)
        self._waiting = [0, 0]  # samplers, inserters
        self._blocked = [0.0, 0.0]  # seconds
        self._closed: str | None = None
        self._drains: tuple[Callable[[], None], ...] = ()

    # Wiring.

    def attach(self, store: RowStore, concurrent: bool = True) -> None:
        """Makes ``store`` the one that items point into. Called once by the server, before anything is
        inserted."""
        if self._items.size:
            raise ValueError(f"table {self.name!r}: got a new store while it holds items")
        self.store = store
        self.concurrent = concurrent

    def add_drain(self, drain: Callable[[], None]) -> None:
        """``drain`` is called before anything is read: a writer of this process puts in there what it holds
        back."""
        with self._lock:
            self._drains = (*self._drains, drain)

    def remove_drain(self, drain: Callable[[], None]) -> None:
        """The opposite of ``add_drain``."""
        with self._lock:
            self._drains = tuple(each for each in self._drains if each != drain)

    def watch(self, ring: Callable[[], None]) -> None:
        """``ring`` is called, with the table's lock held, whenever those who wait should look again."""
        self._may_sample.rings.append(ring)
        self._may_insert.rings.append(ring)

    def count_waiting(self, side: int, change: int) -> None:
        """Somebody who does not wait in this process begins (1) or ceases (-1) to wait; ``side`` 0 samples, 1
        inserts."""
        with self._lock:
            self._waiting[side] += change

    def count_drawn(self, n: int) -> None:
        """``n`` reserved samples count as handed out from now on; of a negative number, as reserved again."""
        with self._lock:
            self.rate_limiter.reserved -= n
            self.rate_limiter.samples += n
            if n > 0 and self._waiting[1]:
                self._may_insert.notify_all()

    @property
    def sampler_waits(self) -> bool:
        """Whether somebody waits for items now; a writer then holds nothing back."""
        return self._waiting[0] > 0

    def set_seed(self, seed: int | None) -> None:
        """Starts the sampler's random numbers anew."""
        with self._lock:
            self._rng = np.random.default_rng(seed)

    def close(self, reason: str = "the server was stopped") -> None:
        """Every call that waits, and every later one, is a ``ServerClosed``."""
        with self._lock:
            self._closed = reason
        self.wake()

    def wake(self) -> None:
        """Makes calls that wait look at their ``cancelled`` again."""
        with self._lock:
            self._may_sample.notify_all()
            self._may_insert.notify_all()

    # Inserting.

    def bind(self, layout: Layout) -> int:
        """The table's number for ``layout``; ValueError if its streams, columns or the signature do not
        fit."""
        number = self._binding_of.get(layout)
        if number is None:
            binding = Binding(layout, self.store, self.name, self.signature)
            with self._lock:
                number = self._binding_of.get(layout)
                if number is None:
                    number = len(self._bindings)
                    self._bindings.append(binding)
                    self._items.widen(binding.width)
                    self._binding_of[layout] = number
        return number

    def check_priorities(self, priorities: Any, n: int) -> np.ndarray:
        """``priorities`` as float64 ``[n]``; ValueError if one is negative, not a number or too large for a
        selector."""
        array = np.asarray(priorities, np.float64)
        if array.shape != (n,):
            raise ValueError(f"table {self.name!r}, priorities: got shape {array.shape}, expected ({n},)")
        if n:
            low, high = np.minimum.reduce(array), np.maximum.reduce(array)
            if not (low >= 0.0 and high < np.inf):
                bad = array[~((array >= 0.0) & (array < np.inf))]
                raise ValueError(
                    f"table {self.name!r}, priorities: got {bad[:3].tolist()}, expected finite "
                    "numbers >= 0; nothing was changed"
                )
            self.sampler.check(low, high)
            self.remover.check(low, high)
        return array

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
          index: int64 ``[k, layout.width]`` rows.
          priorities: float64 ``[k]``, or None for the largest so far, 1.0 at first.
          keys: uint64 ``[k]`` that the writer made (``items.make_keys``); the table's own if None. Items
          whose key is in the table
            already are not inserted again.
          lengths: int32 ``[k, groups]`` for ragged items.
          episodes: uint64 ``[k]`` names of the episodes that the items belong to, for ``num_episodes``.
          timeout: seconds; None waits for ever and 0 not at all.
          cancelled: asked while waiting; the call ends with ``ServerClosed`` when it says so.

        Returns:
          uint64 ``[k]`` keys.

        Raises:
          ValueError: wrong priorities, rows or layout; nothing was changed.
          DeadlineExceededError: its ``args[1]`` says how many were inserted before the time was over.
        """
        n = len(index)
        if priorities is not None:
            priorities = self.check_priorities(priorities, n)
        number = self.bind(layout)
        result = np.empty(n, np.uint64) if keys is None else keys
        with self._lock:
            done = 0
            deadline = None
            while True:
                if self._closed is not None:
                    raise ServerClosed(f"table {self.name!r}: {self._closed}")
                allowed = self.rate_limiter.allowed_inserts(min(n - done, self.max_size))
                if allowed:
                    part = slice(done, done + allowed)
                    named = self._insert(
                        number,
                        index[part],
                        None if priorities is None else priorities[part],
                        None if keys is None else keys[part],
                        None if lengths is None else lengths[part],
                        None if episodes is None else episodes[part],
                    )
                    result[part] = named
                    done += allowed
                    if self._waiting[0]:
                        self._may_sample.notify_all()
                if done == n:
                    return result
                if not allowed:
                    if deadline is None and timeout is not None:
                        deadline = time.monotonic() + timeout
                    self._wait(1, deadline, cancelled, done, n)

    def try_insert(self, number: int, index: np.ndarray, priorities: Any, keys: np.ndarray) -> int:
        """Inserts as many of the items as go in at once; how many. For writers that hold items back."""
        with self._lock:
            if self._closed is not None:
                raise ServerClosed(f"table {self.name!r}: {self._closed}")
            done = 0
            while done < len(index):
                allowed = self.rate_limiter.allowed_inserts(min(len(index) - done, self.max_size))
                if not allowed:
                    break
                part = slice(done, done + allowed)
                chosen = None if priorities is None else priorities[part]
                self._insert(number, index[part], chosen, keys[part], None, None)
                done += allowed
            if done and self._waiting[0]:
                self._may_sample.notify_all()
            return done

    def _insert(
        self,
        number: int,
        index: np.ndarray,
        priorities: np.ndarray | None,
        keys: np.ndarray | None,
        lengths: np.ndarray | None,
        episodes: np.ndarray | None,
    ) -> np.ndarray:
        """Inserts items that the limiter has let through, at most ``max_size`` of them."""
        items = self._items
        if keys is not None and items.foreign:
            fresh = [key not in items.foreign for key in keys.tolist()]
            if not all(fresh):
                if any(fresh):
                    pick = np.flatnonzero(fresh)
                    parts = [None if a is None else a[pick] for a in (priorities, keys, lengths, episodes)]
                    self._insert(number, index[pick], *parts)  # type: ignore[arg-type]
                return keys
        n = len(index)
        if priorities is None:
            priorities = np.full(n, 1.0 if self.max_priority is None else self.max_priority)
        high = float(np.maximum.reduce(priorities))
        if self.max_priority is None or high > self.max_priority:
            self.max_priority = high
        binding = self._bindings[number]
        binding.acquire(index)
        stamps = np.arange(self._stamp, self._stamp + n)
        self._stamp += n
        evict = items.size - self._limbo + n - self.max_size  # items in limbo are as good as gone
        if evict <= 0:
            slots = items.take(n)
            named = self._write(slots, number, index, priorities, keys, lengths, episodes, stamps)
            self.sampler.insert(slots, priorities, stamps)
            self.remover.insert(slots, priorities, stamps)
        elif evict <= len(self.remover) and type(self.remover) is Fifo:
            victims = self.remover.first(evict)
            self._release(victims)
            if evict == n:
                slots = victims
            else:
                slots = np.concatenate([items.take(n - evict), victims])
            named = self._write(slots, number, index, priorities, keys, lengths, episodes, stamps, evict < n)
            for selector in (self.sampler, self.remover):
                if evict < n:
                    new = n - evict
                    selector.insert(slots[:new], priorities[:new], stamps[:new])
                    selector.replace(victims, priorities[new:], stamps[new:])
                else:
                    selector.replace(slots, priorities, stamps)
            self.rate_limiter.deletes += evict
        else:
            named = self._insert_one_by_one(number, index, priorities, keys, lengths, episodes, stamps)
        self.rate_limiter.inserts += n
        return named

    def _insert_one_by_one(self, number, index, priorities, keys, lengths, episodes, stamps) -> np.ndarray:
        """For removers that may choose one of the new items themselves."""
        named = np.empty(len(index), np.uint64)
        for at in range(len(index)):
            one = slice(at, at + 1)
            slots = self._items.take(1)
            key, length, episode = [None if a is None else a[one] for a in (keys, lengths, episodes)]
            named[one] = self._write(
                slots, number, index[one], priorities[one], key, length, episode, stamps[one]
            )
            self.sampler.insert(slots, priorities[one], stamps[one])
            self.remover.insert(slots, priorities[one], stamps[one])
            if self._items.size - self._limbo > self.max_size:
                victims, _ = self.remover.sample(1, self._rng)
                self._remove(victims)
        return named

    def _write(
        self, slots, number, index, priorities, keys, lengths, episodes, stamps, fresh=True
    ) -> np.ndarray:
        """Fills the arrays for new items in ``slots``; their keys."""
        items = self._items
        at = items.span(slots)
        if fresh:
            items.state[at] = LIVE
        named = items.name(slots, at, keys)
        items.priorities[at] = priorities
        items.times[at] = 0
        items.pending[at] = 0
        items.stamps[at] = stamps
        if len(self._bindings) > 1:
            items.layouts[at] = number
        if index.shape[1] == items.index.shape[1]:
            items.index[at] = index
        else:
            items.index[at, : index.shape[1]] = index
        if lengths is not None:
            items.set_lengths(slots, lengths)
        if episodes is not None:
            if items.episodes is None:
                items.episodes = np.zeros(len(items.state), np.uint64)
            items.episodes[slots] = episodes
            for episode in episodes.tolist():
                self._episodes[episode] = self._episodes.get(episode, 0) + 1
        elif items.episodes is not None:
            items.episodes[slots] = 0
        return named

    # Removing.

    def _remove(self, slots: np.ndarray) -> None:
        """Deletes the items in ``slots``, live or in limbo."""
        state = self._items.state.take(slots)
        live = slots if (state == LIVE).all() else slots[state == LIVE]
        if len(live):
            self.sampler.delete(live)
            self.remover.delete(live)
        self._limbo -= len(slots) - len(live)
        self._release(slots)
        self._items.put_back(slots)
        self.rate_limiter.deletes += len(slots)

    def _release(self, slots: np.ndarray) -> None:
        """Drops what the items in ``slots`` hold: rows, keys, episodes."""
        items = self._items
        self._num_unique_deleted += int(np.count_nonzero(items.times.take(slots)))
        items.forget(slots)
        if items.episodes is not None:
            for episode in items.episodes[slots].tolist():
                left = self._episodes.get(episode, 0) - 1
                if left > 0:
                    self._episodes[episode] = left
                elif left == 0:
                    del self._episodes[episode]
                    self._num_deleted_episodes += 1
        for binding, _, index, _ in self._parts(slots):
            binding.drop(index)

    def _parts(self, slots: np.ndarray) -> list[tuple]:
        """``Delivery.parts`` of the items in ``slots``."""
        items = self._items
        index = items.index.take(slots, 0)
        lengths = None if items.lengths is None else items.lengths.take(slots, 0)
        if len(self._bindings) == 1:
            return [(self._bindings[0], None, index, lengths)]
        numbers = items.layouts.take(slots)
        parts = []
        for number in sorted(set(numbers.tolist())):
            binding = self._bindings[number]
            places = np.flatnonzero(numbers == number)
            own = None if lengths is None or not binding.ragged else lengths[places, : len(binding.spans)]
            if len(places) == len(slots):
                return [(binding, None, index[:, : binding.width], own)]
            parts.append((binding, places, index[places, : binding.width], own))
        return parts

    # Waiting.

    def wait_to_insert(self, timeout: float | None, cancelled: Callable[[], bool] | None = None) -> None:
        """Waits until one item could be inserted; DeadlineExceededError if the timeout is over first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self.rate_limiter.can_insert(1):
                if self._closed is not None:
                    raise ServerClosed(f"table {self.name!r}: {self._closed}")
                self._wait(1, deadline, cancelled, 0, 1)

    def _wait(
        self,
        side: int,
        deadline: float | None,
        cancelled: Callable[[], bool] | None,
        done: int,
        n: int,
    ) -> None:
        """Waits until the other side has done something. Called with the lock held; ``side`` 0 samples, 1
        inserts."""
        verb = ("sample", "insert")[side]
        limiter = self.rate_limiter
        why = limiter.why_not_insert(1) if side else limiter.why_not_sample(1, self._limbo)
        now = time.monotonic()
        text = (
            f"table {self.name!r}: cannot {verb} {n} items ({done} went through): "
            f"{why or 'no item is left to sample'}"
        )
        if cancelled is not None and cancelled():
            raise ServerClosed(f"table {self.name!r}: the client was interrupted")
        if deadline is not None and now >= deadline:
            raise DeadlineExceededError(f"{text}; the timeout is over", done)
        if not self.concurrent:
            raise WouldBlockError(f"{text}; nothing else runs in this thread, so it would wait for ever")
        condition = (self._may_sample, self._may_insert)[side]
        self._waiting[side] += 1
        try:
            # An upper bound on a single wait keeps Ctrl-C working and costs nothing.
            condition.wait(5.0 if deadline is None else min(5.0, deadline - now))
        finally:
            self._waiting[side] -= 1
            self._blocked[side] += time.monotonic() - now
