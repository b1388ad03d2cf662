"""B environments stepped in the caller's thread: one after the other, or together by gymnasium."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import specs
from framework.environments.base import (
    FIRST,
    LAST,
    MID,
    BatchedEnvironment,
    EnvironmentFault,
    UnexpectedReturn,
    describe,
)
from framework.environments.rows import TimeStepChecker, TimeStepRows
from framework.environments.single import SingleEnv, as_flag, env_seeds, reset_parts, step_parts
from framework.foreign import close, copies
from framework.types import Nest

_FLAGS = ("terminated", "truncated")


class InlineEnvironment(BatchedEnvironment):
    """Steps each env in turn."""

    takes_seed = True
    exact_rewards: list[np.ndarray] | None = None

    def __init__(self, name: str, make_envs: Sequence[Callable[[], SingleEnv]], *, first_env: int = 0):
        """Builds the envs.

        Args:
          name: name of the environment, for errors.
          make_envs: one function per env.
          first_env: the number of env 0 in errors (a process has only some of all envs).
        """
        self.name = name
        self.num_envs = len(make_envs)
        self._first_env = first_env
        self._envs: list[SingleEnv] = []
        try:
            for index, make in enumerate(make_envs):
                self._envs.append(make())
                if self._envs[index].spec != self._envs[0].spec:
                    raise EnvironmentFault(
                        f"{name}, env {first_env + index}: got the spec {self._envs[index].spec}, expected "
                        f"{self._envs[0].spec} as in env {first_env}. All envs must have the same spec."
                    )
        except BaseException:
            self.close()
            raise
        first, num_envs = self._envs[0], self.num_envs
        self.spec = spec = first.spec
        self._check = TimeStepChecker(
            *(name, spec, num_envs),
            observation_starts=first.observation_starts,
            action_starts=first.action_starts,
            first_env=first_env,
        )
        self._single_action = not tree.is_nested(spec.actions)
        # The reward and the discount of the step that starts an episode.
        self._first_reward = specs.zeros(spec.rewards)
        self._first_discount = tree.map_structure(np.ones_like, specs.zeros(spec.discounts))
        self._step_types = [LAST] * num_envs  # LAST: the next step starts an episode
        self._num_repeats, self._has_mask = 1, specs.has_action_mask(spec)
        self._has_agents = bool(specs.agents(spec))

    def reset(self) -> dm_env.TimeStep:
        self._step_types = [LAST] * self.num_envs
        return self._advance([None] * self.num_envs, None)

    def step(self, action: Nest) -> dm_env.TimeStep:
        # One action for each env: copies, since environments may keep it and policies may use theirs again.
        # One number is a scalar of numpy, as `action_space.sample()` gives it, and needs no copy.
        arrays = self._check.check_action(action)
        actions = [list(array if array.ndim == 1 else array.copy()) for array in arrays]
        if self._single_action:
            return self._advance(actions[0], action)
        build = self._check.action.build
        return self._advance([build(parts) for parts in zip(*actions, strict=True)], action)

    def write_to(self, rows: TimeStepRows | None) -> None:
        self._check.write_to(rows)

    def repeat_actions(self, num_repeats: int) -> None:
        self._num_repeats = num_repeats

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        for env, seeder in enumerate(env.seeder() for env in self._envs):
            if seeder is None:
                super().seed_episodes(seeds, envs)  # Raises.
            elif envs[env]:
                seeder(int(seeds[env]))

    def end_episodes(self, envs: np.ndarray) -> None:
        for env in np.nonzero(envs)[0]:
            self._step_types[env] = LAST

    def _advance(self, actions: Sequence[Nest], batch: Nest) -> dm_env.TimeStep:
        """Steps or resets the envs; `actions` has the actions of `batch` one by one."""
        if not self._envs:
            raise EnvironmentFault(f"{self.name}: it is closed. Make a new environment.")
        step_types, repeats = self._step_types, self._num_repeats > 1
        observations: list[Nest] = []
        rewards: list[Nest] = [self._first_reward] * self.num_envs
        discounts: list[Nest] = [self._first_discount] * self.num_envs
        for env, environment in enumerate(self._envs):
            if step_types[env] == LAST:
                try:
                    observations.append(environment.reset())
                except Exception as error:
                    raise self._fault(env, "reset()", error) from error
                step_types[env] = FIRST
                continue
            action = actions[env]
            try:  # What is repeated stays as it is.
                result = environment.step(copies(action) if repeats else action)
            except Exception as error:
                raise self._fault(env, f"step({action})", error) from error
            if repeats:
                result = self._repeat(env, action, batch, result)
            observation, rewards[env], discounts[env], step_types[env] = result
            observations.append(observation)
        agents: list[Nest] = []
        if self._has_agents:
            types = zip(step_types, self._envs, strict=True)
            agents = [env.agents or dict.fromkeys(self.spec.actions, kind) for kind, env in types]
        timestep = self._check.gather(step_types, rewards, discounts, observations, agents)
        self.exact_rewards = self._check.exact
        return timestep

    def _fault(self, env: int, call: str, error: Exception) -> EnvironmentFault:
        return EnvironmentFault(f"{self.name}, env {self._first_env + env}: {describe(call, error)}")

    def _repeat(self, env: int, action: Nest, batch: Nest, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gives an action again after the first `result`, see `ActionRepeat`; returns all steps' result."""
        mine = tree.map_structure(lambda leaf: np.asarray(leaf)[env : env + 1], batch)
        observation, reward, discount, step_type = result
        reward, discount = self._numbers(env, reward, discount)
        for _ in range(self._num_repeats - 1):
            if step_type != MID:
                break
            if self._has_mask:
                one = tree.map_structure(lambda leaf: np.asarray(leaf)[None], observation)
                if not specs.legal(self.spec, one, mine).all():
                    break
            try:
                observation, more, factor, step_type = self._envs[env].step(copies(action))
            except Exception as error:
                raise self._fault(env, f"step({action})", error) from error
            more, factor = self._numbers(env, more, factor)
            reward, discount = reward + discount * more, discount * factor
        return observation, reward, discount, step_type

    def _numbers(self, env: int, reward: Any, discount: Any) -> tuple[float, float]:
        """A reward and a discount, checked; the reward is not rounded."""
        check = self._check.fields["reward"]
        (given,) = check.gather([reward], [env])
        (factor,) = self._check.fields["discount"].gather([discount], [env])
        return float((check.exact or [given])[0][0]), float(factor[0])

    def render(self, env: int = 0) -> np.ndarray:
        picture = self._envs[env].render()
        if not isinstance(picture, np.ndarray):
            raise NotImplementedError(
                f"{self.name}: render() gave {type(picture).__name__}, expected an array; make the "
                "environment with render_mode='rgb_array'."
            )
        return picture

    def close(self) -> None:
        """Closes every env, the last one first. Errors are logged."""
        while self._envs:
            env = self._envs.pop()
            close(env.close, f"{self.name}, env {self._first_env + len(self._envs)}")


