"""Small deterministic environments for tests: of users' agents as well as of this library.

All are dm_env environments of one env; `environments.make(EchoEnvironment, num_envs=8)` batches them.
"""

from __future__ import annotations

import time
from typing import Any

import dm_env
import numpy as np
import tree

from framework import specs
from framework.config_checks import whole_number
from framework.types import Nest

_DEFAULT_SPEC = specs.EnvironmentSpec(
    observations=specs.Array((3,), np.float32, name="observation"),
    actions=specs.DiscreteArray(2, dtype=np.int64, name="action"),
    rewards=specs.Array((), np.float32, name="reward"),
    discounts=specs.BoundedArray((), np.float32, 0.0, 1.0, name="discount"),
)


def make_spec(
    observations: Nest | None = None,
    actions: Nest | None = None,
    rewards: Nest | None = None,
    discounts: Nest | None = None,
) -> specs.EnvironmentSpec:
    """An environment spec. Defaults: float32[3] observations, 2 actions, a float32 reward and discount."""
    given = specs.EnvironmentSpec(observations, actions, rewards, discounts)
    return specs.EnvironmentSpec(
        *[other if part is None else part for part, other in zip(given, _DEFAULT_SPEC, strict=True)]
    )


class _Episodes(dm_env.Environment):
    """Episodes of `_length` transitions. A subclass gives the observations and the rewards."""

    _spec: specs.EnvironmentSpec
    _length: int
    _truncate = False
    _time: int | None = None  # transitions of the open episode; None: the next step starts one

    def _observe(self) -> Nest:
        """The next observation."""
        raise NotImplementedError

    def _reward_for(self, action: Any) -> Nest:
        """The reward of the next transition; called before its `_observe`."""
        raise NotImplementedError

    def observation_spec(self) -> Nest:
        return self._spec.observations

    def action_spec(self) -> Nest:
        return self._spec.actions

    def reward_spec(self) -> Nest:
        return self._spec.rewards

    def discount_spec(self) -> Nest:
        return self._spec.discounts

    def seed(self, seed: int) -> None:
        """Makes the next episode begin as the first one of an environment with this seed."""
        self._rng = np.random.default_rng(seed)

    def reset(self) -> dm_env.TimeStep:
        self._time = 0
        return dm_env.restart(self._observe())

    def step(self, action: Any) -> dm_env.TimeStep:
        if self._time is None:
            return self.reset()
        reward = self._reward_for(action)
        self._time += 1
        over, observation = self._time == self._length, self._observe()
        if over:
            self._time = None
        goes_on = not over or self._truncate
        return dm_env.TimeStep(
            step_type=dm_env.StepType.LAST if over else dm_env.StepType.MID,
            reward=tree.map_structure(_fitting, self._spec.rewards, reward),
            discount=tree.map_structure(lambda leaf: _fitting(leaf, float(goes_on)), self._spec.discounts),
            observation=observation,
        )


def _fitting(spec: specs.Array, value: Any) -> Any:
    """An array of the spec's shape and dtype, or a scalar of numpy."""
    return np.full(spec.shape, value, spec.dtype)[()]


class FakeEnvironment(_Episodes):
    """Random observations and rewards within any specs; episodes of a fixed length.

    Two instances with the same arguments give the same sequence, whatever the actions.
    """

    def __init__(
        self,
        spec: specs.EnvironmentSpec | None = None,
        episode_length: int = 5,
        truncate: bool = False,
        seed: int | None = 0,
    ):
        """Makes the environment.

        Args:
          spec: spec of the environment; by default float32[3] observations, 2 actions, float32 rewards.
          episode_length: transitions per episode, at least 1.
          truncate: whether episodes end by truncation (discount 1) instead of termination (discount 0).
          seed: seed of the random numbers.
        """
        self._spec = spec or _DEFAULT_SPEC
        self._length = episode_length
        self._truncate = truncate
        self._rng = np.random.default_rng(seed)

    def _observe(self) -> Nest:
        return self._draw(self._spec.observations)

    def _reward_for(self, action: Nest) -> Nest:
        tree.map_structure(lambda leaf, value: leaf.validate(value), self._spec.actions, action)
        return self._draw(self._spec.rewards)

    def _draw(self, spec: Nest) -> Nest:
        return tree.map_structure(lambda leaf: draw(leaf, self._rng), spec)


