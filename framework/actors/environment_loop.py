"""The loop that steps a batched environment with an actor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import dm_env
import numpy as np
import tree

from framework import core
from framework.actors.acting import PolicyActor
from framework.actors.episodes import cut_short, joined, numbers
from framework.actors.episodes import summarize as summarize
from framework.actors.observers import EnvironmentLoopObserver
from framework.environments.base import BatchedEnvironment, EnvironmentFault, unrounded
from framework.environments.border import is_own
from framework.environments.tensor import arrays
from framework.foreign import copies, is_foreign
from framework.types import FIRST, LAST, MID

_LOG = logging.getLogger(__name__)
_MOST_STEPS = 64  # Steps of all envs in one call, where an episode may end it.


class StepCounter(Protocol):
    """Counts steps and episodes, in this process or elsewhere."""

    def increment(self, **counts: int) -> Any: ...

    def get_counts(self) -> Mapping[str, Any]: ...


class RowLogger(Protocol):
    """Takes rows of metrics."""

    def write(self, row: dict[str, Any]) -> Any: ...


class EnvironmentLoop:
    """Steps an environment with an actor, and records the episodes of every env.

    ```python
    loop = EnvironmentLoop(environment, actor, counter, logger)
    loop.run(num_steps=50_000)         # exactly that many; continues where the last call stopped
    loop.run(num_episodes=20)          # whole episodes, from a reset
    finished = loop.step()             # one step of all envs, for a caller that drives the loop
    ```

    The observations of a `TensorEnvironment` go to `actor.select_action` as they are, and its actions to the
    environment. All else that the actor and the observers get are arrays.

    A *step* is one transition of one env. The call that begins an env's next episode is not a transition
    and is not counted.

    `run` writes one row per finished episode to the logger: `episode_return` (the sum of the environment's
    rewards; of several numbers `episode_return/agent_0` and so on), `episode_length`, `env`,
    `steps_per_second` (of all envs together, since the last row), the seconds spent since the last row in
    `reset_duration_sec`, `select_action_duration_sec`, `step_duration_sec` and `observe_duration_sec`
    (observing and `actor.update()`), the metrics of the observers, and the counts of the counter. The
    counter gets `steps` after each step of all envs, and `episodes` when they end.

    Attributes:
      environment: the environment.
      timestep: the time step that the next actions follow; None if the next step begins with a reset.
      num_steps: transitions of all envs since the construction of the loop.
      num_calls: steps of every env, also since then.
      num_dropped: number of episodes, also since then, that the environment cut short with FIRST, or that
        began before a reset (`BatchedEnvironment.cut`). They have no return.
      num_cut: number of episodes, also since then, that `run_episodes` cut after `max_episode_steps`. Their
        returns are the rewards up to there.
      seconds: seconds spent in `reset`, `select_action`, `step` and `observe` since the last row. Without
        rows, the caller may set them to 0.
    """

    def __init__(
        self,
        environment: BatchedEnvironment,
        actor: core.Actor,
        counter: StepCounter | None = None,
        logger: RowLogger | None = None,
        observers: Sequence[EnvironmentLoopObserver] = (),
        *,
        should_update: bool = True,
        max_episode_steps: int | None = None,
    ):
        """Makes the loop. The first step resets the environment.

        Args:
          environment: a batched environment of B envs.
          actor: an actor for B envs.
          counter: counts steps and episodes. None counts only inside the loop.
          logger: takes one row per episode. None disables logging.
          observers: add metrics of each episode.
          should_update: whether to call `actor.update()` after each step of all envs.
          max_episode_steps: steps after which `run_episodes` cuts an open episode. None: it
            waits for the end.
        """
        self.environment = environment
        self._actor = actor
        self._counter = counter
        self._logger = logger
        self._observers = [(observer, is_foreign(observer)) for observer in observers]
        self._should_update = should_update
        self._max_episode_steps = max_episode_steps
        self.timestep: dm_env.TimeStep | None = None
        self._partial: np.ndarray | None = None  # bool[B]: open episodes that began before the reset.
        self._reward_spec = environment.reward_spec()
        self._has_one_reward = not tree.is_nested(self._reward_spec)
        # float64 [B, *shape] per leaf of the reward spec.
        self._returns = [
            np.zeros((environment.num_envs, *leaf.shape)) for leaf in tree.flatten(self._reward_spec)
        ]
        self._lengths = np.zeros(environment.num_envs, np.int64)
        self.seconds = dict.fromkeys(("reset", "select_action", "step", "observe"), 0.0)
        self._logged = (0, time.perf_counter())  # steps and time at the last row
        self.num_steps = self.num_calls = self.num_dropped = self.num_cut = 0
        # The steps that are not counted yet: int8 [time, B], and float64 [time, B, *shape] per leaf.
        self._kinds, self._rewards = np.zeros((0, 0), np.int8), list(self._returns)
        self._ended: list[dict[str, Any]] = []  # Results that are not returned yet.
        # What `_connect` has found out.
        self._rows_of = actor.time_step_rows if isinstance(actor, PolicyActor) else None
        self._connected: BatchedEnvironment | None = None
        self._is_own, self._rows = False, None if self._rows_of is None else self._rows_of()

    def step(self, max_steps: int | None = None) -> dict[str, Any] | None:
        """One step of every env, after a reset if one is due; see `collect`."""
        return self.collect(1, max_steps)

    def collect(
        self,
        num_steps: int,
        max_steps: int | None = None,
        until: Callable[[], bool] | None = None,
        until_end: bool = False,
    ) -> dict[str, Any] | None:
        """Up to `num_steps` steps of every env, after a reset if one is due.

        What the environment returns is checked at the end of the call, and counted then.

        Args:
          num_steps: the number of steps of every env, at least 1.
          max_steps: the maximum number of transitions, at least 1. The call makes as many steps as surely
            fit. If fewer are left than there are envs, the actor gets FIRST for the excess envs, which
            closes their open episodes without counting them, and the next call resets all envs.
          until: ends the call after a step if it returns True.
          until_end: whether the call ends after a step that ends an episode.

        Returns:
          `episode_return` (float64 `[k]`, or a nest like the reward spec), `episode_length` (int64 `[k]`) and
          `env` (int64 `[k]`) of the k whole episodes that ended, and the metrics of the observers. None if
          none ended. The attribute `num_steps` counts the steps.
        """
        if max_steps is not None:
            if max_steps < 1:
                raise ValueError(f"max_steps: got {max_steps}, expected at least 1 or None.")
            num_steps = max(1, min(num_steps, max_steps // self._lengths.size))
        if self.timestep is None:
            self.timestep = self._reset()
        self._connect()
        if not self._observers:
            self._play(num_steps, max_steps, until, until_end)
        else:  # Their metrics are of the time when an episode ends.
            for _ in range(num_steps):
                if self._play(1, max_steps, until, until_end):
                    break
        if self._should_update:
            start = time.perf_counter()
            self._actor.update()
            self.seconds["observe"] += time.perf_counter() - start
        ended, self._ended = self._ended, []
        return joined(ended) if ended else None

    def _connect(self) -> None:
        """Finds out who may share arrays with whom, where that can have changed."""
        environment = self.environment
        if environment is not self._connected:
            self._connected, self._is_own, self._rows = environment, is_own(environment), None
        rows = None if self._rows_of is None else self._rows_of()
        if rows is not self._rows:
            self._rows = rows
            environment.write_to(rows)

    def _disconnect(self) -> None:
        """Gives the environment back to the caller, to whom it returns arrays of its own."""
        self._rows = None
        self.environment.write_to(None)

    def _play(
        self, num_steps: int, max_steps: int | None, until: Callable[[], bool] | None, until_end: bool
    ) -> bool:
        """Steps every env, and counts that; returns whether the call ends before `num_steps`."""
        clock, environment, actor, is_own = time.perf_counter, self.environment, self._actor, self._is_own
        before, self.timestep = self.timestep, None  # If the code below fails, the next step is a reset.
        assert before is not None
        taken, cut, over, on_device = 0, False, False, environment.device is not None
        if len(self._kinds) < num_steps:
            self._kinds = np.zeros((num_steps, self._lengths.size), np.int8)
            self._rewards = [np.zeros((num_steps, *total.shape)) for total in self._returns]
        acting = stepping = observing = 0.0
        start = clock()
        try:
            while taken < num_steps and not over:
                action = actor.select_action(before.observation)
                chosen = clock()
                # Environments and wrappers of others may change what they get.
                timestep = environment.step(action if is_own else copies(action))
                stepped = clock()
                seen = timestep
                if on_device:  # Only the policy sees tensors.
                    action, seen = arrays((action, timestep))
                if max_steps is not None and max_steps < self._lengths.size:
                    cut, seen = cut_short(seen, max_steps)
                exact = environment.exact_rewards
                if exact is None:
                    exact = [seen.reward] if self._has_one_reward else tree.flatten(seen.reward)
                elif cut or not is_own:
                    exact = unrounded(environment, seen)
                actor.observe(action, seen)
                for observer, is_theirs in self._observers:
                    observer.observe(environment, *(copies((seen, action)) if is_theirs else (seen, action)))
                self._kinds[taken] = seen.step_type
                for rewards, reward in zip(self._rewards, exact, strict=True):
                    rewards[taken] = reward
                taken, before = taken + 1, timestep
                over = (until_end and LAST in seen.step_type) or (until is not None and until())
                now = clock()
                acting, stepping = acting + chosen - start, stepping + stepped - chosen
                observing, start = observing + now - stepped, now
        except EnvironmentFault:
            raise
        except BaseException:
            self._count(taken)  # If the environment is the reason, that is the error.
            raise
        finally:
            self.seconds["select_action"] += acting
            self.seconds["step"] += stepping
            self.seconds["observe"] += observing
        self._count(taken, cut)
        if not cut:
            self.timestep = before
        return over

    def _count(self, taken: int, cut: bool = False) -> None:
        """Checks what the last steps have returned, and counts them."""
        if self._rows is not None:
            self._rows.check()
        kinds = self._kinds[:taken]
        num_steps, num_ended = int(np.count_nonzero(kinds)), len(self._ended)  # FIRST is 0.
        self.num_steps += num_steps
        self.num_calls += taken
        # All episodes go on at the other steps.
        turns = np.flatnonzero((kinds != MID).any(1)).tolist() if self._partial is None else range(taken)
        done = 0
        for turn in (*turns, taken):
            if done < turn:
                self._lengths += turn - done
                for total, rewards in zip(self._returns, self._rewards, strict=True):
                    total += rewards[done:turn].sum(0)
            if turn < taken:
                self._turn(turn, cut)
            done = turn + 1
        if self._counter is not None and num_steps:
            episodes = sum(len(ended["env"]) for ended in self._ended[num_ended:])
            self._counter.increment(steps=num_steps, **({"episodes": episodes} if episodes else {}))

    def _turn(self, index: int, cut: bool) -> None:
        """Counts a step in which episodes begin or end."""
        kinds = self._kinds[index]
        moved = kinds != FIRST
        if not cut and (dropped := ~moved & (self._lengths > 0)).any():
            self.num_dropped += int(np.count_nonzero(dropped))
            self._clear(np.flatnonzero(dropped))
        self._lengths += moved
        for total, rewards in zip(self._returns, self._rewards, strict=True):
            total += rewards[index]  # FIRST steps have reward 0.
        over = kinds == LAST
        if self._partial is not None:
            over = self._without_partial(over, kinds)
        if np.count_nonzero(over):
            self._ended.append(self._finish(np.flatnonzero(over)))

    def restart(self) -> None:
        """Makes the next step begin with a reset of all envs."""
        self.timestep = None

    def run(self, num_episodes: int | None = None, num_steps: int | None = None) -> int:
        """Steps until a limit is reached, or without end if there is no limit.

        Args:
          num_episodes: number of whole episodes, counted from a reset; see `run_episodes`.
          num_steps: exact number of steps, which continue where the last call stopped.

        Returns:
          The number of steps.

        Raises:
          ValueError: Both limits are given, or a limit is negative.
        """
        if num_episodes is not None and num_steps is not None:
            raise ValueError(f"run: got num_episodes={num_episodes} and num_steps={num_steps}, expected one.")
        if num_steps is not None and num_steps < 0:
            raise ValueError(f"num_steps: got {num_steps}, expected a number >= 0.")
        before = self.num_steps
        if num_episodes is not None:
            self.run_episodes(num_episodes)
        while num_episodes is None and (num_steps is None or self.num_steps - before < num_steps):
            finished = self.step(None if num_steps is None else num_steps - (self.num_steps - before))
            if finished is not None:
                self._log(finished)
        if (flush_pending := getattr(self._actor, "flush_pending", None)) is not None:
            flush_pending()
        self._disconnect()
        return self.num_steps - before

    def run_episodes(self, num_episodes: int) -> dict[str, Any]:
        """Plays `num_episodes` whole episodes from a reset and returns their metrics, as `step` does.

        An episode that an env continues across the reset (`BatchedEnvironment.cut`) counts only if it reaches
        `max_episode_steps` after the reset, as it may have no end. Each env plays a fixed share of the
        episodes, because taking those that end first would favor short episodes. Episodes that an env plays
        beyond its share, while others finish theirs, are neither returned nor logged. The next use of the
        loop starts from a reset.

        Episodes are returned in the order of their numbers: env b of B plays the episodes b, b + B, b + 2 B
        and so on; see `environments.SeededEpisodes`.

        An episode that is cut after `max_episode_steps` counts as it is then, and a warning says so. Its env
        plays no other before the next reset, which follows when all envs have played their shares or wait.

        Raises:
          ValueError: `num_episodes` is negative.
        """
        if num_episodes < 0:
            raise ValueError(f"num_episodes: got {num_episodes}, expected a number >= 0.")
        num_envs = self.environment.num_envs
        share = np.full(num_envs, num_episodes // num_envs)
        share[: num_episodes % num_envs] += 1
        none = np.zeros(0, np.int64)
        shares, numbers = share.copy(), []
        results: list[dict[str, Any]] = []
        waits = np.zeros(num_envs, np.bool_)  # Envs whose episode was cut and goes on.
        limit, cut_before = self._max_episode_steps, self.num_cut

        def take(finished: dict[str, Any], wanted: np.ndarray) -> None:
            envs = finished["env"][wanted]
            if len(envs):
                numbers.append(envs + num_envs * (shares[envs] - share[envs]))
                share[envs] -= 1
                results.append(tree.map_structure(lambda array: array[wanted], finished))
                self._log(results[-1])

        self.timestep = None
        self.environment.start_over()
        while share.any():
            most = _MOST_STEPS
            if limit is not None:
                most = min(most, limit - (0 if self.timestep is None else int(self._lengths.max())))
            finished = self.collect(max(1, most), until_end=True)
            if finished is not None:
                ended = finished["env"]
                take(finished, (share[ended] > 0) & ~waits[ended])
                waits[ended] = False
            if limit is not None and self._lengths.max() >= limit:
                late = np.flatnonzero((self._lengths >= limit) & (share > 0) & ~waits)
                self.num_cut += len(late)
                take(self._finish(late), np.ones(len(late), np.bool_))
                waits[late] = True
                if not np.count_nonzero((share > 0) & ~waits):
                    self.timestep, waits = None, np.zeros(num_envs, np.bool_)
        self.timestep = None
        self._disconnect()
        if self.num_cut > cut_before == 0:
            _LOG.warning(
                "%s: %d of %d episodes had not ended after %s steps and were cut there. Their returns are "
                "the rewards up to there, not whole episodes' returns. Give a larger limit "
                "(max_evaluation_steps of a run), or end or truncate the episodes.",
                *(self.environment.name, self.num_cut, num_episodes, f"{limit:,}"),
            )
        if not results:
            returns = tree.unflatten_as(self._reward_spec, [total[:0] for total in self._returns])
            return {"episode_return": returns, "episode_length": none, "env": none}
        order = np.argsort(np.concatenate(numbers))
        return tree.map_structure(lambda array: array[order], joined(results))

    def _reset(self) -> dm_env.TimeStep:
        start = time.perf_counter()
        self._disconnect()  # What it returns belongs to no step: it is checked at once.
        timestep = self.environment.reset()
        made = time.perf_counter()
        seen = timestep if self.environment.device is None else arrays(timestep)
        self._actor.observe_first(seen)
        for observer, is_theirs in self._observers:
            observer.observe_first(self.environment, copies(seen) if is_theirs else seen)
        self.seconds["reset"] += made - start
        self.seconds["observe"] += time.perf_counter() - made
        for total in self._returns:
            total[:] = 0.0
        self._lengths[:] = 0
        cut = self.environment.cut
        self._partial = None if cut is None or not cut.any() else cut.copy()
        return timestep

    def _without_partial(self, over: np.ndarray, step_type: np.ndarray) -> np.ndarray:
        """Drops the ended episodes that began before the reset; returns the others."""
        assert self._partial is not None
        dropped = over & self._partial
        self.num_dropped += int(np.count_nonzero(dropped))
        self._clear(np.flatnonzero(dropped))
        partial = self._partial & (step_type == MID)
        self._partial = partial if partial.any() else None
        return over & ~dropped

    def _finish(self, envs: np.ndarray) -> dict[str, Any]:
        """Returns the metrics of the episodes of `envs`, and clears their sums."""
        result: dict[str, Any] = {
            "episode_return": tree.unflatten_as(self._reward_spec, [total[envs] for total in self._returns]),
            "episode_length": self._lengths[envs],
            "env": envs,
        }
        for observer, _ in self._observers:
            result.update(observer.get_metrics(envs))
        self._clear(envs)
        return result

    def _clear(self, envs: np.ndarray) -> None:
        for total in self._returns:
            total[envs] = 0.0
        self._lengths[envs] = 0

    def _log(self, finished: dict[str, Any]) -> None:
        """Writes one row per episode of what `step` returned."""
        if self._logger is None:
            return
        steps, since = self._logged
        self._logged = (self.num_steps, time.perf_counter())
        common: dict[str, Any] = {
            "steps_per_second": (self.num_steps - steps) / max(self._logged[1] - since, 1e-9),
            **{f"{name}_duration_sec": value for name, value in self.seconds.items()},
        }
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        if self._counter is not None:
            common.update(self._counter.get_counts())
        for index in range(len(finished["env"])):
            row: dict[str, Any] = {}
            for key, nest in finished.items():
                row.update(numbers(key, tree.map_structure(lambda array, i=index: array[i], nest)))
            self._logger.write({**row, **common})
