"""Limits the policy lag: which parameters an unroll may begin with, and what happens when data is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import launch
from framework.adders import Adder
from framework.replay.errors import DeadlineExceededError

_WAIT_S = 0.5  # For a version of the parameters, between two checks for a stop of the program.
_LAST_STEP_S = 60.0  # Limit of the wait for the learner's last step.
_SAY_PERIOD_S = 60.0  # Between two log messages of a wait.
# Seconds that a stall must last. Longer than clients wait for a restarted replay server.
PATIENCE_S = 45.0
_RECENT_S = 10.0  # Actors that wait ask every half second.
_LOG = logging.getLogger(__name__)


class Lockstep:
    """Decides when the next unroll may begin, and waits for its version of the parameters.

    An actor collects unroll k (k = 0, 1, …) with version `first + max(0, k - lag)` or a newer one, where
    `first` is the version at the start. Unroll k ends with the actor's unit number `(k + 1) * units / parts`,
    rounded up. A unit is a step of the actor's loop. For agents with `episodes_per_batch`, it is an episode,
    and each actor collects its part of a batch.

    Args:
      name: name of the actor.
      learner: the client of the learner's node.
      counter: grants env steps.
      units: steps in an unroll, or episodes in a batch.
      lag: learner steps by which the parameters may be old.
      parts: number of actors that share the units.
      elastic: whether the learner learns from the actors that are there; see `Roster`.
      life: identifies this life of an elastic actor, which may be restarted.
    """

    def __init__(
        self,
        name: str,
        learner: Any,
        counter: Any,
        units: int,
        lag: int,
        parts: int = 1,
        elastic: bool = False,
        life: str = "",
    ):
        self._elastic, self._life = elastic, life
        self._name, self._learner, self._counter = name, learner, counter
        self._units, self._lag, self._parts = units, lag, parts
        self._first: int | None = None
        self._unroll = (
            self._flushed
        ) = -1  # The one that has begun, and the one before which all is in replay.
        self._waiting_since: float | None = None
        self._said_at = 0.0

    def start(self, version: int) -> None:
        """Counts unrolls from `version`, the actor's current version, or from that of its first batch."""
        self._first = self._learner.join(self._name, self._life) if self._elastic else version

    def begin(self, done: int, version: int) -> None:
        """The unroll after `done` units begins with `version` of the parameters."""
        self._unroll = done * self._parts // self._units
        if self._elastic and self._first is not None:  # A restarted learner skips versions.
            self._first = max(self._first, version - self._unroll)

    def needed_version(self, done: int) -> int | None:
        """The oldest version allowed after `done` units; None inside an unroll."""
        unroll = done * self._parts // self._units
        begun = unroll == self._unroll or self._first is None
        return None if begun else (self._first or 0) + max(0, unroll - self._lag)

    def units_left(self, done: int) -> int:
        """Units until the unroll ends."""
        unroll = done * self._parts // self._units
        return -(-(unroll + 1) * self._units // self._parts) - done

    def may_step(self, done: int, version: int) -> bool:
        """Whether `version`, or the learner's newest, is new enough after `done` units. Does not wait."""
        needed = self.needed_version(done)
        return needed is None or version >= needed or self._is_available(needed, 0.0, None)

    def wait(self, done: int, needed: int, version: int, adders: Sequence[Adder | None]) -> bool:
        """Waits half a second for version `needed`; returns whether the actor may step.

        The learner makes the version from this actor's data. A longer wait therefore flushes `adders`, which
        raise their errors, and logs a message once a minute.
        """
        if self._elastic and not self._flush(done, adders):
            return False
        if (version >= needed and not self._elastic) or self._is_available(needed, _WAIT_S, self._name):
            self._waiting_since = None
            return True
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._said_at = now
        held_back = "All its items are in replay."
        try:
            for adder in adders:
                if adder is not None:
                    adder.flush(timeout=0)
        except DeadlineExceededError as error:
            held_back = f"Not all its items are in replay: {error}"
        if now - self._said_at >= _SAY_PERIOD_S:
            self._said_at = now
            _LOG.warning(
                "%s has waited %.0f s for version %s of the parameters and has version %s. %s",
                self._name,
                now - self._waiting_since,
                needed,
                version,
                held_back,
            )
        return False

    def wait_for_last(self, done: int) -> None:
        """Waits until the learner has learned from the last complete unrolls.

        The program then ends, or evaluates, with those parameters. Returns early if another actor's unroll
        is missing, because the batch is then never complete.
        """
        if self._first is None or launch.get_node_context().engine == "serial":
            return
        last = self._first + done * self._parts // self._units
        stopped = launch.stop_event()
        deadline = time.monotonic() + _LAST_STEP_S
        while not stopped.is_set() and time.monotonic() < deadline:
            reported = (self._name, last, self._life) if self._elastic else ()
            if (
                self._learner.wait_for_version(last, 2 * _WAIT_S, *reported)
                or not self._learner.is_learning()
            ):
                return

    def _flush(self, done: int, adders: Sequence[Adder | None]) -> bool:
        """Waits half a second until all unrolls before this one are in replay; returns whether they are."""
        unroll = done * self._parts // self._units
        if unroll > self._flushed:
            try:
                for adder in adders:
                    if adder is not None:
                        adder.flush(timeout=_WAIT_S)
            except DeadlineExceededError:
                return False
            self._flushed = unroll
        return True

    def _is_available(self, needed: int, timeout: float, name: str | None) -> bool:
        # At the end of the budget, other actors may have stopped inside their unroll, so that no newer
        # version follows. This actor still makes the steps that are left, which are fewer than an unroll.
        reported = () if not self._elastic else ((self._first or 0) + self._flushed, self._life)
        if self._learner.wait_for_version(needed, timeout, name, *reported):
            return True
        ending: bool = self._counter.is_ending()
        return ending


class Roster:
    """The actors from whose data an elastic learner makes its batches.

    An actor takes part from its `join` until it is lost. Version v + 1 is made from the unrolls that all of
    them collected for version v: a lost actor is not waited for, and one that joins during a learner step
    begins with the version that this step makes:

    ```text
    actor-0   |unroll 3|....|unroll 4|....|unroll 5|
    actor-1   |unroll 3|....|unr lost              join |unroll 6|
    learner            |step 4|      |step 5|      |step 6|
    envs of the batch     2             1             1
    ```

    A restarted actor has a new life. Late reports of a lost life are ignored. A report of an unknown life
    means that the learner was restarted; it counts as a join.

    Not thread-safe.

    Args:
      least: number of actors without which no batch is made.
    """

    def __init__(self, least: int):
        self._least = least
        self._reported: dict[str, int] = {}
        self._lives: dict[str, str] = {}
        self._lost: set[str] = set()  # Lives.

    def __len__(self) -> int:
        return len(self._reported)

    def join(self, actor: str, version: int, life: str) -> None:
        """The `life` of `actor` takes part, with `version` as its first."""
        if life in self._lost:
            return
        if self._lives.get(actor, life) != life:
            self.lose(actor)
        self._lives[actor], self._reported[actor] = life, version

    def report(self, actor: str, version: int, life: str) -> None:
        """All unrolls of the `life` of `actor` for versions before `version` are in replay."""
        self.join(actor, version, life)

    def lose(self, actor: str) -> None:
        """`actor` is not waited for any more."""
        self._reported.pop(actor, None)
        if actor in self._lives:
            self._lost.add(self._lives.pop(actor))

    def is_complete(self, version: int) -> bool:
        """Whether all unrolls for `version` are in replay."""
        return len(self._reported) >= self._least and min(self._reported.values()) > version


class StallDetector:
    """Detects that the actors and the learner wait for each other because data was lost.

    An actor waits for new parameters when all its items are in replay, and the learner makes the parameters
    from the items of all actors. If every actor waits and the learner waits for data, some items were lost,
    either with a replay server that was restarted, or with a learner that sampled them and was killed.
    Without new data, the program never continues:

    ```text
    actor-0   |unroll 3|..............................|unroll 3 again|
    actor-1   |unroll 3|..............................|unroll 3 again|
    replay         lost ^                   patience ^
    learner   .......................................................|step 4|
    ```

    Not thread-safe.

    Args:
      num_actors: number of actors in the program.
      patience: seconds that all actors must have waited.
      clock: returns the time in seconds; replaced in tests.
    """

    def __init__(
        self, num_actors: int, patience: float | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._num_actors = num_actors
        self._patience = PATIENCE_S if patience is None else patience
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._since: float | None = None

    def moved(self) -> None:
        """Records that new parameters are published."""
        self._asked.clear()
        self._since = None

    def asked(self, actor: str) -> bool:
        """Records that `actor` and the learner wait. Returns whether all have waited for too long."""
        now = self._clock()
        self._asked[actor] = now
        self._asked = {each: at for each, at in self._asked.items() if now - at <= _RECENT_S}
        if len(self._asked) < self._num_actors:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._patience
