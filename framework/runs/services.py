"""Services of a program, which its workers call: the counter and the monitor. See also `RunCheckpointer`."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from typing import Any

import launch
from framework.clock import Clock
from framework.core import Saveable
from framework.loggers import Logger
from framework.loggers.base import close_logger
from framework.runs.callbacks import CallbackHost, Mailbox
from framework.runs.stopwatch import Stopwatch

_STEPS = "env_steps"  # The count to which `Counter.grant` adds spent steps.


@dataclasses.dataclass
class _Actor:
    """What the counter knows of an actor."""

    granted: int = 0  # Steps that it may make.
    is_trusted: bool = False  # Whether its next report is accepted without a grant.
    is_refused: bool = False  # Whether its last request got nothing, so that it stops.
    life: str = ""  # Empty if it names none.


class Counter(Saveable[dict[str, Any]]):
    """Named counts and a budget of env steps, safe to use from any thread.

    An actor requests steps before it takes them, so that all actors together stop at exactly `max_steps`:

    ```python
    granted = counter.grant("actor-0", 256)
    while granted:
        ...                                               # take `granted` env steps
        granted = counter.grant("actor-0", 256, spent=granted)
    ```

    Args:
      max_steps: the budget of env steps for `grant`. None is no limit.
    """

    def __init__(self, max_steps: int | None = None):
        if max_steps is not None and max_steps < 0:
            raise ValueError(f"max_steps: got {max_steps}, expected at least 0, or None for no limit.")
        self.max_steps = max_steps
        self._changed = threading.Condition()
        self._counts: Counts[str] = Counts()
        self._actors: dict[str, _Actor] = {}
        self._is_restored = False
        self._lost_lives: set[str] = set()

    def increment(self, **counts: int) -> dict[str, int]:
        """Adds to the named counts and returns all of them."""
        with self._changed:
            self._counts.update(counts)
            self._changed.notify_all()
            return dict(self._counts)

    def get_counts(self) -> dict[str, int]:
        """All counts."""
        with self._changed:
            return dict(self._counts)

    def grant(
        self, who: str, n: int, spent: int = 0, life: str = "", holds: bool = False, **counts: int
    ) -> int:
        """Grants `who` up to `n` more steps of the budget; 0 when all steps are spent or granted.

        The sum of all `spent` never exceeds `max_steps`. `grant(who, 0, spent)` only reports.

        Args:
          who: name of the actor, the same after a restart.
          n: number of requested steps.
          spent: number of steps taken from the last grant. The unspent rest of that grant returns to the
            budget, so an actor that died during a grant requests a new one. The first report of each `who`
            after `restore` is accepted without a grant, up to the budget, because the restarted counter does
            not know the grant.
          life: differs after each restart of `who`. A life that `release` ended gets no new grant.
          holds: whether nothing is counted if the answer is 0. `who` then still has something to do before
            its last steps count, and reports them again: evaluators and the end of the program wait for that.
          counts: further counts of these steps, as for `increment`.
        """
        if n < 0 or spent < 0:
            raise ValueError(f"grant({who!r}): got n={n} and spent={spent}, expected at least 0 for both.")
        with self._changed:
            actor = self._actors.setdefault(who, _Actor(is_trusted=self._is_restored))
            limit = math.inf if self.max_steps is None else self.max_steps
            left = limit - self._counts[_STEPS] - self.granted() + actor.granted
            if life in self._lost_lives:  # A late report. A grant belongs to the next life.
                spent = int(max(0, min(spent, left - actor.granted)))
                self._counts.update({**counts, _STEPS: spent})
                self._changed.notify_all()
                return 0
            actor.life = life
            if actor.is_trusted:
                actor.is_trusted = False
                spent = int(max(0, min(spent, left)))
            elif spent > actor.granted:
                raise ValueError(
                    f"grant({who!r}): spent {spent} steps but holds a grant of {actor.granted}; ask for "
                    "steps before taking them."
                )
            granted = int(max(0, min(n, left - spent)))
            keeps = holds and n > 0 and not granted
            if (spent or counts) and not keeps:
                self._counts.update({**counts, _STEPS: spent})
            actor.granted = spent if keeps else granted
            if granted:
                actor.is_refused = False
            elif n and (holds or not life):  # An actor with a life waits for steps that a lost one leaves.
                actor.is_refused = True
            self._changed.notify_all()
            return granted

    def release(self, who: str) -> None:
        """Returns the grant of `who`, which is lost, to the budget.

        If it is still there, its next report is accepted without a grant, up to the budget. The last steps
        that an actor with a life holds count instead: the others may have ended.
        """
        with self._changed:
            if (actor := self._actors.get(who)) is None:
                return
            if actor.life:
                self._lost_lives.add(actor.life)
            if actor.life and actor.is_refused:
                self._counts[_STEPS] += actor.granted
            else:
                actor.is_trusted = True
            actor.granted, actor.is_refused, actor.life = 0, False, ""
            self._changed.notify_all()

    def wait_for_steps(self, timeout: float) -> bool:
        """Waits until there are steps to grant or all are made, at most `timeout` seconds.

        Returns:
          False if all steps are made: spent, or held by actors that only have to end.
        """

        def left() -> int | None:
            remaining = self.remaining()
            return remaining and remaining - sum(a.granted for a in self._actors.values() if a.is_refused)

        with self._changed:
            self._changed.wait_for(lambda: self.ungranted() or not left(), timeout)
            return left() != 0

    def ungranted(self) -> int | None:
        """Steps of the budget that are neither spent nor granted; None without a budget."""
        with self._changed:
            remaining = self.remaining()
            return None if remaining is None else remaining - self.granted()

    def is_ending(self) -> bool:
        """Whether an actor has stopped or will: no step is left to grant, or was when it last asked.

        Later a few steps may return from a grant whose rest another actor does not need.
        """
        with self._changed:
            return any(actor.is_refused for actor in self._actors.values()) or self.ungranted() == 0

    def granted(self) -> int:
        """Steps that are granted and not reported as spent."""
        with self._changed:
            return sum(actor.granted for actor in self._actors.values())

    def remaining(self) -> int | None:
        """Steps of the budget that are not spent, including granted ones; None without a budget.

        A run that was resumed with a limit below its steps has none left.
        """
        with self._changed:
            return None if self.max_steps is None else max(0, self.max_steps - self._counts[_STEPS])

    def wait_for(self, name: str, value: int, timeout: float | None = None) -> bool:
        """Blocks until the count `name` is at least `value`.

        Returns:
          True if it is; False after `timeout` seconds (None: no limit).
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._counts[name] >= value, timeout)

    def save(self) -> dict[str, Any]:
        """The counts. Grants are not saved: their unspent steps return to the budget after a restore."""
        return {"counts": self.get_counts()}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._changed:
            self._counts = Counts(state["counts"])
            self._actors, self._is_restored = {}, True
            self._changed.notify_all()


