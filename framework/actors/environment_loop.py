"""The loop that steps a batched environment with an actor."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import dm_env
import numpy as np
import tree

from framework import core
from framework.actors.observers import EnvironmentLoopObserver
from framework.environments.base import BatchedEnvironment, unrounded
from framework.environments.tensor import arrays
from framework.foreign import copies, is_foreign
from framework.specs import path_name
from framework.types import FIRST, LAST, MID, MultiAgentTimeStep, Nest

_LOG = logging.getLogger(__name__)
_OF_THE_LOOP = ("episode_return", "episode_length", "env")  # In every result; others are of observers.


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
          max_episode_steps: steps after which `run_episodes` cuts an episode that has not ended. None: it
            waits for the end.
        """
        self.environment = environment
        self._actor = actor
        self._counter = counter
        self._logger = logger
        self._observers = tuple(observers)
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
        self.num_steps = self.num_dropped = self.num_cut = 0

    def step(self, max_steps: int | None = None) -> dict[str, Any] | None:
        """One step of every env, after a reset if one is due.

        Args:
          max_steps: the maximum number of transitions, at least 1. If more envs would step, the actor gets
            FIRST for the excess envs, which closes their open episodes without counting them, and the next
            call resets all envs.

        Returns:
          `episode_return` (float64 `[k]`, or a nest like the reward spec), `episode_length` (int64 `[k]`) and
          `env` (int64 `[k]`) of the k whole episodes that ended, and the metrics of the observers. None if
          none ended. The attribute `num_steps` counts the steps.
        """
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps: got {max_steps}, expected at least 1 or None.")
        clock, seconds = time.perf_counter, self.seconds
        before = self._reset() if self.timestep is None else self.timestep
        self.timestep = None  # If the code below fails, the next step begins with a reset.
        start = clock()
        action = self._actor.select_action(before.observation)
        chosen = clock()
        timestep = self.environment.step(copies(action))  # Environments and wrappers may change theirs.
        stepped = clock()
        seen = timestep
        if self.environment.device is not None:  # Only the policy sees tensors.
            action, seen = arrays((action, timestep))
        moved = seen.step_type != FIRST
        num_steps = int(np.count_nonzero(moved))
        cut = max_steps is not None and num_steps > max_steps
        if cut and max_steps is not None:
            seen, moved = _cut(seen, moved, max_steps)
            num_steps = max_steps
        if self.environment.exact_rewards is not None:
            rewards = unrounded(self.environment, seen)
        else:
            rewards = [seen.reward] if self._has_one_reward else tree.flatten(seen.reward)
        self._actor.observe(action, seen)
        for observer in self._observers:
            foreign = is_foreign(observer)
            observer.observe(self.environment, *(copies((seen, action)) if foreign else (seen, action)))
        if self._should_update:
            self._actor.update()
        seconds["select_action"] += chosen - start
        seconds["step"] += stepped - chosen
        seconds["observe"] += clock() - stepped

        self.num_steps += num_steps
        if num_steps < len(moved) and not cut and (dropped := ~moved & (self._lengths > 0)).any():
            self.num_dropped += int(np.count_nonzero(dropped))
            self._clear(np.flatnonzero(dropped))
        self._lengths += moved
        for total, reward in zip(self._returns, rewards, strict=True):
            total += reward  # FIRST steps have reward 0
        if not cut:
            self.timestep = timestep
        over = seen.step_type == LAST
        if self._partial is not None:
            over = self._without_partial(over, seen.step_type)
        finished = np.flatnonzero(over) if np.count_nonzero(over) else None
        if self._counter is not None and num_steps:
            ended = {} if finished is None else {"episodes": len(finished)}
            self._counter.increment(steps=num_steps, **ended)
        return None if finished is None else self._finish(finished)

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
        self._actor.flush_pending()
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
            finished = self.step()
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
        return tree.map_structure(lambda *parts: np.concatenate(parts)[order], *results)

    def _reset(self) -> dm_env.TimeStep:
        start = time.perf_counter()
        timestep = self.environment.reset()
        made = time.perf_counter()
        seen = timestep if self.environment.device is None else arrays(timestep)
        self._actor.observe_first(seen)
        for observer in self._observers:
            observer.observe_first(self.environment, copies(seen) if is_foreign(observer) else seen)
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
        for observer in self._observers:
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
                row.update(_numbers(key, tree.map_structure(lambda array, i=index: array[i], nest)))
            self._logger.write({**row, **common})


def _numbers(name: str, nest: Nest) -> dict[str, Any]:
    """The numbers of a nest of arrays by name, such as `episode_return/agent_0`; one number has `name`."""
    found = {}
    for path, leaf in tree.flatten_with_path(nest):
        for index in np.ndindex(np.shape(leaf)):
            found[path_name(name, (*path, *index))] = np.asarray(leaf).item(*index)
    return found


def _cut(timestep: dm_env.TimeStep, moved: np.ndarray, limit: int) -> tuple[dm_env.TimeStep, np.ndarray]:
    """Keeps the first `limit` transitions and makes FIRST steps of the others."""
    beyond = moved & (np.cumsum(moved) > limit)

    def put(array: np.ndarray, value: float) -> np.ndarray:
        array = np.array(array)
        array[beyond] = value
        return array

    cut = timestep._replace(
        step_type=put(timestep.step_type, FIRST),
        reward=tree.map_structure(lambda reward: put(reward, 0), timestep.reward),
        discount=tree.map_structure(lambda discount: put(discount, 1), timestep.discount),
    )
    if isinstance(cut, MultiAgentTimeStep):
        cut = cut._replace(agents=tree.map_structure(lambda kinds: put(kinds, FIRST), cut.agents))
    return cut, moved & ~beyond


def summarize(ended: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean, minimum and maximum of the results of `EnvironmentLoop.step`; empty if no episode ended.

    With several agents, they are of the mean return of all agents; `episode_return/AGENT` is each agent's.
    Of arrays of other names, such as metrics of observers, the mean over the results that have them.
    """
    if not ended:
        return {}
    lengths = np.concatenate([episodes["episode_length"] for episodes in ended])
    each = tree.map_structure(lambda *parts: np.concatenate(parts), *[one["episode_return"] for one in ended])
    returns = np.mean(tree.flatten(each), axis=0)
    of_agents = each if isinstance(each, dict) else {}
    observed = dict.fromkeys(name for episodes in ended for name in episodes if name not in _OF_THE_LOOP)
    return {
        **{
            name: float(np.mean(np.concatenate([episodes[name] for episodes in ended if name in episodes])))
            for name in observed
        },
        **{f"episode_return/{agent}": float(np.mean(of_agents[agent])) for agent in of_agents},
        "episode_return": float(np.mean(returns)),
        "episode_return_min": float(np.min(returns)),
        "episode_return_max": float(np.max(returns)),
        "episode_length": float(np.mean(lengths)),
    }
