"""What is in a table, and the order in which it is sampled and removed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from framework.replay.rows.layout import Bindings, Layout
from framework.replay.tables.delivery import Part
from framework.replay.tables.items import FREE, GONE, LIVE, SPENT, Items, NewItems
from framework.replay.tables.selectors import Fifo, Selector
from framework.replay.types import SampleInfo

_ONE = np.int32(1)
_NONE = np.zeros(0, np.int64)
# Samples drawn at once where some may be taken back, because an item has left before them.
_MAX_PICK = 64


class Contents:
    """Items, the selectors that sample and remove them, and their rows. The table's lock guards every call.

    Attributes:
      max_priority: the largest priority so far, which items without one get; None before the first.
      age_sum: over all samples, how many items came after the one drawn, itself included.
      stamp: how many items came so far.
      num_unique_deleted: items that were sampled before they were removed.
      num_deleted_episodes: episodes whose last item was removed.
      episodes: how many items each episode has.
    """

    def __init__(
        self,
        sampler: Selector,
        remover: Selector,
        max_size: int,
        max_times_sampled: int,
        bindings: Bindings,
        rng: np.random.Generator,
    ):
        self.sampler = sampler
        self.remover = remover
        self.max_size = max_size
        self.max_times_sampled = max_times_sampled
        self.bindings = bindings
        self.rng = rng
        self.items = Items()
        self.max_priority: float | None = None
        self.age_sum = 0
        self.num_unique_deleted = 0
        self.num_deleted_episodes = 0
        self.episodes: dict[int, int] = {}
        self.stamp = 0

    # In and out.

    def insert(self, new: NewItems) -> None:
        """Adds at most `max_size` items, then removes as many as are too many."""
        items, n = self.items, len(new.keys)
        over = items.size + n - self.max_size
        oldest_first = type(self.remover) is Fifo
        if over > 0 and n > 1 and (over < n or not oldest_first):
            # Those that fill the table, then those that replace others; one by one where the remover may
            # choose one of the new items.
            cuts = [0, n - over, n] if oldest_first else range(n + 1)
            for begin, end in itertools.pairwise(cuts):
                self.insert(new.part(begin, end))
            return
        if new.priorities is None:
            if self.max_priority is None:
                self.max_priority = 1.0
            priorities = np.empty(n)
            priorities.fill(self.max_priority)
        else:
            priorities = new.priorities
            self.max_priority = max(float(np.maximum.reduce(priorities)), self.max_priority or 0.0)
        self.bindings.known[new.layout].acquire(new.index)
        stamps = np.arange(self.stamp, self.stamp + n)
        self.stamp += n
        replaced: np.ndarray | None = None
        if over > 0 and oldest_first:
            replaced = self.remover.first(n)
            if np.count_nonzero(items.times.take(replaced) != items.done.take(replaced)):  # readers have some
                self.remove(replaced)
                replaced = None
            else:
                self._forget(replaced)
                self._drop_rows(replaced)
        slots = items.take(n) if replaced is None else replaced
        items.add(slots, new, priorities, stamps)
        if new.episodes is not None:
            self._count_episodes(new.episodes, 1)
        for selector in (self.sampler, self.remover):
            if replaced is None:
                selector.insert(slots, priorities, stamps)
            else:
                selector.replace(slots, priorities, stamps)
        if over > 0 and not oldest_first:
            self.trim()

    def remove(self, slots: np.ndarray) -> None:
        """Removes items, live or spent. Rows that a reader has stay until it is done."""
        items = self.items
        live = slots[items.state.take(slots) == LIVE]
        if len(live):
            self.sampler.delete(live)
            self.remover.delete(live)
            items.size -= len(live)
            items.num_left += len(live)
        self._forget(slots)
        items.state[slots] = GONE
        self._free(slots[items.times.take(slots) == items.done.take(slots)])

    def trim(self) -> None:
        """Removes items until at most `max_size` are there."""
        while self.items.size > self.max_size:
            self.remove(self.remover.sample(1, self.rng)[0])

    def _forget(self, slots: np.ndarray) -> None:
        """Items leave the table, or have left it with their last turn: their keys mean nothing any more."""
        items = self.items
        self.num_unique_deleted += int(np.count_nonzero(items.times.take(slots)))
        items.forget(slots)
        if self.episodes:
            self._count_episodes(items.episodes.take(slots), -1)

    def _free(self, slots: np.ndarray) -> None:
        """Ends items that have left the table and have no reader."""
        if len(slots):
            self._drop_rows(slots)
            self.items.free(slots)

    def _drop_rows(self, slots: np.ndarray) -> None:
        for binding, _, index, _ in self.parts(slots):
            binding.release(index)

    def _count_episodes(self, episodes: np.ndarray, change: int) -> None:
        for episode in episodes.tolist():
            number = self.episodes.get(episode, 0) + change
            if number > 0:
                self.episodes[episode] = number
            elif self.episodes.pop(episode, None) is not None:
                self.num_deleted_episodes += 1

    # Samples.

    def pick(self, n: int, min_size: int) -> tuple[np.ndarray, SampleInfo]:
        """Counts up to `n` samples; fewer if an item leaves with its last turn, which the next sample must
        not see.

        `min_size` is the number of items below which the table is not sampled. The table is not empty.
        """
        limit, sampler = self.max_times_sampled, self.sampler
        if limit == 1 and sampler.deterministic:  # the order is known, item after item
            slots = sampler.first(min(n, len(sampler) - min_size + 1))
            info = self.items.draw(slots, np.ones(len(slots)))
            info.table_size[:] -= np.arange(len(slots))
        else:
            if limit:
                n = min(n, _MAX_PICK)
            slots, probabilities = sampler.sample(n, self.rng)
            info = self.items.draw(slots, probabilities)
            # Not ==: a restored item may have been sampled more often than a lower limit allows.
            last = np.flatnonzero(info.times_sampled >= limit) if limit else _NONE
            if len(last):
                keep = int(last[0]) + 1
                np.subtract.at(self.items.times, slots[keep:], _ONE)
                slots, info = slots[:keep], SampleInfo(*[array[:keep] for array in info])
        if limit:
            spent = slots[info.times_sampled >= limit]
            if len(spent):
                sampler.delete(spent)
                self.remover.delete(spent)
                self.items.state[spent] = SPENT
                self.items.size -= len(spent)
                self.items.num_left += len(spent)
        return slots, info

    def parts(self, slots: np.ndarray) -> list[Part]:
        """See `Delivery.parts`."""
        items, known = self.items, self.bindings.known
        if len(known) == 1 and not known[0].ragged:
            return [(known[0], None, items.index.take(slots, 0)[:, : known[0].width], None)]
        layouts = items.layouts.take(slots)
        numbers = sorted(set(layouts.tolist()))
        parts: list[Part] = []
        for number in numbers:
            binding = known[number]
            places = None if len(numbers) == 1 else np.flatnonzero(layouts == number)
            mine = slots if places is None else slots[places]
            lengths = items.lengths[mine, : len(binding.spans)] if binding.ragged else None
            parts.append((binding, places, items.index[mine, : binding.width], lengths))
        return parts

    def release(self, slots: np.ndarray) -> None:
        """Readers have their copies of the items in `slots`."""
        np.add.at(self.items.done, slots, _ONE)
        if self.items.num_left:
            self._free_left(slots)

    def _free_left(self, slots: np.ndarray) -> None:
        """Ends those of the items that have left the table and have no reader any more."""
        items = self.items
        read = items.times.take(slots) != items.done.take(slots)
        slots = np.unique(slots[(items.state.take(slots) > LIVE) & ~read])
        self._forget(slots[items.state.take(slots) == SPENT])
        self._free(slots)

    def give_back(self, slots: np.ndarray) -> None:
        """As `release`, but as if the samples had never been drawn: items take their old places again."""
        items = self.items
        np.subtract.at(items.times, slots, _ONE)
        revived = np.unique(slots[items.state.take(slots) == SPENT])
        if len(revived):
            revived = revived[np.argsort(items.stamps.take(revived))]
            items.state[revived] = LIVE
            items.size += len(revived)
            items.num_left -= len(revived)
            for selector in (self.sampler, self.remover):
                selector.insert(revived, items.priorities.take(revived), items.stamps.take(revived))
            self.trim()  # others may have taken their places
        self._free_left(slots)

    def turns(self, min_size: int) -> int:
        """How many samples there are before the table is smaller than `min_size`, if turns are limited."""
        items = self.items
        turns = np.sort(np.maximum(1, self.max_times_sampled - items.times[items.state == LIVE]))
        return int(turns[: max(0, len(turns) - min_size + 1)].sum())

    @property
    def num_unique_samples(self) -> int:
        """Items that were sampled, those that were removed included."""
        here = (self.items.state == LIVE) | (self.items.state == SPENT)
        return self.num_unique_deleted + int(np.count_nonzero(self.items.times[here]))

    # Changes.

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items, live or spent."""
        self.items.priorities[slots] = priorities
        self.max_priority = max(float(np.maximum.reduce(priorities)), self.max_priority or 0.0)
        if self.items.num_left:
            live = self.items.state.take(slots) == LIVE
            slots, priorities = slots[live], priorities[live]
        for selector in (self.sampler, self.remover):
            if selector.uses_priorities and len(slots):
                selector.update(slots, priorities)

    def clear(self) -> None:
        """Removes everything; other contents take the place of these."""
        state = self.items.state
        self.remove(np.flatnonzero((state == LIVE) | (state == SPENT)))

    # Checkpoints.

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Numbers and arrays from which `restore` goes on in exactly the same way.

        Samples count when they are drawn, so items without a turn are not in it.
        """
        numbers = {
            "rng": self.rng.bit_generator.state,
            "max_priority": self.max_priority,
            "stamp": self.stamp,
            "num_unique_deleted": self.num_unique_deleted + int(np.count_nonzero(self.items.state == SPENT)),
            "num_deleted_episodes": self.num_deleted_episodes,
            "sampled_age": self.age_sum,
            "layouts": [binding.layout.to_wire() for binding in self.bindings.known],
        }
        arrays = self.items.save()
        for role, selector in (("sampler", self.sampler), ("remover", self.remover)):
            arrays.update({f"{role}.{name}": array for name, array in selector.state().items()})
        return numbers, arrays

    def restore(self, numbers: dict[str, Any], arrays: dict[str, np.ndarray], roles: tuple[str, ...]) -> None:
        """Fills empty contents; the streams of the layouts exist and `arrays["index"]` holds their rows.

        Args:
          numbers, arrays: what `state` has given.
          roles: of `("sampler", "remover")`, the selectors whose own state is in `arrays`.
        """
        saved = arrays["layouts"]
        arrays = {**arrays, "layouts": np.zeros_like(saved)}
        # Layouts without items are left out: their streams may hold nothing and then are not in the
        # checkpoint.
        used = arrays["state"] != FREE
        for number in np.unique(saved[used]).tolist():
            layout = Layout.from_wire(numbers["layouts"][number])
            arrays["layouts"][used & (saved == number)] = self.bindings[layout]
        items = self.items
        items.restore(arrays)
        slots = items.in_order()
        for binding, _, index, _ in self.parts(slots):
            binding.acquire(index)
        for role, selector in (("sampler", self.sampler), ("remover", self.remover)):
            own = {name: arrays[f"{role}.{name}"] for name in selector.state() if role in roles}
            selector.restore(slots, items.priorities[slots], items.stamps[slots], own)
        self.rng.bit_generator.state = numbers["rng"]
        self.max_priority = numbers["max_priority"]
        self.stamp = numbers["stamp"]
        self.num_unique_deleted = numbers["num_unique_deleted"]
        self.num_deleted_episodes = numbers["num_deleted_episodes"]
        self.age_sum = numbers["sampled_age"]
        names, counts = np.unique(items.episodes[slots], return_counts=True)
        self.episodes = dict(zip(names.tolist(), counts.tolist(), strict=True))
        self.episodes.pop(0, None)  # items without one
        self.trim()  # the table may be smaller than it was
