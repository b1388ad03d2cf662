"""Limits the policy lag of an actor: which parameters an unroll may begin with."""

from __future__ import annotations

import logging
import time
from typing import Any

import launch
from framework import core
from framework.replay.errors import DeadlineExceededError
from framework.workers.collector import Collector, Steps, Turns, flush_pending
from framework.workers.gates import WAIT_S, Gate

_LAST_STEP_S = 60.0  # Limit of the wait for the learner's last step.
_MOST_STEPS = 64  # In one call, where an episode may end it.
_SAY_PERIOD = 120  # Waits of half a second between two log messages.
_LOG = logging.getLogger(__name__)


class Unrolls:
    """The unrolls of an actor, and the version of the parameters that each needs.

    An actor collects unroll k (k = 0, 1, …) with version `first + max(0, k - lag)` or a newer one, where
    `first` is the version at the start. Unroll k ends with the actor's unit number `(k + 1) * units / parts`,
    rounded up. A unit is a step of its collector. For agents with `episodes_per_batch`, it is an episode, and
    each actor collects its part of a batch.

    Args:
      units: steps in an unroll, or episodes in a batch.
      lag: learner steps by which the parameters may be old.
      parts: number of actors that share the units.
      of_episodes: whether a unit is an episode.
      turns: units of a step of all envs.
      length: steps of an env in an unroll. 0 is `units`.

    Attributes:
      first: the version at the start; None before it.
      done: number of units that are done.
      of_episodes: the argument.
    """

    def __init__(
        self, units: int, lag: int, parts: int = 1, of_episodes: bool = False, turns: int = 1, length: int = 0
    ):
        self._units, self._lag, self._parts, self.of_episodes = units, lag, parts, of_episodes
        self._turns, self._length = turns, length or units
        self.first: int | None = None
        self.done = 0
        self._end = 0  # Units after which the unroll that has begun ends.

    @classmethod
    def of(cls, agent: core.Agent, num_actors: int, turns: int) -> Unrolls:
        """Returns the unrolls of one of `num_actors` actors; its collectors take `turns` to step all envs."""
        assert agent.max_policy_lag is not None
        lag, length, episodes = agent.max_policy_lag, agent.unroll_length, agent.episodes_per_batch
        if episodes is not None:
            return cls(episodes, lag, num_actors, of_episodes=True, length=length)
        return cls(turns * length, lag, turns=turns, length=length)

    @property
    def number(self) -> int:
        """The number of the unroll that has begun, or begins now."""
        return self.done * self._parts // self._units

    @property
    def left(self) -> int:
        """Units until the unroll ends that has begun."""
        return self._end - self.done

    def limit(self, envs: int) -> int:
        """The largest number of env steps that an actor with `envs` envs may request now."""
        # Never enough for a whole unroll, half of whose steps may be resets, which cost nothing.
        most = max(1, (self._length - 2) // 2) * envs
        # At most the rest of the unroll: a larger grant could take steps that other actors need to complete
        # their unrolls at the end of the budget.
        return most if self.of_episodes else min(most, self.left * envs // self._turns)

    def needed_version(self) -> int | None:
        """The oldest version with which an unroll may begin now; None inside one."""
        if self.done < self._end or self.first is None:
            return None
        return self.first + max(0, self.number - self._lag)

    def begin(self) -> None:
        """An unroll begins."""
        self._end = -(-(self.number + 1) * self._units // self._parts)

    def most(self) -> int:
        """Steps that surely belong to the unroll, at least 1.

        The last step of an unroll is one by itself, as its items may need room in replay.
        """
        return _MOST_STEPS if self.of_episodes else max(1, self.left - 1)

    def took(self, steps: Steps) -> None:
        """Counts the units of steps."""
        if not self.of_episodes:
            self.done += steps.calls
        elif steps.ended is not None:
            self.done += len(steps.ended["episode_length"])

    def go_on(self) -> bool:
        """Whether the step after the next one is surely of the same unroll."""
        return self.done + 1 < self._end and not self.of_episodes


class Lockstep(Gate):
    """Waits, where an unroll begins, for the version of the parameters that it needs.

    Args:
      name: name of the actor.
      learner: the client of the learner's node.
      counter: grants env steps.
      collector: acts with the parameters.
      unrolls: counts its unrolls.
    """

    def __init__(
        self,
        name: str,
        learner: Any,
        counter: Any,
        collector: Collector | Turns,
        unrolls: Unrolls,
    ):
        self._name, self._learner, self._counter = name, learner, counter
        self._collector, self._unrolls = collector, unrolls
        self._waits = 0  # In vain, since the last unroll began.

    def ready(self) -> bool:
        needed = self._unrolls.needed_version()
        return needed is None or self._collector.version >= needed or self._is_available(needed, 0.0, None)

    def why(self) -> str:
        return f"waits for version {self._unrolls.needed_version()} of the parameters"

    def open(self) -> bool:
        """Begins an unroll with the newest parameters, if they are those that it needs or newer ones."""
        unrolls = self._unrolls
        if unrolls.first is None:
            unrolls.first = self._collector.version
        needed = unrolls.needed_version()
        if needed is None:
            return True
        if not self._wait(needed):
            return False
        self._collector.update()
        # A restarted learner skips versions.
        unrolls.first = max(unrolls.first, self._collector.version - unrolls.number)
        unrolls.begin()
        return True

    def most(self) -> int:
        return self._unrolls.most()

    def took(self, steps: Steps) -> None:
        self._unrolls.took(steps)

    def end(self) -> None:
        """Waits until the learner has learned from the last complete unrolls.

        The program then ends, or evaluates, with those parameters. Returns early if another actor's unroll
        is missing, because the batch is then never complete.
        """
        first = self._unrolls.first
        if first is None or launch.get_node_context().engine == "serial":
            return
        last = first + self._unrolls.number
        stopped = launch.stop_event()
        deadline = time.monotonic() + _LAST_STEP_S
        while not stopped.is_set() and time.monotonic() < deadline:
            if self._learner.wait_for_version(last, 2 * WAIT_S) or not self._learner.is_learning():
                return

    def _wait(self, needed: int) -> bool:
        """Waits half a second for version `needed`; returns whether the actor may step.

        The learner makes the version from this actor's data, which is therefore written first. A longer wait
        flushes the adders, which raise their errors, and logs a message once a minute.
        """
        version = self._collector.version
        if version < needed:
            flush_pending(self._collector.adders)
        if version >= needed or self._is_available(needed, WAIT_S, self._name):
            self._waits = 0
            return True
        held_back = "All its items are in replay."
        try:
            for adder in self._collector.adders:
                adder.flush(timeout=0)
        except DeadlineExceededError as error:
            held_back = f"Not all its items are in replay: {error}"
        self._waits += 1
        if self._waits % _SAY_PERIOD == 0:
            text = "%s has waited %.0f s for version %s of the parameters and has version %s. %s"
            _LOG.warning(text, self._name, self._waits * WAIT_S, needed, version, held_back)
        return False

    def _is_available(self, needed: int, timeout: float, name: str | None) -> bool:
        # At the end of the budget, other actors may have stopped inside their unroll, so that no newer
        # version follows. This actor still makes the steps that are left, which are fewer than an unroll.
        return self._learner.wait_for_version(needed, timeout, name) or self._counter.is_ending()
