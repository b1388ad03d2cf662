"""Reasons for which an actor waits before it steps its envs, or before it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from framework.workers.collector import Steps

WAIT_S = 0.5  # Limit of a wait, after which the worker looks whether the program stops.
# Steps of all its envs that a worker holds a grant for. The first grants are small, so that all actors take
# part in a short program. Later grants are a share of the steps made, because each request costs a message.
_FIRST_GRANT, _GRANT_SHARE, _LARGEST_GRANT = 16, 16, 64


class Gate:
    """A reason to wait. A worker steps its collector while all of its gates are open:

    ```python
    while all(gate.open() for gate in gates):
        steps = collector.collect(min(gate.most() for gate in gates))
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

    def most(self) -> int:
        """Steps of the collector, at least 1, before the gate must be asked again."""
        return _LARGEST_GRANT

    def took(self, steps: Steps) -> None:
        """Takes what steps have made."""

    def why(self) -> str:
        """What the gate waits for, as the message of a deadlock says it."""
        return ""

    def end(self) -> None:
        """Takes that no further step is made, and waits for what must come after the last one."""


class Budget(Gate):
    """Requests env steps from the counter of a program, and reports those that were made.

    The counter grants steps to all actors in small portions, so that a program makes exactly `max_env_steps`.

    Args:
      name: name of the worker.
      counter: a client of the `Counter`.
      envs: number of envs of the worker.
      limit: the largest number of env steps to request now. None does not limit it.
      life: identifies this life of an elastic actor, which may be restarted.
      holds: whether the last steps count only when the worker has ended; see `Counter.grant`.

    Attributes:
      left: env steps that may be made now.
      spent: env steps that were made since the last report.
    """

    def __init__(
        self,
        name: str,
        counter: Any,
        envs: int,
        *,
        limit: Callable[[], int] | None = None,
        life: str = "",
        holds: bool = False,
    ):
        self._counter, self._envs, self._limit = counter, envs, limit
        self._options = {"who": name, "life": life, "holds": holds}  # The same in each request.
        self.left = self.spent = 0
        self._episodes = 0  # That ended since the last report.
        self._steps = 0

    def open(self) -> bool:
        """Whether steps are granted. Requests more if they are too few for a step of all envs."""
        if self.left >= self._envs:
            return True
        wanted = min(max(_FIRST_GRANT, self._steps // _GRANT_SHARE), _LARGEST_GRANT) * self._envs
        return self._report(wanted if self._limit is None else min(wanted, max(1, self._limit()))) > 0

    def most(self) -> int:
        return max(1, self.left // self._envs)

    def took(self, steps: Steps) -> None:
        self.left -= steps.made
        self.spent += steps.made
        self._steps += steps.calls
        if steps.ended is not None:
            self._episodes += len(steps.ended["episode_length"])

    def ask(self, steps: int) -> int:
        """Reports the steps made, and asks for `steps` of every env; returns the env steps granted."""
        return self._report(steps * self._envs)

    def end(self) -> None:
        """Reports the last steps. The rest of the grant goes to other actors."""
        self._report(0)

    def _report(self, wanted: int) -> int:
        """Reports steps and episodes together, because the last report may end the program; see `grant`.

        `wanted` are the env steps to request, with the rest of the current grant.
        """
        granted: int = self._counter.grant(
            n=wanted, spent=self.spent, actor_episodes=self._episodes, **self._options
        )
        if granted or not (self._options["holds"] and wanted):  # If this is False, they were not counted.
            self.spent = self._episodes = 0
        self.left = granted
        return granted


class LostSteps(Gate):
    """Keeps an elastic actor until all steps are made: the steps of a lost actor go to the others.

    Args:
      counter: a client of the `Counter`.
    """

    def __init__(self, counter: Any):
        self._counter = counter

    def open(self) -> bool:
        return not self._counter.wait_for_steps(WAIT_S)
