"""Multi-agent environments of our own."""

from __future__ import annotations

import math

import numpy as np

from framework import specs
from framework.config_checks import whole_number
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment
from framework.environments.fields import FieldChecker
from framework.environments.testing import make_spec
from framework.types import MultiAgentTimeStep, Nest


class MultiAgentCartPole(BatchedEnvironment):
    """Independent CartPoles in one env, one for each agent, as in RLlib's `MultiAgentCartPole`.

    Each is gymnasium's `CartPole-v1`: reward 1 for each step, terminated when the cart leaves ±2.4 or the
    pole ±12 degrees, truncated after `max_episode_steps`. An agent whose pole has fallen waits for the
    others.

    Args:
      num_agents: A. The agents are `agent_0`, `agent_1`, …
      num_envs: B. All envs and agents are computed together, and share one random generator.
      seed: seed of the generator. None: a different one in every run.
      max_episode_steps: steps until an episode is truncated.
    """

    name = "multi_agent:CartPole"

    def __init__(
        self, num_agents: int = 4, num_envs: int = 1, seed: int | None = None, max_episode_steps: int = 500
    ):
        num_agents = whole_number("num_agents", num_agents, 1)
        self.num_envs = num_envs
        self._limit = whole_number("max_episode_steps", max_episode_steps, 1)
        self._names = [f"agent_{index}" for index in range(num_agents)]
        infinity = np.finfo(np.float32).max
        bound = np.array([4.8, infinity, math.radians(24.0), infinity], np.float32)
        one = make_spec(specs.BoundedArray((4,), np.float32, -bound, bound, name="observation"))
        self.spec = specs.EnvironmentSpec(*[dict.fromkeys(self._names, of) for of in one])
        self._check_action = FieldChecker(self.name, "action", self.spec.actions, num_envs)
        self._random = np.random.default_rng(seed)
        self._seeds: dict[int, int] = {}  # By env, its next episode's.
        self._state = np.zeros((num_envs, num_agents, 4))  # Position, velocity, angle, angular velocity.
        self._plays = np.zeros((num_envs, num_agents), bool)
        self._lengths = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, bool)  # Envs whose next step begins an episode.

    def reset(self) -> MultiAgentTimeStep:
        self._over[:] = True
        return self._advance(np.zeros(self._plays.shape))

    def step(self, action: Nest) -> MultiAgentTimeStep:
        arrays = dict(zip(sorted(self._names), self._check_action(action), strict=True))
        return self._advance(np.stack([arrays[name] for name in self._names], 1))

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._seeds.update((int(env), int(seeds[env])) for env in np.flatnonzero(envs))

    def end_episodes(self, envs: np.ndarray) -> None:
        self._over |= envs

    def _advance(self, actions: np.ndarray) -> MultiAgentTimeStep:
        begins, moved = self._over[:, None], self._plays & ~self._over[:, None]
        start = self._random.uniform(-0.05, 0.05, self._state.shape)
        for env in [env for env in self._seeds if self._over[env]]:
            start[env] = np.random.default_rng(self._seeds.pop(env)).uniform(-0.05, 0.05, start[env].shape)
        state = np.where(moved[..., None], _move(self._state, actions), self._state)
        self._state = np.where(begins[..., None], start, state)
        self._lengths = np.where(self._over, 0, self._lengths + 1)
        position, _, angle, _ = np.moveaxis(self._state, -1, 0)
        fell = moved & ((np.abs(position) > 2.4) | (np.abs(angle) > math.radians(12.0)))
        ended = moved & (fell | (self._lengths >= self._limit)[:, None])
        types = np.where(moved, np.where(ended, LAST, MID), FIRST)
        self._plays = begins | (moved & ~ended)
        step_type = np.where(self._over, FIRST, np.where(self._plays.any(1), MID, LAST))
        self._over = step_type == LAST
        seen = self._plays | ended
        return MultiAgentTimeStep(
            step_type,
            self._split(moved.astype(np.float32)),
            self._split(1.0 - fell.astype(np.float32)),
            self._split((self._state * seen[..., None]).astype(np.float32)),
            self._split(types),
        )

    def _split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """`[B, A, ...]` to `[B, ...]` of each agent."""
        return {name: array[:, index] for index, name in enumerate(self._names)}


def _move(state: np.ndarray, action: np.ndarray) -> np.ndarray:
    """One step of gymnasium's CartPole: states `[..., 4]`, actions 0 (left) or 1 (right) `[...]`."""
    position, velocity, angle, spin = np.moveaxis(state, -1, 0)
    gravity, cart, pole, half_length, force, seconds = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    push = np.where(action == 1, force, -force)
    sine, cosine = np.sin(angle), np.cos(angle)
    total = (push + pole * half_length * spin**2 * sine) / (cart + pole)
    turn = (gravity * sine - cosine * total) / (half_length * (4 / 3 - pole * cosine**2 / (cart + pole)))
    thrust = total - pole * half_length * turn * cosine / (cart + pole)
    return np.stack(
        [
            position + seconds * velocity,
            velocity + seconds * thrust,
            angle + seconds * spin,
            spin + seconds * turn,
        ],
        -1,
    )
