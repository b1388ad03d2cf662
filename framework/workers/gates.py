"""Reasons for which an actor waits before it steps its envs, or before it ends."""

from __future__ import annotations

from typing import Any

from framework.workers.collector import Steps

WAIT_S = 0.5  # Limit of a wait, after which the worker looks whether the program stops.


class Gate:
    """A reason to wait. A worker steps its collector while all of its gates are open:

    ```python
    while all(gate.open() for gate in gates):
        steps = collector.step()
        for gate in gates:
            gate.took(steps)
    ```
    """

    def ready(self) -> bool:
        """Whether `open` can answer without a wait. Changes nothing: the serial engine asks often."""
        return True

    def open(self) -> bool:
        """Whether the worker may go on. May wait for it, for half a second."""
        return True

    def took(self, steps: Steps) -> None:
        """Takes what a step has made."""

    def why(self) -> str:
        """What the gate waits for, as the message of a deadlock says it."""
        return ""

    def end(self) -> None:
        """Takes that no further step is made, and waits for what must come after the last one."""


class LostSteps(Gate):
    """Keeps an elastic actor until all steps are made: the steps of a lost actor go to the others.

    Args:
      counter: a client of the `Counter`.
    """

    def __init__(self, counter: Any):
        self._counter = counter

    def open(self) -> bool:
        return not self._counter.wait_for_steps(WAIT_S)


class LastActor(Gate):
    """Keeps an elastic actor until the steps of all count, its own first: the others may be lost.

    Args:
      counter: a client of the `Counter`.
      budget: of the actor.
      max_env_steps: the steps of all.
    """

    def __init__(self, counter: Any, budget: Gate, max_env_steps: int | None):
        self._counter, self._budget, self._steps = counter, budget, max_env_steps

    def open(self) -> bool:
        self._budget.end()
        made: bool = self._counter.wait_for("env_steps", self._steps, timeout=WAIT_S)
        return made
