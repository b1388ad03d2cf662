"""What a table is made of: items, selectors, limiter, locks; see ``framework.replay.tables.table``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from framework.replay import kernels
from framework.replay.errors import DeadlineExceededError, ServerClosed, WouldBlockError
from framework.replay.rows.binding import Binding
from framework.replay.rows.layout import Layout
from framework.replay.rows.store import RowStore
from framework.replay.tables.items import LIVE, Items
from framework.replay.tables.rate_limiters import RateLimiter
from framework.replay.tables.selectors import Selector
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
    """Items, selectors, limiter, waiting and removal. Every public method may be called from several
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
        self._compiled = kernels.load()
        self._items = Items(self.max_size)
        self._bindings: list[Binding] = []
        self._binding_of: dict[Layout, int] = {}
        self._latest: tuple[Layout | None, int] = (None, 0)
        self._spent = 0
        self._epoch = 0  # resets so far
        self._stamp = 0
        self._age_sum = (
            0  # over all samples handed out: how many items came after the one drawn, itself included
        )
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

    # Removing.

    def _remove(self, slots: np.ndarray) -> None:
        """Deletes the items in ``slots``, live or spent."""
        if not len(slots):
            return
        state = self._items.state.take(slots)
        live = slots if (state == LIVE).all() else slots[state == LIVE]
        if len(live):
            self.sampler.delete(live)
            self.remover.delete(live)
        self._spent -= len(slots) - len(live)
        self._release(slots)
        self._items.put_back(slots)
        self.rate_limiter.deletes += len(live)

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
        why = limiter.why_not_insert(1) if side else limiter.why_not_sample(1)
        now = time.monotonic()
        text = (
            f"table {self.name!r}: cannot {verb} {n} items ({done} went through): "
            f"{why or 'no item is left to sample'}"
        )
        if cancelled is not None and cancelled():
            raise ServerClosed(f"table {self.name!r}: the client was interrupted")
        if deadline is not None and now >= deadline:
            raise DeadlineExceededError(f"{text}; the timeout is over", done)
        if side == 0 and self._drains:
            # Writers of this process may hold back what there was no room for before.
            inserts = limiter.inserts
            self._lock.release()
            try:
                for drain in self._drains:
                    drain()
            finally:
                self._lock.acquire()
            if limiter.inserts != inserts:
                return
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
