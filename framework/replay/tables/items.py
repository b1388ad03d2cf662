"""The items of a table, and the order in which they are sampled and removed."""

from __future__ import annotations

import dataclasses

import numpy as np

from framework.replay.rows.allocator import zeros
from framework.replay.rows.layout import Bindings, Part
from framework.replay.rows.store import grown, span
from framework.replay.tables.keys import KeyMap
from framework.replay.tables.rate_limiters import INSERTERS, SAMPLERS, RateLimiter, Waiting
from framework.replay.tables.selectors import Fifo, Selector
from framework.replay.types import CallStats, RateLimiterInfo, SampleInfo, TableInfo, TableWorkerTime
from framework.replay.writers import NewItems
from framework.types import Nest

# Items that have left the table keep their slots and rows until their readers are done: `SPENT` ones had
# their last turn, which may be given back; `GONE` ones were removed.
FREE, LIVE, SPENT, GONE = 0, 1, 2, 3

_ONE = np.array(1, np.int32)  # numpy takes several times longer to convert a scalar
_MAX_PICK = 64  # Samples drawn at once where some may be taken back, because an item has left before them.
# The first group has one number for each item, the second one several columns.
_ARRAYS = ("state", "keys", "priorities", "times", "done", "stamps")
_WIDE = ("layouts", "episodes", "index", "lengths")


