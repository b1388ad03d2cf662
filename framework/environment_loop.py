"""The environment loop: one batched environment driven by one actor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework.core import Actor
from framework.environments.base import FIRST, LAST, BatchedEnvironment
from framework.observers import EnvironmentLoopObserver
from framework.types import Nest

_DURATIONS = ("reset", "select_action", "step", "observe")


class EnvironmentLoop:
    """Steps an environment with an actor, and keeps the score of every env.

    ::

        loop = EnvironmentLoop(environment, actor, counter=counter, logger=logger)
        loop.run(num_steps=50_000)         # exactly so many; goes on where the last call stopped
        loop.run(num_episodes=20)          # whole episodes, from a reset
        finished = loop.step()             # one batched step, for who drives the loop himself

    A *step* is one transition of one env. The call that begins an env's next episode is no transition
    and is not counted.

    Returns are sums of the rewards that the environment gives; networks normalize what is learned from.
    For each finished episode the logger is given one row: ``episode_return``, ``episode_length``,
    ``env``, ``steps_per_second`` (of all envs together, since the last row), the seconds spent since the
    last row in ``reset_duration_sec``, ``select_action_duration_sec``, ``step_duration_sec`` and
    ``observe_duration_sec`` (observing and ``actor.update()``), what observers measured, and the counter's
    counts. The counter is told of ``steps`` at each batched step and of ``episodes`` when they end.
    """

    def __init__(
        self,
        environment: BatchedEnvironment,
        actor: Actor,
        counter: Any = None,
        logger: Any = None,
        observers: Sequence[EnvironmentLoopObserver] = (),
        *,
        should_update: bool = True,
    ):
        """Makes the loop; nothing is reset before the first step.

        Args:
          environment: B envs.
          actor: acts for B envs.
          counter: has ``increment(**counts)`` and ``get_counts()``; None: nothing is counted outside.
          logger: has ``write(row)``; None: nothing is logged.
          observers: measure more of each episode.
          should_update: whether to call ``actor.update()`` once per batched step.
        """
        self._environment = environment
        self._actor = actor
        self._counter = counter
        self._logger = logger
        self._observers = tuple(observers)
        self._should_update = should_update
        self._timestep: dm_env.TimeStep | None = None  # None: reset before the next step
        zeros = [
            np.zeros((environment.num_envs, *leaf.shape)) for leaf in tree.flatten(environment.reward_spec())
        ]
        self._returns = zeros  # float64[B, *shape] per leaf of the reward spec
        self._lengths = np.zeros(environment.num_envs, np.int64)
        self._nested_reward = tree.is_nested(environment.reward_spec())
        self._seconds = dict.fromkeys(_DURATIONS, 0.0)
        self._steps_since_row = 0
        self._last_row = time.perf_counter()
        self._stop = False
        self._num_steps = 0
        self._num_episodes = 0

    @property
    def num_steps(self) -> int:
        """Transitions made since the loop was made, over all envs."""
        return self._num_steps

    @property
    def num_episodes(self) -> int:
        """Episodes finished since the loop was made, over all envs."""
        return self._num_episodes

    def step(self, max_steps: int | None = None) -> dict[str, np.ndarray] | None:
        """One step of every env, after a reset if one is due.

        Args:
          max_steps: the most transitions to make, at least 1. If fewer than there are envs to step, the
            envs beyond are handed to the actor as FIRST, which closes their open episode uncounted, and
            the next call resets all envs.

        Returns:
          ``episode_return`` (float64[k], or a nest like the reward spec), ``episode_length`` (int64[k]) and
          ``env`` (int64[k]) of the k episodes that ended, and what observers measured; None if none ended.
          ``num_steps`` tells how many steps were made.
        """
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}, expected at least 1 or None")
        clock = time.perf_counter
        seconds = self._seconds
        if self._timestep is None:
            self._begin()
        assert self._timestep is not None
        before, self._timestep = self._timestep, None  # if anything below fails, begin with a reset
        start = clock()
        action = self._actor.select_action(before.observation)
        chosen = clock()
        timestep = self._environment.step(action)
        stepped = clock()
        seconds["select_action"] += chosen - start
        seconds["step"] += stepped - chosen

        moved = timestep.step_type != FIRST
        num_steps = int(np.count_nonzero(moved))
        cut = max_steps is not None and num_steps > max_steps
        if cut:
            timestep, moved = _cut(timestep, moved, max_steps or 0)
            num_steps = max_steps or 0
        self._actor.observe(action, timestep)
        for observer in self._observers:
            observer.observe(self._environment, timestep, action)
        if self._should_update:
            self._actor.update()
        seconds["observe"] += clock() - stepped

        self._lengths += moved
        # FIRST steps have reward 0, so adding all envs is right.
        reward = timestep.reward
        if self._nested_reward:
            for total, part in zip(self._returns, tree.flatten(reward), strict=True):
                total += part
        else:
            self._returns[0] += reward
        self._num_steps += num_steps
        self._steps_since_row += num_steps
        over = timestep.step_type == LAST
        finished = np.nonzero(over)[0] if np.count_nonzero(over) else None
        if self._counter is not None and (num_steps or finished is not None):
            if finished is None:
                self._counter.increment(steps=num_steps)
            else:
                self._counter.increment(steps=num_steps, episodes=len(finished))
        self._timestep = None if cut else timestep
        return None if finished is None else self._finish(finished)

    def run(self, num_episodes: int | None = None, num_steps: int | None = None) -> int:
        """Steps until a limit is reached, or for ever; returns the number of steps made.

        Args:
          num_episodes: whole episodes, counted from a reset; see ``run_episodes``.
          num_steps: exactly so many steps, going on where the last call stopped.

        Raises:
          ValueError: both limits are given, or a negative one.
        """
        if num_episodes is not None and num_steps is not None:
            raise ValueError(
                f"run() got num_episodes={num_episodes} and num_steps={num_steps}, expected one of the two"
            )
        for name, limit in (("num_episodes", num_episodes), ("num_steps", num_steps)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}, expected a number >= 0")
        before = self._num_steps
        if num_episodes is not None:
            self.run_episodes(num_episodes)
            return self._num_steps - before
        while not self._stop:
            done = self._num_steps - before
            if num_steps is None:
                finished = self.step()
            elif done == num_steps:
                break
            else:
                finished = self.step(max_steps=num_steps - done)
            if finished is not None:
                self.log(finished)
        self._stop = False
        return self._num_steps - before

    def run_episodes(self, num_episodes: int) -> dict[str, np.ndarray]:
        """Plays ``num_episodes`` whole episodes from a reset and returns their figures, as ``step`` does.

        Each env plays its share of the episodes, decided beforehand: taking whichever end first would
        favour short ones. Episodes that an env plays beyond its share while others finish theirs are
        not among the result and not logged; the next use of the loop starts from a reset.
        """
        num_envs = self._environment.num_envs
        share = np.full(num_envs, num_episodes // num_envs)
        share[: num_episodes % num_envs] += 1
        results: list[dict[str, np.ndarray]] = []
        self._timestep = None
        while share.any() and not self._stop:
            finished = self.step()
            if finished is None:
                continue
            wanted = share[finished["env"]] > 0
            share[finished["env"][wanted]] -= 1
            if wanted.any():
                finished = {key: _rows(value, wanted) for key, value in finished.items()}
                results.append(finished)
                self.log(finished)
        self._timestep = None
        self._stop = False
        if not results:
            return {
                "episode_return": np.zeros(0),
                "episode_length": np.zeros(0, np.int64),
                "env": np.zeros(0, np.int64),
            }
        return {
            key: tree.map_structure(
                lambda *parts: np.concatenate(parts), *[result[key] for result in results]
            )
            for key in results[0]
        }

    def stop(self) -> None:
        """Makes ``run`` return after the step in hand, or at once when it is called next; from any thread."""
        self._stop = True

    def seconds(self) -> dict[str, float]:
        """Seconds spent in ``reset``, ``select_action``, ``step`` and ``observe`` since the last row."""
        return dict(self._seconds)

    def take_seconds(self) -> dict[str, float]:
        """Seconds spent resetting, choosing actions, stepping and observing since the last row or call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(_DURATIONS, 0.0)
        return seconds

    def _begin(self) -> None:
        start = time.perf_counter()
        timestep = self._environment.reset()
        self._seconds["reset"] += time.perf_counter() - start
        start = time.perf_counter()
        self._actor.observe_first(timestep)
        for observer in self._observers:
            observer.observe_first(self._environment, timestep)
        self._seconds["observe"] += time.perf_counter() - start
        for total in self._returns:
            total[:] = 0.0
        self._lengths[:] = 0
        self._timestep = timestep

    def _finish(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        returns = [total[envs] for total in self._returns]
        result: dict[str, Any] = {
            "episode_return": (
                tree.unflatten_as(self._environment.reward_spec(), returns)
                if self._nested_reward
                else returns[0]
            ),
            "episode_length": self._lengths[envs],
            "env": envs,
        }
        for observer in self._observers:
            result.update(observer.get_metrics(envs))
        for total in self._returns:
            total[envs] = 0.0
        self._lengths[envs] = 0
        self._num_episodes += len(envs)
        return result

    def log(self, finished: dict[str, np.ndarray]) -> None:
        """Writes one row per episode of what ``step`` returned; ``run`` does so itself."""
        if self._logger is None:
            return
        now = time.perf_counter()
        common: dict[str, Any] = {
            "steps_per_second": self._steps_since_row / max(now - self._last_row, 1e-9),
            **{f"{name}_duration_sec": value for name, value in self._seconds.items()},
        }
        if self._counter is not None:
            common.update(self._counter.get_counts())
        for index in range(len(finished["env"])):
            row = {key: _scalar(value, index) for key, value in finished.items()}
            self._logger.write({**row, **common})
        self._seconds = dict.fromkeys(_DURATIONS, 0.0)
        self._steps_since_row = 0
        self._last_row = now


def _rows(value: Nest, chosen: np.ndarray) -> Nest:
    """The entries of a nest of arrays where ``chosen`` (bool[k]) is set."""
    return tree.map_structure(lambda array: array[chosen], value)


def _scalar(value: Nest, index: int) -> Any:
    """Entry ``index`` of a nest of arrays, as a Python number where it is one."""
    picked = tree.map_structure(lambda array: array[index], value)
    return picked.item() if isinstance(picked, np.generic) else picked


def _cut(timestep: dm_env.TimeStep, moved: np.ndarray, limit: int) -> tuple[dm_env.TimeStep, np.ndarray]:
    """Keeps the first ``limit`` transitions and makes FIRST steps of the others."""
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
    return cut, moved & ~beyond


__all__ = ["EnvironmentLoop"]
