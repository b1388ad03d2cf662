"""Families of tasks for meta-learning: environments whose task can be drawn and set."""

from __future__ import annotations

import abc

import dm_env
import numpy as np

from framework import specs
from framework.config_checks import whole_number
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment
from framework.environments.fields import FieldChecker
from framework.environments.testing import make_spec
from framework.environments.wrappers import find_inside
from framework.types import Nest


class TaskEnvironment(BatchedEnvironment):
    """B envs that differ in a task, which observations do not show.

    ```python
    goals = environment.sample_tasks(20)
    environment.set_task(goals[0])       # of every env
    timestep = environment.reset()
    ```

    Without `set_task`, each episode of each env has a task of its own, drawn as by `sample_tasks`.
    """

    @abc.abstractmethod
    def sample_tasks(self, num_tasks: int, seed: int | None = None) -> np.ndarray:
        """Draws tasks from the distribution of the family, `[num_tasks, ...]`; the same ones with a seed."""

    @abc.abstractmethod
    def set_task(self, task: np.ndarray | None) -> None:
        """Sets the task of all later episodes: one for all envs, or `[B, ...]`. None draws them again.

        Reset the environment before the next step.
        """


def find_task_environment(environment: BatchedEnvironment) -> TaskEnvironment:
    """The environment itself, or the one inside its wrappers, whose task can be set.

    Raises:
      TypeError: There is none.
    """
    inner = find_inside(environment, TaskEnvironment)  # type: ignore[type-abstract]
    if inner is None:
        raise TypeError(
            f"environment: got {environment.name} ({type(environment).__name__}), expected a "
            "TaskEnvironment. Use 'tasks:Navigation2D', or a class with sample_tasks() and set_task()."
        )
    return inner


def require_tasks(environment: BatchedEnvironment) -> BatchedEnvironment:
    """A wrapper that raises TypeError for an environment without tasks, and returns others as they are."""
    find_task_environment(environment)
    return environment


class Navigation2D(TaskEnvironment):
    """A point in the plane moves to a goal that it does not see (Finn et al., 2017, section 5.3).

    Observation float32[2]: the position, which starts at the origin. Action float32[2]: the velocity per
    step, clipped to ±0.1. Reward: minus the distance to the goal after the move, as in the public code of
    the paper (its text says the squared distance). The task is the goal, uniform in [-0.5, 0.5]². An episode
    terminates within 0.01 of the goal, and is truncated after `max_steps` steps.
    """

    name = "tasks:Navigation2D"

    def __init__(self, num_envs: int = 1, seed: int | None = None, max_steps: int = 100):
        """Makes B envs.

        Args:
          num_envs: B.
          seed: seed of the tasks.
          max_steps: steps after which an episode is truncated.
        """
        self.num_envs, self._max_steps = num_envs, whole_number("max_steps", max_steps, 1)
        self.spec = make_spec(
            specs.Array((2,), np.float32, name="observation"),
            specs.BoundedArray((2,), np.float32, -0.1, 0.1, name="action"),
        )
        self._check_action = FieldChecker(self.name, "action", self.spec.actions, num_envs)
        self._rng = np.random.default_rng(seed)
        self._seeds: dict[int, int] = {}  # By env, its next episode's.
        self._task: np.ndarray | None = None  # [B, 2] once it is set
        self._goals = np.zeros((num_envs, 2), np.float32)
        self._positions = np.zeros((num_envs, 2), np.float32)
        self._steps = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, bool)  # envs whose next step starts an episode

    def sample_tasks(self, num_tasks: int, seed: int | None = None) -> np.ndarray:
        rng = self._rng if seed is None else np.random.default_rng(seed)
        return rng.uniform(-0.5, 0.5, (num_tasks, 2)).astype(np.float32)

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._seeds.update((int(env), int(seeds[env])) for env in np.flatnonzero(envs))

    def set_task(self, task: np.ndarray | None) -> None:
        self._task = None
        if task is not None:
            if np.shape(task) not in ((2,), (self.num_envs, 2)):
                raise ValueError(f"task: got shape {np.shape(task)}, expected (2,) or ({self.num_envs}, 2).")
            self._task = np.broadcast_to(np.asarray(task, np.float32), (self.num_envs, 2)).copy()

    def reset(self) -> dm_env.TimeStep:
        self._over[:] = True
        return self._advance(np.zeros((self.num_envs, 2), np.float32))

    def step(self, action: Nest) -> dm_env.TimeStep:
        return self._advance(self._check_action(action)[0])

    def _advance(self, velocity: np.ndarray) -> dm_env.TimeStep:
        first = self._over
        if first.any():
            drawn = self.sample_tasks(int(first.sum())) if self._task is None else self._task[first]
            self._goals[first] = drawn
            for env in [env for env in self._seeds if first[env]]:
                seed = self._seeds.pop(env)
                if self._task is None:
                    self._goals[env] = self.sample_tasks(1, seed)[0]
        # New arrays: time steps that were returned stay as they are.
        moved = self._positions + np.clip(velocity, -0.1, 0.1)
        self._positions = np.where(first[:, None], np.float32(0), moved).astype(np.float32)
        self._steps = np.where(first, 0, self._steps + 1)
        distance = np.linalg.norm(self._positions - self._goals, axis=1)
        reached = ~first & (distance < 0.01)
        self._over = reached | (~first & (self._steps >= self._max_steps))
        return dm_env.TimeStep(
            step_type=np.where(first, FIRST, np.where(self._over, LAST, MID)),
            reward=np.where(first, 0.0, -distance).astype(np.float32),
            discount=np.where(reached, 0.0, 1.0).astype(np.float32),
            observation=self._positions.copy(),  # The caller may change it.
        )


#: The families, by the name after `tasks:`.
FAMILIES: dict[str, type[TaskEnvironment]] = {"Navigation2D": Navigation2D}
