"""The inserting part of a table; see ``framework.replay.tables.table``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.rows.binding import Binding
from framework.replay.rows.layout import Layout
from framework.replay.tables.items import LIVE
from framework.replay.tables.selectors import Fifo
from framework.replay.tables.table_core import TableCore


class Inserting(TableCore):
    """A table that can be inserted into."""

    def bind(self, layout: Layout) -> int:
        """The table's number for ``layout``; ValueError if its streams, columns or the signature do not
        fit."""
        latest = self._latest
        if latest[0] is layout:  # a layout's hash takes its time
            return latest[1]
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
        self._latest = (layout, number)
        return number

    def check_priorities(self, priorities: Any, n: int) -> np.ndarray:
        """``priorities`` as float64 ``[n]``; ValueError if one is negative, not a number or too large for a
        selector."""
        array = np.asarray(priorities, np.float64)
        if array.shape != (n,):
            raise ValueError(f"table {self.name!r}, priorities: got shape {array.shape}, expected ({n},)")
        if n:
            if self._compiled is not None:
                low, high = self._compiled.bounds(array)
            else:
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
            whose key is in the table already are not inserted again.
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
        if n == 0:
            return result
        with self._lock:
            done = 0
            deadline = None
            while True:
                if self._closed is not None:
                    raise ServerClosed(f"table {self.name!r}: {self._closed}")
                allowed = self.rate_limiter.allowed_inserts(min(n - done, self.max_size))
                if allowed == n:
                    named = self._insert(number, index, priorities, keys, lengths, episodes)
                    if self._waiting[0]:
                        self._may_sample.notify_all()
                    return named
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
                    try:
                        self._wait(1, deadline, cancelled, done, n)
                    except DeadlineExceededError as error:
                        error.keys = result[:done]
                        raise

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
            priorities = np.empty(n)
            priorities.fill(1.0 if self.max_priority is None else self.max_priority)
            self.max_priority = float(priorities[0])
        else:
            high = float(np.maximum.reduce(priorities))
            if self.max_priority is None or high > self.max_priority:
                self.max_priority = high
        binding = self._bindings[number]
        binding.acquire(index)
        stamps = np.arange(self._stamp, self._stamp + n)
        self._stamp += n
        evict = items.size - self._spent + n - self.max_size
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
            if self._items.size - self._spent > self.max_size:
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

    def wait_to_insert(self, timeout: float | None, cancelled: Callable[[], bool] | None = None) -> None:
        """Waits until one item could be inserted; DeadlineExceededError if the timeout is over first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self.rate_limiter.can_insert(1):
                if self._closed is not None:
                    raise ServerClosed(f"table {self.name!r}: {self._closed}")
                self._wait(1, deadline, cancelled, 0, 1)
