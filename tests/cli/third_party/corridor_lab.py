"""Somebody else's package: an environment, an agent, a factory of it, and a preset."""

import dataclasses

import dm_env
import numpy as np
from dm_env import specs

from agents.dqn import DQN, DQNConfig
from framework.programs import Preset


class Corridor(dm_env.Environment):
    """Reach the right end of `length` cells. Reward 1 there; 20 steps at most."""

    def __init__(self, length: int = 5, seed: int | None = None):
        self._length, self._place, self._steps, self._over = length, 0, 0, True

    def observation_spec(self):
        return specs.BoundedArray((self._length,), np.float32, 0.0, 1.0)

    def action_spec(self):
        return specs.DiscreteArray(2)

    def reset(self):
        self._place, self._steps, self._over = 0, 0, False
        return dm_env.restart(self._observe())

    def step(self, action):
        if self._over:
            return self.reset()
        self._place, self._steps = max(0, self._place + (1 if action else -1)), self._steps + 1
        if self._place == self._length - 1:
            self._over = True
            return dm_env.termination(1.0, self._observe())
        if self._steps == 20:
            self._over = True
            return dm_env.truncation(0.0, self._observe())
        return dm_env.transition(0.0, self._observe())

    def render(self):
        picture = np.zeros((16, 16 * self._length, 3), np.uint8)
        picture[:, 16 * self._place : 16 * (self._place + 1)] = 255
        return picture

    def _observe(self):
        return np.eye(self._length, dtype=np.float32)[self._place]


@dataclasses.dataclass(frozen=True)
class CarefulConfig(DQNConfig):
    hidden_sizes: tuple[int, ...] = (16,)
    min_replay_size: int = 50
    batch_size: int = 16
    samples_per_insert: float = 4.0
    care: float = 0.5  # Subtracted from every reward.


class CarefulDQN(DQN):
    """DQN that sees less reward."""

    def __init__(self, config: CarefulConfig | None = None):
        super().__init__(config or CarefulConfig())


def make_small(config: CarefulConfig | None = None) -> CarefulDQN:
    """A small CarefulDQN."""
    return CarefulDQN(config or CarefulConfig(hidden_sizes=(8,)))


def make_fixed() -> CarefulDQN:
    """A CarefulDQN without settings."""
    return CarefulDQN(CarefulConfig(hidden_sizes=(4,)))


PRESETS = {"corridor_lab:Corridor": Preset(agent={"care": 0.25}, run={"evaluate_period": 150})}
