"""What a worker that acts tells of itself: rows of metrics, and the state for the next checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from framework.actors.environment_loop import summarize
from framework.workers.budget import Budget
from framework.workers.collector import Collector, Steps, Turns
from framework.workers.worker import Setup


class Report:
    """Counts what a collector makes since the beginning of the run, and sends a row of it when one is due.

    Args:
      setup: has the settings of the program.
      collector: the collector.
      budget: knows the env steps that the counter has not counted yet.
      rows: sends the rows and the states.
      state: what `save` returned before the worker was restarted, or the run was resumed. None begins anew.

    Attributes:
      budget: the argument.
      steps: env steps since the beginning of the run.
      dropped_items: number of items that were in flight when the program stopped.
    """

    def __init__(
        self, setup: Setup, collector: Collector | Turns, budget: Budget, rows: RowSender, state: Any = None
    ):
        self._config, self._collector, self.budget, self._rows = setup.config, collector, budget, rows
        self._ends_program = not setup.evaluators  # Otherwise the evaluators do.
        state = state or {}
        self.steps = self._logged_at = int(state.get("steps", 0))
        self._earlier = {name: int(state.get(name, 0)) for name in ("episodes", *collector.losses())}
        self._episodes = self.dropped_items = 0
        self._ended: list[dict[str, Any]] = []  # Results of episodes since the last row.

    def took(self, steps: Steps) -> None:
        """Counts a step of the collector, after the budget has."""
        self.steps += steps.made
        if steps.ended is not None:
            self._ended.append(steps.ended)
            self._episodes += len(steps.ended["episode_length"])
        if self.steps - self._logged_at >= self._config.log_period:
            self.log()

    def save(self) -> dict[str, Any]:
        """Counts of the run."""
        return {"steps": self.steps, **self._totals()}

    def log(self) -> None:
        """Sends the state, and a row if a step was made since the last one."""
        # The state before the row, in case writing the row fails.
        self._rows.keep(self.save())
        if self.steps == self._logged_at:
            return
        totals = self._totals()
        row: dict[str, Any] = {
            "steps": self.steps,
            "env_steps": self.budget.spent,
            "episodes": totals["episodes"],
            **summarize(self._ended),
        }
        if self.dropped_items:
            row["dropped_items"] = self.dropped_items
        row |= {name: totals[name] for name in self._collector.losses() if totals[name]}
        if (version := self._collector.version) >= 0:
            row["variables_version"] = version
        # With two collectors that take turns, select_action is time spent waiting.
        row |= {f"time/{name}_s": seconds for name, seconds in self._collector.take_seconds().items()}
        self._ended.clear()
        self._rows.send(row)
        self._logged_at = self.steps

    def end(self) -> None:
        """Sends the last row, waits until it has arrived, and ends the program if all steps are made."""
        self.log()
        self._rows.wait()
        if self._ends_program:
            self._rows.end_program()

    def _totals(self) -> dict[str, int]:
        """Counts since the beginning of the run."""
        counts = {"episodes": self._episodes, **self._collector.losses()}
        return {name: self._earlier[name] + count for name, count in counts.items()}


class RowSender:
    """Sends the rows of one actor, with the counts of the program, and waits for the row before.

    Args:
      name: label of the rows and name of the state.
      steps_name: name of the count of the learner's steps.
      counter: a client of the `Counter`.
      monitor: a client of the `Monitor`.
      checkpointer: a client of the `Checkpointer`. None keeps no state.
    """

    def __init__(self, name: str, steps_name: str, counter: Any, monitor: Any, checkpointer: Any = None):
        self._name, self._steps_name = name, steps_name
        self._counter, self._monitor, self._checkpointer = counter, monitor, checkpointer
        self._calls: list[Future] = []  # They have no results; only their errors matter.

    def keep(self, state: Mapping[str, Any]) -> None:
        """Sends the actor's state, after the row before has arrived."""
        self.wait()
        if self._checkpointer is not None:
            self._calls.append(self._checkpointer.futures.put(self._name, state))

    def send(self, row: dict[str, Any]) -> None:
        """Sends a row, whose `env_steps` are those that the counter does not know yet."""
        counts = self._counter.get_counts()
        row["env_steps"] += counts.get("env_steps", 0)
        if "variables_version" in row:
            row["acting_staleness"] = counts.get(self._steps_name, 0) - row["variables_version"]
        self._calls.append(self._monitor.futures.write(self._name, row))

    def wait(self) -> None:
        """Waits until the last row has arrived. Raises the error of a call that failed."""
        while self._calls:
            self._calls.pop(0).result()

    def end_program(self) -> None:
        """Ends the program if all of its env steps are made."""
        if self._counter.remaining() == 0:
            self._monitor.finish("max_env_steps", self._counter.get_counts())
