"""Selectors: which item of a table is sampled, or removed, next.

They know items as *slots*, the table's small integers for its items.
"""

from __future__ import annotations

import abc
import copy
import heapq
import math
from typing import Any

import numpy as np

from framework.replay.rows.store import grown
from framework.replay.tables.sum_tree import SumTree

# Sums of billions of weights must stay finite.
_LARGEST = 1e290


class Selector(abc.ABC):
    """Chooses among slots. It belongs to one table, whose lock guards every call.

    A call with several slots means the same as one call for each of them in order; the slots of one call are
    distinct. `stamps` has one for each slot of the table, int64 `[>= num_slots]`: they grow with each
    insertion into the table, so they order the items by age.

    Attributes:
      options: the arguments that it was made with.
      owner: name of the table that it belongs to; None before it belongs to one.
    """

    #: Whether the choice needs no random numbers; its probability is 1 then.
    deterministic = True
    #: Whether the choice depends on priorities.
    uses_priorities = False

    def __init__(self, **options: float) -> None:
        self.options = options
        self.owner: str | None = None

    def check(self, priorities: np.ndarray) -> None:
        """Raises `ValueError` if it cannot use one of the priorities, which are finite and >= 0."""
        return None

    def reserve(self, num_slots: int) -> None:
        """Makes room for the slots below `num_slots`; called before they are inserted."""
        return None

    @abc.abstractmethod
    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        """Adds slots that it does not hold."""

    @abc.abstractmethod
    def delete(self, slots: np.ndarray) -> None:
        """Removes slots that it holds."""

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of slots that it holds; called if `uses_priorities`."""
        return None

    def replace(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        """Deletes slots and inserts them for new items."""
        self.delete(slots)
        self.insert(slots, priorities, stamps)

    @abc.abstractmethod
    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Chooses `n` times without a change: slots int64 `[n]` and probabilities float64 `[n]`.

        The selector must not be empty.
        """

    def first(self, n: int) -> np.ndarray:
        """Returns the `n` slots that a deterministic selector chooses if each is deleted once chosen."""
        rest, rng, chosen = copy.deepcopy(self), np.random.default_rng(0), np.zeros(0, np.int64)
        for _ in range(n):
            slot = rest.sample(1, rng)[0]
            rest.delete(slot)
            chosen = np.append(chosen, slot)
        return chosen

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of slots."""

    def __bool__(self) -> bool:
        return True  # an empty selector too: `sampler or Uniform()`

    def total_weight(self) -> float:
        """Returns the sum of the weights of its choice: the number of slots if all weights are equal."""
        return float(len(self))

    def order(self) -> np.ndarray | None:
        """Returns the slots in an order in which inserting them restores it exactly; None for age order."""
        return None

    def config(self) -> dict[str, Any]:
        """Returns its kind and its options, for `server_info` and checkpoints."""
        return {"kind": type(self).__name__, **self.options}

    def copy(self) -> Selector:
        """Returns a new, empty one with the same options."""
        return type(self)(**self.options)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({options})"


class _Members(Selector):
    """The slots in no order, drawn with equal probability.

    They are the first `_size` of `_slots`, and `_where` has the place of each there. As long as none but the
    last ones are deleted, slot i is in place i, and both arrays are empty.
    """

    deterministic = False
    _slots = _where = np.zeros(0, np.int32)

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self._size = self._num_slots = 0

    def __len__(self) -> int:
        return self._size

    def reserve(self, num_slots: int) -> None:
        self._num_slots = num_slots
        if len(self._slots):
            self._slots = grown(self._slots, num_slots, num_slots)
            self._where = grown(self._where, num_slots, num_slots)

    def _number(self) -> None:
        """Makes the arrays, unless they are there."""
        if not len(self._slots):
            self._slots = np.arange(self._num_slots, dtype=np.int32)
            self._where = self._slots.copy()

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        begin, end = self._size, self._size + len(slots)
        places = np.arange(begin, end)
        if len(self._slots) or np.count_nonzero(slots != places):
            self._number()
            self._slots[begin:end] = slots
            self._where[slots] = places
        self._size = end

    def delete(self, slots: np.ndarray) -> None:
        end = self._size - len(slots)
        if len(self._slots) or np.count_nonzero(slots < end):
            self._number()
            # Slots from the end take the places of the deleted ones.
            places = self._where[slots]
            tail = self._slots[end : self._size].copy()
            self._where[slots] = -1
            movers = tail[self._where[tail] >= 0]
            holes = places[places < end]
            self._slots[holes] = movers
            self._where[movers] = holes
        self._size = end

    def replace(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        return None  # it holds the same slots as before

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        chosen = rng.random(n)
        chosen *= self._size  # less than _size: the product with the largest double below 1 rounds down
        places = chosen.astype(np.int64)
        chosen.fill(1.0 / self._size)
        return (self._slots.take(places).astype(np.int64) if len(self._slots) else places), chosen

    def order(self) -> np.ndarray:
        return self._slots[: self._size].astype(np.int64) if len(self._slots) else np.arange(self._size)


class Uniform(_Members):
    """Each of the n items with probability 1 / n, independently; priorities have no effect."""


class Prioritized(_Members):
    """P(i) = p_i ** e / sum_j p_j ** e (Schaul et al. 2015, "Prioritized Experience Replay").

    An item with priority 0 is never chosen, whatever the exponent, unless all priorities are 0: then all
    items are equally likely.

    Args:
      priority_exponent: e. 0 makes all items with a priority > 0 equally likely; a negative one inverts the
        order.
    """

    uses_priorities = True

    def __init__(self, priority_exponent: float):
        if not math.isfinite(priority_exponent):
            raise ValueError(f"priority_exponent: got {priority_exponent}, expected a finite number.")
        self.priority_exponent = float(priority_exponent)
        super().__init__(priority_exponent=self.priority_exponent)
        self._tree = SumTree()

    def check(self, priorities: np.ndarray) -> None:
        if self.priority_exponent < 0.0:
            extreme = float(np.minimum.reduce(priorities, where=priorities > 0.0, initial=math.inf))
        else:
            extreme = float(np.maximum.reduce(priorities))
        try:
            weight = extreme**self.priority_exponent if extreme else 0.0
        except OverflowError:
            weight = math.inf
        if weight > _LARGEST:
            raise ValueError(
                f"priorities: got {extreme:g}, whose power {self.priority_exponent:g} is above "
                f"{_LARGEST:g}: sums of such weights would overflow. Scale the priorities. Nothing was "
                "changed."
            )

    def _weights(self, priorities: np.ndarray) -> np.ndarray:
        if self.priority_exponent == 1.0:
            return priorities
        if self.priority_exponent > 0.0:
            return priorities**self.priority_exponent
        weights = np.zeros(len(priorities))
        np.power(priorities, self.priority_exponent, out=weights, where=priorities > 0)
        return weights

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        super().insert(slots, priorities, stamps)
        self._tree.set(slots, self._weights(priorities))

    def delete(self, slots: np.ndarray) -> None:
        super().delete(slots)
        self._tree.set(slots, np.zeros(len(slots)))

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._tree.set(slots, self._weights(priorities))

    def replace(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        self._tree.set(slots, self._weights(priorities))

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return self._tree.sample(n, rng) if self._tree.total > 0.0 else super().sample(n, rng)

    def total_weight(self) -> float:
        return self._tree.total


class _ByAge(Selector):
    """The slots in order of their stamps, oldest at `_head`; -1 in place of a deleted one."""

    _newest_first = False

    def __init__(self) -> None:
        super().__init__()
        self._order = np.zeros(0, np.int32)
        # The place of each slot in the order, before `_num_placed`: only deletions out of order need it.
        self._where = np.zeros(0, np.int32)
        self._head = self._tail = self._size = self._num_placed = 0

    def reserve(self, num_slots: int) -> None:
        # At least a fifth of the order is free after `_compact`, which makes it O(1), amortized.
        num_places = num_slots + num_slots // 4 + 1
        self._order = grown(self._order, num_places, num_places)
        self._where = grown(self._where, num_slots, num_slots)

    def __len__(self) -> int:
        return self._size

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        n = len(slots)
        if self._tail + n > len(self._order):
            self._compact()
        begin, self._tail = self._tail, self._tail + n
        self._order[begin : self._tail] = slots
        self._size += n
        if begin > self._head and stamps[slots[0]] < stamps[self._order[begin - 1]]:
            self._compact()  # an item that was given back takes its old place again
            slots = self._order[: self._tail]
            slots[:] = slots[np.argsort(stamps.take(slots), kind="stable")]

    def _compact(self) -> None:
        """Moves the slots to the front of the order."""
        block = self._order[self._head : self._tail]
        self._order[: self._size] = block if len(block) == self._size else block[block >= 0]
        self._head, self._tail, self._num_placed = 0, self._size, 0

    def delete(self, slots: np.ndarray) -> None:
        n, head, tail = len(slots), self._head, self._tail
        self._size -= n
        if self._size and np.count_nonzero(self._order[head : head + n] == slots) == n:
            self._head += n
        elif self._size:
            self._where[self._order[self._num_placed : tail]] = np.arange(self._num_placed, tail)
            self._order[self._where[slots]] = -1
            self._num_placed = tail
        else:
            self._head = self._tail = self._num_placed = 0
            return
        # Moves head and tail past deleted places.
        while self._order[self._head] < 0:
            live = self._order[self._head : self._head + 1024] >= 0
            step = int(live.argmax())
            self._head += step if live[step] else len(live)
        while self._order[self._tail - 1] < 0:
            live = self._order[max(self._head, self._tail - 1024) : self._tail][::-1] >= 0
            step = int(live.argmax())
            self._tail -= step if live[step] else len(live)
        self._num_placed = min(self._num_placed, self._tail)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        at = self._tail - 1 if self._newest_first else self._head
        return np.full(n, self._order[at], np.int64), np.ones(n)

    def first(self, n: int) -> np.ndarray:
        block = self._order[self._head : self._tail]
        block = block[::-1] if self._newest_first else block
        near = block[:n]
        if len(block) > self._size and (len(near) < n or near.min(initial=0) < 0):  # deleted places
            near = block[block >= 0][:n]
        return near.astype(np.int64)


class Fifo(_ByAge):
    """The item that was inserted first."""


class Lifo(_ByAge):
    """The item that was inserted last."""

    _newest_first = True


class _Heap(Selector):
    """A binary heap of `(sign * priority, turn, slot)`.

    Of equal priorities the one that was inserted or updated least recently is first. Entries that an update
    or a deletion has made stale stay until they surface, or until they are the majority.
    """

    uses_priorities = True
    _sign = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, int]] = []
        self._turn_of: dict[int, int] = {}  # slot -> the turn of its valid entry
        self._turn = 0

    def __len__(self) -> int:
        return len(self._turn_of)

    def insert(self, slots: np.ndarray, priorities: np.ndarray, stamps: np.ndarray) -> None:
        for slot, priority in zip(slots.tolist(), priorities.tolist(), strict=True):
            self._turn += 1
            self._turn_of[slot] = self._turn
            heapq.heappush(self._heap, (self._sign * priority, self._turn, slot))

    def delete(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            del self._turn_of[slot]
        self._clean()

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.insert(slots, priorities, slots)
        self._clean()

    def _clean(self) -> None:
        if len(self._heap) > 64 + 2 * len(self._turn_of):
            self._heap = [entry for entry in self._heap if self._turn_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        while self._heap and self._turn_of.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return np.full(n, self._heap[0][2], np.int64), np.ones(n)

    def first(self, n: int) -> np.ndarray:
        if n == 1:
            return np.full(1, self._heap[0][2], np.int64)
        live = (entry for entry in self._heap if self._turn_of.get(entry[2]) == entry[1])
        return np.array([entry[2] for entry in heapq.nsmallest(n, live)], np.int64)

    def order(self) -> np.ndarray:
        return np.array(sorted(self._turn_of, key=self._turn_of.__getitem__), np.int64)


class MinHeap(_Heap):
    """The item with the smallest priority."""


class MaxHeap(_Heap):
    """The item with the largest priority."""

    _sign = -1.0