def draw(spec: specs.Array, rng: np.random.Generator, batch_shape: tuple[int, ...] = ()) -> np.ndarray:
    """A random value `[*batch_shape, *shape]` within the spec.

    Infinite bounds count as -1 and 1, or as the other bound where that lies beyond.
    """
    shape = (*batch_shape, *spec.shape)
    if spec.dtype.kind in "iub":
        bounds = np.iinfo(spec.dtype) if spec.dtype.kind != "b" else None
        low: Any = getattr(spec, "minimum", max(bounds.min, -100) if bounds else 0)
        high: Any = getattr(spec, "maximum", min(bounds.max, 100) if bounds else 1)
        return rng.integers(low, np.asarray(high, np.int64), shape, endpoint=True).astype(spec.dtype)
    low, high = specs.bounds(spec)
    low = np.where(np.isfinite(low), low, np.minimum(-1.0, high))
    high = np.where(np.isfinite(high), high, np.maximum(1.0, low))
    return (low + (high - low) * rng.random(shape)).astype(spec.dtype)


def draw_action(spec: Nest, rng: np.random.Generator, num_envs: int) -> Nest:
    """Random actions `[B, ...]` for an action spec."""
    return tree.map_structure(lambda leaf: draw(leaf, rng, (num_envs,)), spec)


class EchoEnvironment(_Episodes):
    """The reward encodes the observation and the action that led to it: `100 * observation + action`.

    The observation, float32[1], counts from `first` the time steps (resets too) since the environment
    was made, so no two are alike. A transition that was mixed up on its way to replay is easy to detect.
    """

    def __init__(self, num_actions: int = 4, episode_length: int = 5, truncate: bool = False, first: int = 0):
        self._spec = make_spec(
            specs.Array((1,), np.float32, name="observation"),
            specs.DiscreteArray(num_actions, dtype=np.int64, name="action"),
        )
        self._length = episode_length
        self._truncate = truncate
        self._count = first - 1

    def _observe(self) -> np.ndarray:
        self._count += 1
        return np.array([self._count], np.float32)

    def _reward_for(self, action: int) -> float:
        return 100.0 * self._count + int(action)


class SleepEnvironment(FakeEnvironment):
    """A `FakeEnvironment` whose step takes `step_time` seconds and hardly any CPU time.

    It stands for a slow simulator, so that you can see how a program scales without a core for each actor.
    """

    def __init__(self, step_time: float = 0.005, episode_length: int = 100, seed: int | None = 0):
        if not step_time >= 0:
            raise ValueError(f"step_time: got {step_time!r}, expected at least 0 seconds.")
        super().__init__(episode_length=episode_length, seed=seed)
        self._step_time = step_time

    def step(self, action: Nest) -> dm_env.TimeStep:
        time.sleep(self._step_time)
        return super().step(action)


class MemoryEnvironment(_Episodes):
    """Recall: a cue is shown at the first of `length` steps and must be named at the last.

    Observation float32[num_cues + 1]: the cue as one-hot code at the first time step, zeros later, and
    the elapsed share of the episode. Reward 1 if the last action is the cue, else 0: without a memory a
    policy gets 1 / num_cues on average.
    """

    def __init__(self, length: int = 10, num_cues: int = 2, seed: int | None = None):
        self._length = length
        self._num_cues = num_cues
        self._rng = np.random.default_rng(seed)
        self._spec = make_spec(
            specs.BoundedArray((num_cues + 1,), np.float32, 0.0, 1.0, name="observation"),
            specs.DiscreteArray(num_cues, dtype=np.int64, name="action"),
        )

    def _observe(self) -> np.ndarray:
        observation = np.zeros(self._num_cues + 1, np.float32)
        observation[-1] = (self._time or 0) / self._length
        if self._time == 0:
            self._cue = int(self._rng.integers(self._num_cues))
            observation[self._cue] = 1.0
        return observation

    def _reward_for(self, action: int) -> float:
        return float(self._time == self._length - 1 and int(action) == self._cue)