class Monitor:
    """Writes the rows of all nodes to the logger, keeps the newest for `snapshot`, and ends the program.

    Args:
      logger: takes the rows. None keeps them in memory only.
      callbacks: called at the start, and after rows, evaluations and checkpoints.
      states: the states of the callbacks in the checkpoint from which the run continues.
      counter: the counter, whose counts are part of the snapshot.
      clock: what the program counts, which is part of the snapshot.
      resumed_at: steps of the clock in the checkpoint from which the run continues with new episodes, for the
        first row of each label; 0 if a run with rows begins again, and None if there were none.
    """

    def __init__(
        self,
        logger: Logger | None = None,
        *,
        callbacks: CallbackHost | Mailbox | None = None,
        states: Mapping[str, Any] | None = None,
        counter: Any = None,
        resumed_at: int | None = None,
        clock: Clock | None = None,
    ):
        self._resumed_at, self._counts = resumed_at, clock or Clock()
        self.logger, self._counter = logger, counter
        self._lock = threading.Lock()
        self._calling = threading.Lock()  # Held during the calls of callbacks.
        self._latest: dict[str, dict[str, Any]] = {}
        self._clock = Stopwatch()
        self._result: dict[str, Any] | None = None
        self._evaluated: dict[str, dict[str, Any]] = {}  # The last row of each evaluator that has finished.
        self._states = dict(states or {})
        self.attach(callbacks)

    def attach(self, callbacks: CallbackHost | Mailbox | None) -> None:
        """Begins to call these callbacks, with the newest states."""
        self._callbacks = callbacks or None
        if callbacks:
            callbacks.begin(self._states)

    def __getstate__(self) -> dict[str, Any]:
        """For `Snapshot`: callbacks are the caller's."""
        return {**vars(self), "_callbacks": None}

    def write(self, label: str, row: dict[str, Any], evaluation: bool = False) -> None:
        """Takes one row (names to scalars) of `label`, such as `"actor-0"` or `"learner"`.

        Args:
          label: name of what writes.
          row: the row.
          evaluation: whether it is the result of an evaluation.
        """
        with self._lock:
            if label == "learner":
                actors = [other for name, other in self._latest.items() if name.startswith("actor-")]
                stale = [other["acting_staleness"] for other in actors if "acting_staleness" in other]
                if stale:
                    row = {**row, "acting_staleness": sum(stale) / len(stale)}
            if self._resumed_at is not None and label not in self._latest:
                row = {**row, "resumed": True, "resumed_at": self._resumed_at}
            self._latest[label] = {**self._latest.get(label, {}), **row}
            if self.logger is not None:
                self.logger.write({"label": label, **row, "time/wall_s": self._clock.seconds()})
        if self._callbacks is not None:
            self._call("row", label, dict(row), self.snapshot(), evaluation)

    def checkpointed(self, path: str) -> None:
        """Takes the folder of a new checkpoint."""
        self._call("checkpoint", path)

    def exchange_events(self, states: dict[str, Any] | None, timeout: float) -> tuple[Any, ...] | None:
        """The next event of the callbacks, for the launching process; see `Mailbox.exchange`."""
        assert isinstance(self._callbacks, Mailbox)
        return self._callbacks.exchange(states, timeout)

    def callback_states(self) -> dict[str, Any]:
        """The states of the callbacks after the last event."""
        return self._states

    def _call(self, *event: Any) -> None:
        if self._callbacks is not None:
            with self._calling:
                self._states = self._callbacks.call(*event)

    def snapshot(self) -> dict[str, Any]:
        """The newest rows: `{"labels": {label: row}, "counts": …, "clock": …, "seconds": …, "result": …}`."""
        with self._lock:
            labels = {label: dict(row) for label, row in self._latest.items()}
        return {
            "labels": labels,
            "counts": self._counter.get_counts() if self._counter is not None else {},
            "clock": self._counts.count,
            "seconds": self._clock.seconds(),
            "result": self._result,
        }

    def finish(self, reason: str, numbers: dict[str, Any]) -> None:
        """Ends the program with the result `{"reason": reason, **numbers}`. Only the first call counts."""
        with self._lock:
            if self._result is None:
                self._result = {"reason": reason, **numbers}
        launch.stop(self._result)

    def finish_evaluation(
        self, name: str, row: dict[str, Any], evaluators: Sequence[str], reason: str = "max_env_steps"
    ) -> None:
        """Ends the program for this reason when all `evaluators` have played their last evaluation.

        The result has the numbers of the first of them, and the rows of the others under their names.
        """
        with self._lock:
            self._evaluated[name] = row
            if any(each not in self._evaluated for each in evaluators):
                return
            numbers = [dict(self._evaluated[each]) for each in evaluators or (name,)]
        self.finish(reason, {**numbers[0], **dict(zip(evaluators[1:], numbers[1:], strict=True))})

    def close(self) -> None:
        """Flushes and closes the logger."""
        if self._callbacks is not None:
            self._callbacks.close()
        if self.logger is not None:
            close_logger(self.logger)
