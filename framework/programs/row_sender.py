"""Rows of metrics of an actor, sent while the actor steps."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any


class RowSender:
    """Sends the rows of one actor. At most one row is on its way, so that rows keep their order.

    A row takes three calls: the state for the next checkpoint, the counts of the program, and the row itself,
    which contains those counts. On a far host each of them would cost the actor a round trip.

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
        self._row: dict[str, Any] | None = None  # Waits for the counts.
        self._counts: Future | None = None
        self._calls: list[Future] = []  # Without results; only their errors matter.

    def keep(self, state: Mapping[str, Any]) -> None:
        """Sends the actor's state, after the row before has arrived."""
        self.wait()
        if self._checkpointer is not None:
            self._calls.append(self._checkpointer.futures.put(self._name, state))

    def send(self, row: dict[str, Any], episodes: int) -> None:
        """Sends a row, and counts the actor's `episodes` since the last report.

        Args:
          row: its `env_steps` are those that the counter does not know yet.
          episodes: number of episodes to count.
        """
        self._write()
        self._row, self._counts = row, self._counter.futures.increment(actor_episodes=episodes)
        self.poll()

    def poll(self) -> None:
        """Sends the row if its counts have arrived. Raises the error of a call that failed."""
        if self._counts is not None and self._counts.done():
            self._write()
        while self._calls and self._calls[0].done():
            self._calls.pop(0).result()

    def wait(self) -> None:
        """Waits until the last row has arrived. Raises the error of a call that failed."""
        self._write()
        while self._calls:
            self._calls.pop(0).result()

    def _write(self) -> None:
        if self._row is None or self._counts is None:
            return
        counts, row = self._counts.result(), self._row
        self._row = self._counts = None
        row["env_steps"] += counts.get("env_steps", 0)
        if "variables_version" in row:
            row["acting_staleness"] = counts.get(self._steps_name, 0) - row["variables_version"]
        self._calls.append(self._monitor.futures.write(self._name, row))