class VectorEnvironment(BatchedEnvironment):
    """A `gymnasium.vector.VectorEnv` in `NEXT_STEP` autoreset mode, which computes all envs together.

    What it returns is the environment's own: `border.checked` checks and copies it. All envs may share one
    random generator (CartPole's do). The episodes of env i then depend on the number of envs, unlike with the
    other ways to step.
    """

    takes_seed = True

    def __init__(self, name: str, environment: Any, seed: int | None):
        """Takes over `environment`, which must not have been reset yet.

        Raises:
          ValueError: The environment resets in a mode other than NEXT_STEP.
        """
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv  # 0.2 s

        self.name = name
        self._environment = environment
        self.num_envs = int(environment.num_envs)
        mode = (getattr(environment, "metadata", None) or {}).get("autoreset_mode")
        mode = getattr(mode, "value", mode)
        if mode != "NextStep":
            raise ValueError(
                f"{name}: the vector environment's autoreset mode is {mode!r}, expected NEXT_STEP: otherwise "
                "the last observation of an episode is lost. Use stepping='inline' or 'processes', or make "
                "the vector environment with autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP."
            )
        self._seed: int | list[int | None] | None = seed
        if seed is not None and isinstance(environment.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            # With one integer these seed env i with it plus i: neighboring seeds would share most envs.
            self._seed = env_seeds(seed, self.num_envs)
        space, action_space = environment.single_observation_space, environment.single_action_space
        self.spec = specs.from_spaces(space, action_space)
        self.observation_starts = specs.discrete_offsets(space)
        self.action_starts = specs.discrete_offsets(action_space)
        self._over: np.ndarray | None = None  # bool[B]: envs whose last step was LAST; None before a reset

    def reset(self) -> dm_env.TimeStep:
        seed, self._seed = self._seed, None
        observation = reset_parts(self._environment.reset(seed=seed))
        envs = self.num_envs
        self._over = np.zeros(envs, bool)
        return dm_env.TimeStep(
            np.full(envs, FIRST, np.int64), np.zeros(envs, np.float32), np.ones(envs, np.float32), observation
        )

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        from gymnasium.vector import SyncVectorEnv

        inner: Any = getattr(self._environment, "unwrapped", None)
        if not isinstance(inner, SyncVectorEnv):
            super().seed_episodes(seeds, envs)  # Raises.
        for env in np.flatnonzero(envs):
            _seed_next_reset(inner.envs[env], int(seeds[env]))

    def step(self, action: Nest) -> dm_env.TimeStep:
        begun = self._over
        if begun is None:  # dm_env: a step before any reset is a reset
            return self.reset()
        result = self._environment.step(action)
        observation, reward, *flags, _ = result if len(result) == 5 else step_parts(result)
        terminated, truncated = map(self._flags, _FLAGS, flags)
        self._over = (terminated | truncated) & ~begun
        if np.count_nonzero(begun) and np.shape(reward) == begun.shape:
            reward = np.where(begun, 0, reward)
        return dm_env.TimeStep(
            step_type=np.where(begun, FIRST, np.where(self._over, LAST, MID)),
            reward=reward,
            discount=1.0 - (terminated & ~begun),
            observation=observation,
        )

    def _flags(self, name: str, value: Any) -> np.ndarray:
        """One flag of each env, bool`[B]`."""
        flags = np.asarray(value)
        if flags.shape != (self.num_envs,):
            found = f"returned {name} of shape {flags.shape}, expected ({self.num_envs},)"
            raise UnexpectedReturn(found, "Return one for each env")
        if flags.dtype != np.bool_:
            flags = np.array([as_flag(f"{name} of env {env}", flag) for env, flag in enumerate(flags)])
        return flags

    def render(self, env: int = 0) -> np.ndarray:
        pictures = self._environment.render()
        if pictures is None:
            raise NotImplementedError(f"{self.name}: make the environment with render_mode='rgb_array'.")
        return np.asarray(pictures[env])

    def close(self) -> None:
        self._environment.close()


def _seed_next_reset(environment: Any, seed: int) -> None:
    """Makes the next `reset`, which a vector environment calls, the one of this seed."""

    def reset(**options: Any) -> Any:
        del environment.reset
        return environment.reset(**{**options, "seed": seed})

    environment.reset = reset
