"""What a worker that acts tells of itself: rows of metrics, and the state for the next checkpoint."""

from __future__ import annotations

from typing import Any

from framework.actors.environment_loop import summarize
from framework.workers.collector import Collector, Steps, Turns
from framework.workers.gates import Budget
from framework.workers.worker import Setup


class Report:
    """Counts what a collector makes since the beginning of the run, and writes a row of it when one is due.

    Args:
      setup: has the settings of the program.
      collector: the collector.
      budget: knows the env steps that are still to be counted.
      state: what `save` returned before the worker was restarted, or the run was resumed. None: nothing.
      name: label of the rows and name of the state.
      counter: a client of the `Counter`.
      monitor: takes the rows.
      checkpointer: keeps the state. None keeps nothing.
      steps_name: name of the count of the learner's steps.

    Attributes:
      budget: the argument.
      steps: env steps since the beginning of the run.
      dropped_items: number of items that were in flight when the program stopped.
    """

    def __init__(
        self,
        setup: Setup,
        collector: Collector | Turns,
        budget: Budget,
        state: Any = None,
        *,
        name: str,
        counter: Any,
        monitor: Any,
        checkpointer: Any = None,
        steps_name: str = "learner_steps",
    ):
        self._setup, self._collector, self.budget = setup, collector, budget
        self._name, self._steps_name = name, steps_name
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        state = state or {}
        self.steps = int(state.get("steps", 0))
        self._earlier = {name: int(state.get(name, 0)) for name in ("episodes", *collector.losses())}
        self._episodes = self.dropped_items = 0
        self._told = self.save()  # In the last row.
        self._is_kept = False  # Whether a state of this life was kept.
        self._ended: list[dict[str, Any]] = []  # Results of episodes since the last row.

    def took(self, steps: Steps) -> None:
        """Counts a step of the collector, after the budget has."""
        self.steps += steps.made
        if steps.ended is not None:
            self._ended.append(steps.ended)
            self._episodes += len(steps.ended["episode_length"])
        if self.steps - self._told["steps"] >= self._setup.config.log_period:
            self.log()
        elif not self._is_kept:  # The next life has another seed, even if this one ends before its first row.
            self._keep()

    def save(self) -> dict[str, Any]:
        """Counts since the beginning of the run."""
        counts = {"episodes": self._episodes, **self._collector.losses()}
        return {"steps": self.steps, **{name: self._earlier[name] + count for name, count in counts.items()}}

    def _keep(self) -> dict[str, Any]:
        """Keeps the state for the next checkpoint, and returns it."""
        totals, self._is_kept = self.save(), True
        if self._checkpointer is not None:
            self._checkpointer.put(self._name, totals)
        return totals

    def log(self) -> None:
        """Keeps the state, and writes a row if it has changed since the last one, or items were dropped."""
        totals = self._keep()  # The row comes later, in case writing it fails.
        if totals == self._told and not self.dropped_items:
            return
        counts = self._counter.get_counts()
        row: dict[str, Any] = {
            "steps": self.steps,
            "env_steps": counts.get("env_steps", 0) + self.budget.spent,
            "episodes": totals["episodes"],
            **summarize(self._ended),
        }
        if self.dropped_items:
            row["dropped_items"] = self.dropped_items
        row |= {name: totals[name] for name in self._collector.losses() if totals[name]}
        if (version := self._collector.version) >= 0:
            row["variables_version"] = version
            row["acting_staleness"] = counts.get(self._steps_name, 0) - version
        # With two collectors that take turns, select_action is time spent waiting.
        row |= {f"time/{name}_s": seconds for name, seconds in self._collector.take_seconds().items()}
        self._ended.clear()
        self._monitor.write(self._name, row)
        self._told = totals

    def end(self) -> None:
        """Writes the last row. Without evaluators, ends the program if all of its env steps are made."""
        self.log()
        if not self._setup.evaluators and self._counter.remaining() == 0:
            self._monitor.finish("max_env_steps", self._counter.get_counts())
