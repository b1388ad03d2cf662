"""Several learners in a program: how they meet, step together, and continue when one of them is lost.

Rank 0 keeps the `FirstLearner` of the group. Every learner is a `GroupMember`, which joins the newest one:

```text
  all have joined ──▶ rank 0's state ──▶ addresses, through the store ──▶ step, step, step, …
        ▲                                                                        │
        └──────────────── a learner is lost: all leave and join again ◀──────────┘
```

All of this travels in the program's own calls, which are authenticated. Only gradients use other sockets.
"""

from __future__ import annotations

import functools
import random
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import launch
from framework import core
from framework.devices import gpu_id
from framework.learners import distributed
from framework.learners.distributed import LearnerGroup

_MAX_LOSSES = 3  # Errors of exchanges without a complete step in between, after which a learner gives up.


class GroupLost(Exception):
    """The learners of a group cannot reach each other."""


class GroupChanged(GroupLost):
    """A learner of the group joined again, so the others should, too."""


@dataclass(frozen=True)
class Place:
    """Where a learner runs: the label of its node, its host, and its GPU (empty on the CPU)."""

    label: str
    host: str
    gpu: str = ""


class Barrier:
    """The point where `size` learners wait for each other before each step.

    A learner that waits for the gradient of another cannot be stopped. Each learner therefore waits here
    first, when it has its data: either all of them make the step or none does.
    """

    def __init__(self, size: int):
        self._size = size
        self._changed = threading.Condition()
        self._arrived: set[int] = set()  # ranks
        self._round = 0  # The step that the learners wait for.
        self._closed = False

    def arrive(self, rank: int, step: int) -> bool:
        """Waits for the others; True when all ranks have arrived, False once the barrier is closed.

        `step` counts the steps of the learner with this barrier, from 0. A learner that arrives again counts
        once, and is let through at once if the others have begun that step.
        """
        with self._changed:
            if step < self._round or self._closed:
                return step < self._round
            self._arrived.add(rank)
            if len(self._arrived) == self._size:
                self._arrived.clear()
                self._round += 1
                self._changed.notify_all()
                return True
            self._changed.wait_for(lambda: self._round > step or self._closed)
            return self._round > step

    def close(self) -> None:
        """Ends all current and future waits with False."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class SharedKeys:
    """The values of a `CallStore`, by key. Safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._added: dict[str, int] = {}  # Results of `add`, by `call_id`.
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        self.wait([key], timeout)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: float) -> None:
        """Blocks until all `keys` have values.

        Raises:
          GroupChanged: The keys were closed.
          GroupLost: One has none after `timeout` seconds.
        """
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or self.check(keys), timeout)
            if self._closed:
                raise GroupChanged("The group that exchanged addresses is over.")
            if not there:
                raise GroupLost(f"Another learner told no address within {timeout:g} s.")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, call_id: str) -> int:
        """Adds to the number of `key`; returns the sum. A call of the same `call_id` only returns it."""
        with self._changed:
            if call_id not in self._added:
                self._added[call_id] = int(self._values.get(key, b"0")) + amount
                self.set(key, str(self._added[call_id]).encode())
            return self._added[call_id]

    def close(self) -> None:
        """Ends all current and future waits with `GroupChanged`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass
class _Generation:
    """One group, from the first learner that joins it to the first that is lost."""

    number: int
    barrier: Barrier
    keys: SharedKeys = field(default_factory=SharedKeys)
    members: dict[int, Place] = field(default_factory=dict)  # By rank.
    call_ids: dict[int, str] = field(default_factory=dict)  # With which each rank joined.

    def close(self) -> None:
        self.barrier.close()
        self.keys.close()


class FirstLearner:
    """What rank 0 keeps for all learners of a group: its members, and the state from which all start.

    A learner joins when it starts, and when it has lost the others. A learner that was killed cannot report
    it; it joins again after its restart. Either way, the present generation ends with every wait in it, and a
    new one begins.

    The other learners have a client of its node. A client repeats a call whose connection was cut, so each
    call says which one it is.

    Args:
      learner: the learner of rank 0.
      size: number of learners.
    """

    def __init__(self, learner: core.Learner, size: int):
        self._learner, self._size = learner, size
        self._state: dict[str, Any] = {}  # The learner's, until all have it.
        self._changed = threading.Condition()
        self._closed = False
        # The other learners may hold a number of this one from before a restart of rank 0.
        self._current = _Generation(random.SystemRandom().getrandbits(48), Barrier(size))
        launch.register_stop_handler(self.close)

    def join_learners(self, rank: int, place: Place, call_id: str) -> tuple[int, bool, dict[str, Any]] | None:
        """Waits until all have joined.

        A call with the `call_id` of one before is the same call, repeated: it does not join again.

        Returns:
          The number of the generation, whether its learners are on several hosts, and the state of rank 0;
          None once closed.

        Raises:
          GroupChanged: One of them joined again meanwhile. The caller should, too.
          ValueError: Two learners have the same GPU.
        """
        if rank == 0:
            self._state = self._learner.save()  # The others cannot have it yet.
        with self._changed:
            if self._current.call_ids.setdefault(rank, call_id) != call_id:
                self._current.close()
                self._current = _Generation(self._current.number + 1, Barrier(self._size))
                self._current.call_ids[rank] = call_id
            mine = self._current
            mine.members[rank] = place
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or mine is not self._current or len(mine.members) == self._size
            )
            if self._closed:
                return None
            if mine is not self._current:
                raise GroupChanged(f"The group of {place.label} was formed again.")
            _check_gpus(mine.members.values())
            hosts = {member.host for member in mine.members.values()}
            return mine.number, len(hosts) > 1, self._state

    def arrive(self, rank: int, number: int, step: int) -> int | None:
        """Waits until all learners have data for a step; returns its `env_steps`, or None at the end.

        Raises:
          GroupChanged: Generation `number` is over.
        """
        if not self._find(number).barrier.arrive(rank, step):
            self._find(number)
            return None
        if rank == 0:
            self._state = {}  # All have it.
        return self._learner.env_steps

    def exchange(self, number: int, operation: str, *arguments: Any) -> Any:
        """An operation of a `CallStore`, on the keys of generation `number`."""
        if operation not in ("set", "get", "wait", "check", "add"):
            raise ValueError(f"operation: got {operation!r}, expected one of a CallStore.")
        return getattr(self._find(number).keys, operation)(*arguments)

    def close(self) -> None:
        """Ends the group: every wait of a learner returns that it is the end."""
        with self._changed:
            self._closed = True
            self._current.close()
            self._changed.notify_all()

    def _find(self, number: int) -> _Generation:
        with self._changed:
            if number != self._current.number:
                raise GroupChanged("The group was formed again.")
            return self._current


class GroupMember:
    """The place of one learner in the group.

    Args:
      learner: the learner.
      rank: its rank.
      size: number of learners.
      first: the `FirstLearner`, or a client of its node.
    """

    def __init__(self, learner: core.Learner, rank: int, size: int, first: FirstLearner):
        self._learner, self._rank, self._size, self._first = learner, rank, size, first
        self._device = learner.device
        self._group: LearnerGroup | None = None
        self._number = -1
        self._arrivals = 0  # In the present group.
        self._losses = 0

    def go_on(self) -> int | None:
        """Waits until all learners have data for the next step; joins them first where that is due.

        Returns:
          The `env_steps` of the step; None at the end.
        """
        while True:
            try:
                if self._group is None and not self._join():
                    return None
                env_steps = self._first.arrive(self._rank, self._number, self._arrivals)
                self._arrivals += 1
                return env_steps
            except Exception as error:
                if not self.has_lost(error):
                    raise

    def has_lost(self, error: Exception) -> bool:
        """Leaves the group if `error` says that another learner is lost; returns whether to join again."""
        if not isinstance(error, GroupChanged):
            if not (isinstance(error, GroupLost) or distributed.is_lost_peer(error)):
                return False
            self._losses += 1
        self.leave()
        return self._losses < _MAX_LOSSES

    def stepped(self) -> None:
        """Tells that a step is complete."""
        self._losses = 0

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join(self) -> bool:
        here = launch.get_node_context()
        place = Place(here.label, here.host, gpu_id(self._device))
        joined = self._first.join_learners(self._rank, place, uuid.uuid4().hex)
        if joined is None:
            return False
        (self._number, has_hosts, state), self._arrivals = joined, 0
        if self._rank:
            self._learner.restore(state)
        store = distributed.CallStore(functools.partial(self._first.exchange, self._number))
        address = here.address if has_hosts else distributed.LOOPBACK
        self._group = LearnerGroup(self._rank, self._size, store, self._device, address=address)
        self._learner.distribute(self._group)
        return True


def _check_gpus(places: Iterable[Place]) -> None:
    users: dict[tuple[str, str], str] = {}
    for place in places:
        if place.gpu and (other := users.setdefault((place.host, place.gpu), place.label)) != place.label:
            raise ValueError(
                f"num_learners: got one GPU for both {other} and {place.label} on {place.host!r}, expected "
                "one each. Use fewer learners, or give each a GPU: on engine 'ray' with resources "
                "learner.num_gpus=1, else with CUDA_VISIBLE_DEVICES."
            )
