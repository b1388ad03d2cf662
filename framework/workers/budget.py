"""The env steps that a worker may make, and the report of those that it has made."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from framework.workers.collector import Steps
from framework.workers.gates import Gate
from launch.context import find_context

# Steps of all its envs that a worker holds a grant for. The first grants are small, so that all actors take
# part in a short program. Later grants are a share of the steps made, because each request costs a message.
# Where the counter answers at once, grants are half as large, and are used up before the next request.
_FIRST_GRANT, _GRANT_SHARE, _LARGEST_GRANT = 16, 16, 128


class Budget(Gate):
    """Requests env steps from the counter of a program, ahead of their use, and reports those that were made.

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
        node = find_context()
        self._asks_ahead = node is not None and node.engine != "serial"
        self._counter, self._envs, self._limit = counter, envs, limit
        self._options = {"who": name, "life": life, "holds": holds}  # The same in each request.
        self.left = self.spent = 0
        self._episodes = 0  # That ended since the last report.
        self._reported = (0, 0)  # Env steps and episodes of the last report.
        self._steps = 0
        self._ask_at = envs - 1  # The number of steps left at which more are requested.
        self._request: Future | None = None  # Asks for a larger grant, which includes the rest of this one.

    def open(self) -> bool:
        """Whether steps are granted. Requests more when half are spent, so that the counter is in time."""
        if self._request is None and self.left > self._ask_at:
            return True
        if self._request is not None and (self._has_few() or self._request.done()):
            self._take()
        if self._request is None and self.left <= self._ask_at:
            self._request = self._report(self._counter.futures.grant, self._wanted())
        if self._has_few():
            self._take()
        return self.left > 0

    def took(self, steps: Steps) -> None:
        self.left -= steps.made
        self.spent += steps.made
        self._steps += 1
        if steps.ended is not None:
            self._episodes += len(steps.ended["episode_length"])

    def ask(self, steps: int) -> int:
        """Reports the steps made, and asks for `steps` of every env; returns the env steps granted."""
        self.left = self._report(self._counter.grant, steps * self._envs)
        return self.left

    def end(self) -> None:
        """Reports the last steps. The rest of the grant goes to other actors."""
        self._take()  # Requests in flight may overtake each other.
        self._report(self._counter.grant, 0)

    def _has_few(self) -> bool:
        """Whether the grant is too small for a step of all envs, which would cut episodes short."""
        return self.left < self._envs

    def _take(self) -> None:
        if self._request is None:
            return
        granted, self._request = self._request.result(), None
        self.left = granted - self.spent
        self._ask_at = max(self._envs - 1, granted // 2 if self._asks_ahead else 0)
        if self._options["holds"] and not granted:  # They were not counted; see `Counter.grant`.
            self.spent += self._reported[0]
            self._episodes += self._reported[1]

    def _wanted(self) -> int:
        """The number of env steps to request, with the rest of the current grant."""
        largest = _LARGEST_GRANT if self._asks_ahead else _LARGEST_GRANT // 2
        wanted = min(max(_FIRST_GRANT, self._steps // _GRANT_SHARE), largest) * self._envs
        return wanted if self._limit is None else min(wanted, max(1, self._limit()))

    def _report(self, grant: Callable[..., Any], wanted: int) -> Any:
        """Reports steps and episodes together, because the last report may end the program; see `grant`."""
        self._reported = self.spent, self._episodes
        answer = grant(n=wanted, spent=self.spent, actor_episodes=self._episodes, **self._options)
        self.left = min(max(0, self.left), wanted)  # May be spent until the answer is there.
        self.spent = self._episodes = 0
        return answer