@dataclasses.dataclass(eq=False)
class Items:
    """Arrays `[slots]` of items, the selectors that sample and remove them, and references to their rows.

    The arrays grow to the largest number of items that the table has held at once. The table's lock guards
    every call. The number of items in the table is `limiter.size`.

    Attributes:
      num_used: number of slots that were ever used, the first ones.
      free: int64, a stack of those that are free; the first `num_free` entries.
      num_left: number of items that have left the table and that readers still hold.
      max_priority: the largest priority so far, which items without one get; None before the first.
      sampled_age: over all samples, the number of items inserted after the sampled one, itself included.
      stamp: number of items inserted so far.
      num_unique_deleted: number of removed items that had been sampled.
      num_deleted_episodes: number of episodes whose last item was removed.
      episode_sizes: number of items of each episode.
    """

    sampler: Selector
    remover: Selector
    limiter: RateLimiter
    max_size: int
    max_times_sampled: int
    bindings: Bindings
    rng: np.random.Generator
    num_left: int = 0
    max_priority: float | None = None
    sampled_age: int = 0
    stamp: int = 0
    num_unique_deleted: int = 0
    num_deleted_episodes: int = 0

    def __post_init__(self) -> None:
        self.episode_sizes: dict[int, int] = {}
        self.state = np.zeros(0, np.int8)
        self.keys = np.zeros(0, np.uint64)  # 0 where the slot is free or the item has left
        self.priorities = np.zeros(0)
        self.times = np.zeros(0, np.int32)  # how often it was sampled
        self.done = np.zeros(0, np.int32)  # how many of these samples were released
        self.stamps = np.zeros(0, np.int64)  # grow with each insertion
        self.layouts = np.zeros((0, 0), np.int32)  # numbers of bindings; no column if all are 0
        self.episodes = np.zeros((0, 0), np.uint64)  # 0 for none
        self.index = np.zeros((0, 0), np.int64)
        self.lengths = np.zeros((0, 0), np.int32)
        self.num_used = self.num_free = 0
        self.free = np.zeros(0, np.int64)
        self._key_map: KeyMap | None = None  # made by the first `find`
        self.grow(1024)

    def grow(self, size: int) -> None:
        """Makes room for `size` slots, or for eight times as many as before, as far as the table holds them.

        Memory is taken when a slot is used for the first time.
        """
        size = max(size, min(8 * len(self.state), self.max_size))
        for name in (*_ARRAYS, *_WIDE):
            setattr(self, name, grown(getattr(self, name), size, size))
        self._key_map = None
        self.sampler.reserve(size)
        self.remover.reserve(size)

    def widen(self, **columns: int) -> None:
        """Gives arrays this number of columns, unless they have it."""
        for name, number in columns.items():
            array = getattr(self, name)
            if number > array.shape[1]:
                wider = zeros((len(array), number), array.dtype, huge=True)
                wider[: self.num_used, : array.shape[1]] = array[: self.num_used]
                setattr(self, name, wider)

    # Insertion and removal.

    def insert(self, new: NewItems) -> None:
        """Adds at most `max_size` items, then removes items until at most `max_size` remain."""
        limiter, n = self.limiter, len(new.keys)
        over = limiter.size + n - self.max_size
        if over > 0 and n > 1 and not self.remover.deterministic:
            for each in range(n):  # each removal is a choice among the items of its moment
                self.insert(new.part(each, each + 1))
            return
        priorities = new.priorities
        if priorities is None:
            if self.max_priority is None:
                self.max_priority = 1.0
            priorities = np.empty(n)
            priorities.fill(self.max_priority)
        else:
            self.max_priority = max(float(np.maximum.reduce(priorities)), self.max_priority or 0.0)
        if new.episodes is not None:  # first: an episode stays while one of its items replaces another
            self._count_episodes(new.episodes, 1)
        self.bindings.known[new.layout].acquire(new.index)
        stamps = np.arange(self.stamp, self.stamp + n)
        self.stamp += n
        replaces = over == n and type(self.remover) is Fifo
        if replaces:
            slots = self.remover.first(n)
            at = span(slots)
            if np.count_nonzero(self.times[at] != self.done[at]):  # readers hold some of them
                self.remove(slots)
                replaces = False
            else:
                self._forget(at)
                for binding, _, index, _ in self.parts(at):
                    binding.release(index)
        if not replaces:
            reused = min(n, self.num_free)
            end, self.num_free = self.num_free, self.num_free - reused
            slots = self.free[self.num_free : end][::-1].copy()
            if reused < n:
                begin, self.num_used = self.num_used, self.num_used + n - reused
                if self.num_used > len(self.state):
                    self.grow(self.num_used)
                slots = np.concatenate([slots, np.arange(begin, self.num_used)])
            at = span(slots)
            self.state[at] = LIVE
            limiter.size += n
        self.priorities[at] = priorities
        self.times[at] = 0
        self.done[at] = 0
        self.stamps[at] = stamps
        width = new.index.shape[1]
        if width > self.index.shape[1] or new.layout or new.lengths is not None or new.episodes is not None:
            groups, episodes = (0 if each is None else each.shape[1] for each in (new.lengths, new.episodes))
            self.widen(index=width, layouts=int(new.layout > 0), lengths=groups, episodes=episodes)
            if new.lengths is not None:
                self.lengths[at, :groups] = new.lengths
        self.index[at, :width] = new.index
        if self.layouts.shape[1]:
            self.layouts[at] = new.layout
        if self.episodes.shape[1]:
            self.episodes[at] = 0
            if new.episodes is not None:
                self.episodes[at, : new.episodes.shape[1]] = new.episodes
        self.keys[at] = new.keys
        if self._key_map is not None:
            self._key_map.add(slots, new.keys)
        for selector in (self.sampler, self.remover):
            if replaces:
                selector.replace(slots, priorities, self.stamps)
            else:
                selector.insert(slots, priorities, self.stamps)
        if limiter.size > self.max_size:
            self.trim()

    def remove(self, slots: np.ndarray) -> None:
        """Removes items, live or spent. Rows that a reader holds stay until it is done."""
        live = slots[self.state.take(slots) == LIVE]
        if len(live):
            self._leave(live, GONE)
        self._forget(slots)
        self.state[slots] = GONE
        self._end(slots[self.times.take(slots) == self.done.take(slots)])

    def trim(self) -> None:
        """Removes items until at most `max_size` remain."""
        while (over := self.limiter.size - self.max_size) > 0:
            remover = self.remover
            self.remove(remover.first(over) if remover.deterministic else remover.sample(1, self.rng)[0])

    def _leave(self, slots: np.ndarray, state: int) -> None:
        """Takes live items out of the table; they keep their slots until their readers are done."""
        self.sampler.delete(slots)
        self.remover.delete(slots)
        self.state[slots] = state
        self.limiter.size -= len(slots)
        self.num_left += len(slots)

    def _forget(self, slots: np.ndarray | slice) -> None:
        """Counts items that leave for good, and forgets their keys."""
        self.num_unique_deleted += int(np.count_nonzero(self.times[slots]))
        if self._key_map is not None:
            self._key_map.forget(self.keys[slots])
        self.keys[slots] = 0
        if self.episode_sizes:
            self._count_episodes(self.episodes[slots], -1)

    def _end(self, slots: np.ndarray) -> None:
        """Frees the slots of items that have left the table and have no reader."""
        if not len(slots):
            return
        for binding, _, index, _ in self.parts(slots):
            binding.release(index)
        self.state[slots] = FREE
        self.num_left -= len(slots)
        end = self.num_free + len(slots)
        self.free = grown(self.free, end)
        self.free[self.num_free : end] = slots[::-1]
        self.num_free = end

    def _count_episodes(self, episodes: np.ndarray, change: int) -> None:
        for episode in episodes[episodes > 0].tolist():
            number = self.episode_sizes.get(episode, 0) + change
            if number > 0:
                self.episode_sizes[episode] = number
            elif self.episode_sizes.pop(episode, None) is not None:
                self.num_deleted_episodes += 1

    # Samples.

    def draw(self, n: int) -> tuple[np.ndarray, SampleInfo]:
        """Counts up to `n` samples of a table that is not empty.

        The result is shorter if an item leaves with its last turn, because the next sample must not see it.
        """
        limit, sampler, size = self.max_times_sampled, self.sampler, self.limiter.size
        in_order = limit == 1 and sampler.deterministic  # each item is chosen once
        if in_order:
            slots = sampler.first(min(n, size - self.limiter.min_size_to_sample + 1))
            probabilities = np.ones(len(slots))
        else:
            slots, probabilities = sampler.sample(min(n, _MAX_PICK) if limit else n, self.rng)
        # Each of several samples of an item has a number of its own.
        times = self.times.take(slots)
        np.add.at(self.times, slots, _ONE)
        times += _ONE
        repeated = (self.times.take(slots) != times).nonzero()[0]
        if len(repeated):
            seen: dict[int, int] = {}
            for at, slot in zip(repeated.tolist(), slots[repeated].tolist(), strict=True):
                seen[slot] = earlier = seen.get(slot, -1) + 1
                times[at] += earlier
        sizes = np.empty(len(slots), np.int64)
        sizes.fill(size)
        info = SampleInfo(self.keys.take(slots), probabilities, sizes, self.priorities.take(slots), times)
        if limit:
            if in_order:
                sizes -= np.arange(len(slots))
            # A restored item may have been sampled more often than a lower limit allows.
            last = np.flatnonzero(times >= limit)
            if len(last) and not in_order:
                keep = int(last[0]) + 1
                np.subtract.at(self.times, slots[keep:], _ONE)
                slots, info, last = slots[:keep], SampleInfo(*[each[:keep] for each in info]), last[:1]
            if len(last):
                self._leave(slots[last], SPENT)
        return slots, info

    def parts(self, slots: np.ndarray | slice) -> list[Part]:
        """Returns the samples of items by layout; see `Delivery`."""
        known = self.bindings.known
        if len(known) == 1 and not known[0].ragged:
            index = self.index[slots] if type(slots) is slice else self.index.take(slots, 0)
            return [(known[0], None, index[:, : known[0].width], None)]
        if type(slots) is slice:
            slots = np.arange(slots.start, slots.stop)
        layouts = self.layouts.take(slots, 0).sum(1)
        numbers = sorted(set(layouts.tolist()))
        parts: list[Part] = []
        for number in numbers:
            binding = known[number]
            places = None if len(numbers) == 1 else np.flatnonzero(layouts == number)
            mine = slots if places is None else slots[places]
            lengths = self.lengths[mine, : len(binding.spans)] if binding.ragged else None
            parts.append((binding, places, self.index[mine, : binding.width], lengths))
        return parts

    def release(self, slots: np.ndarray) -> None:
        """Notes that readers have made their copies of the items in `slots`."""
        np.add.at(self.done, slots, _ONE)
        if self.num_left:
            self._end_left(slots)

    def _end_left(self, slots: np.ndarray) -> None:
        """Ends the items among these that have left the table and no longer have a reader."""
        read = self.times.take(slots) != self.done.take(slots)
        slots = np.unique(slots[(self.state.take(slots) > LIVE) & ~read])
        self._forget(slots[self.state.take(slots) == SPENT])
        self._end(slots)

    def give_back(self, slots: np.ndarray) -> None:
        """Undoes the samples of `slots`: items that left with them take their old places again.

        If other items were inserted in the meantime, the table then holds more than `max_size` items, until
        they are sampled or the next insert removes the surplus. A queue must not lose items, so there the
        surplus is sampled first.
        """
        np.subtract.at(self.times, slots, _ONE)
        revived = np.unique(slots[self.state.take(slots) == SPENT])
        if len(revived):
            revived = revived[np.argsort(self.stamps.take(revived))]
            self.state[revived] = LIVE
            self.limiter.size += len(revived)
            self.num_left -= len(revived)
            for selector in (self.sampler, self.remover):
                selector.insert(revived, self.priorities.take(revived), self.stamps)
        self._end_left(slots)

    def in_order(self) -> np.ndarray:
        """Returns the slots of the items in the table, oldest first."""
        slots = np.flatnonzero(self.state == LIVE)
        return slots[np.argsort(self.stamps[slots], kind="stable")]

    def turns(self) -> int:
        """Returns the number of samples before the table is below its minimum size, if turns are limited."""
        turns = np.sort(np.maximum(1, self.max_times_sampled - self.times[self.state == LIVE]))
        return int(turns[: max(0, len(turns) - self.limiter.min_size_to_sample + 1)].sum())

    # Changes.

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the slot of each key, int64 `[n]`; -1 for keys that are gone or never existed."""
        if self._key_map is None:
            self._key_map = KeyMap(self.keys)
        return self._key_map.find(keys)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items, live or spent."""
        self.priorities[slots] = priorities
        self.max_priority = max(float(np.maximum.reduce(priorities)), self.max_priority or 0.0)
        if self.num_left:
            live = self.state.take(slots) == LIVE
            slots, priorities = slots[live], priorities[live]
        for selector in (self.sampler, self.remover):
            if selector.uses_priorities and len(slots):
                selector.update(slots, priorities)

    def info(self, name: str, signature: Nest, waiting: Waiting) -> TableInfo:
        """Describes the table `name` that has these items."""
        limiter = self.limiter
        why_not_sample, why_not_insert = limiter.refusals()
        sampled_ms, inserted_ms = (int(1000 * seconds) for seconds in waiting.seconds)
        return TableInfo(
            name=name,
            sampler_options=self.sampler.config(),
            remover_options=self.remover.config(),
            max_size=self.max_size,
            max_times_sampled=self.max_times_sampled,
            rate_limiter_info=RateLimiterInfo(
                limiter.samples_per_insert,
                limiter.min_diff,
                limiter.max_diff,
                limiter.min_size_to_sample,
                CallStats(limiter.inserts, waiting.counts[INSERTERS], inserted_ms),
                CallStats(limiter.samples, waiting.counts[SAMPLERS], sampled_ms),
            ),
            signature=signature,
            current_size=limiter.size,
            num_episodes=len(self.episode_sizes),
            num_deleted_episodes=self.num_deleted_episodes,
            num_unique_samples=self.num_unique_deleted + int(np.count_nonzero(self.times[self.keys > 0])),
            table_worker_time=TableWorkerTime(
                waiting_for_sampling_ms=inserted_ms, waiting_for_inserts_ms=sampled_ms
            ),
            max_priority=1.0 if self.max_priority is None else self.max_priority,
            why_not_sample=why_not_sample,
            why_not_insert=why_not_insert,
            sampled_age=self.sampled_age,
        )