class MaskedEnvironment(_Episodes):
    """A board of `size` x `size` cells, on which a token moves from a random corner to the opposite one.

    Observation: `board`, the token's and the goal's row and column as one-hot codes, and
    `action_mask`, bool[4], the moves that stay on the board: up, down, left, right. Any other move raises
    ValueError. An episode has as many steps as the shortest way, and each step toward the goal earns its
    share of 1, the best return; a step back costs as much. At its end the mask allows nothing.
    """

    _MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))

    def __init__(self, size: int = 4, truncate: bool = False, seed: int | None = None):
        size = whole_number("size", size, 2)
        self._size, self._length, self._truncate = size, 2 * (size - 1), truncate
        self._rng = np.random.default_rng(seed)
        board = specs.BoundedArray((4 * size,), np.float32, 0.0, 1.0, name="board")
        mask = specs.Array((4,), bool, name="action_mask")
        action = specs.DiscreteArray(4, dtype=np.int64, name="action")
        self._spec = make_spec({"board": board, "action_mask": mask}, action)

    def _legal(self) -> np.ndarray:
        cells = self._cell + np.array(self._MOVES)
        return ((cells >= 0) & (cells < self._size)).all(1) & (self._time != self._length)

    def _observe(self) -> Nest:
        if self._time == 0:
            self._cell = (self._size - 1) * self._rng.integers(2, size=2)
            self._goal = self._size - 1 - self._cell
        board = np.eye(self._size, dtype=np.float32)[[*self._cell, *self._goal]]
        return {"board": board.reshape(-1), "action_mask": self._legal()}

    def _reward_for(self, action: int) -> float:
        if not self._legal()[action]:
            raise ValueError(f"action: got {action}, expected one of {np.flatnonzero(self._legal())}.")
        before = np.abs(self._goal - self._cell).sum()
        self._cell = self._cell + self._MOVES[action]
        return float(before - np.abs(self._goal - self._cell).sum()) / self._length


class TupleEnvironment(_Episodes):
    """Actions are a tuple of a choice for each of `choices`, then numbers in [-1, 1] for each of `numbers`.

    Observation: for each choice the right one as a one-hot code, and for each number the right one. Episodes
    have one step. Each part of the action earns its share of 1, the best return: a choice if it is right,
    and numbers 1 minus their mean distance from it.

    Args:
      choices: for each discrete part, the number of its values.
      numbers: for each continuous part, the number of its entries.
      seed: seed of the random numbers.
    """

    _length = 1

    def __init__(
        self, choices: tuple[int, ...] = (3,), numbers: tuple[int, ...] = (1,), seed: int | None = None
    ):
        self._choices, self._numbers = tuple(choices), tuple(numbers)
        self._rng = np.random.default_rng(seed)
        size = sum(choices) + sum(numbers)
        right = specs.BoundedArray((size,), np.float32, -1.0, 1.0, name="observation")
        parts: list[specs.Array] = [specs.DiscreteArray(n, dtype=np.int64, name="choice") for n in choices]
        parts += [specs.BoundedArray((n,), np.float32, -1.0, 1.0, name="numbers") for n in numbers]
        self._spec = make_spec(right, tuple(parts))

    def _observe(self) -> np.ndarray:
        right = [self._rng.integers(n) for n in self._choices]
        self._right = (*right, *[self._rng.uniform(-1.0, 1.0, n).astype(np.float32) for n in self._numbers])
        shown = [np.eye(n, dtype=np.float32)[index] for n, index in zip(self._choices, right, strict=True)]
        return np.concatenate([*shown, *self._right[len(right) :]])

    def _reward_for(self, action: Nest) -> float:
        parts = list(zip(action, self._right, strict=True))
        choices = [float(given == right) for given, right in parts[: len(self._choices)]]
        numbers = [1.0 - float(np.abs(given - right).mean()) for given, right in parts[len(self._choices) :]]
        return sum(choices + numbers) / len(parts)
