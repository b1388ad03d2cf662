"""Each way to learn works in a whole program. Nightly runs learn with every agent (results/nightly.py)."""

import dataclasses
import functools

import dm_env
import numpy as np
import pytest
from dm_env import specs as dm_specs

from agents.dqn import DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.rainbow import Rainbow, RainbowConfig
from agents.sac import SAC, SACConfig
from examples.flows import DQNPlan
from framework.environments.testing import MemoryEnvironment

pytestmark = pytest.mark.timeout(600)  # seconds of CPU each, on whatever the machine has to spare


class Aim(dm_env.Environment):
    """Shows a target in [-1, 1]; an action earns 1 minus its distance from it. Episodes of one step."""

    def __init__(self, seed=None):
        self._random = np.random.default_rng(seed)
        self._over = True

    def observation_spec(self):
        return dm_specs.BoundedArray((1,), np.float32, -1, 1)

    def action_spec(self):
        return dm_specs.BoundedArray((1,), np.float32, -1, 1)

    def reset(self):
        self._over = False
        self._target = self._random.uniform(-1, 1, 1).astype(np.float32)
        return dm_env.restart(self._target)

    def step(self, action):
        if self._over:
            return self.reset()
        self._over = True
        return dm_env.termination(1.0 - float(abs(action - self._target).item()), self._target)


# Which of three cues is shown: a policy that does not look gets 1/3.
cue = functools.partial(MemoryEnvironment, length=1, num_cues=3)
recall = functools.partial(MemoryEnvironment, length=2)


REPLAY = {"hidden_sizes": (32,), "batch_size": 32, "min_replay_size": 64, "insert_burst": 32, "n_step": 1}
VALUES = {**REPLAY, "learning_rate": 5e-3, "discount": 0.5, "epsilon_decay": 500, "samples_per_insert": 8.0}
RATES = {"learning_rate": 5e-3, "critic_learning_rate": 5e-3, "temperature_learning_rate": 1e-2}
UNROLLS = {"hidden_sizes": (16,), "unroll_length": 8, "learning_rate": 1e-2, "discount": 0.95}
SEQUENCES = {"unroll_length": 6, "burn_in": 2, "period": 6, "lstm_size": 16, "head_sizes": (16,)}
SEQUENCES |= {"hidden_sizes": (16,), "batch_size": 16, "min_replay_size": 32, "n_step": 2}
SLOW = {"learning_rate": 5e-3, "discount": 0.95, "epsilon_decay": 1_000, "samples_per_insert": 8.0}
r2d2 = R2D2Config(**{**REPLAY, **SEQUENCES, **SLOW})
rainbow = RainbowConfig(**VALUES, v_min=0.0, v_max=2.0, num_atoms=11)
on_policy = PPOConfig(**UNROLLS, epochs=4, minibatch_size=32, recurrent="gru", recurrent_size=16)
sac = SAC(SACConfig(**REPLAY, **RATES, samples_per_insert=8.0, initial_temperature=0.1))
impala = IMPALA(IMPALAConfig(**{**UNROLLS, "learning_rate": 5e-3}, batch_size=8))
# One agent for each way to learn but DQN's, which the main job has: it, the environment, steps, and the
# greedy mean return: least and most.
CASES = {
    "replay, prioritized": (Rainbow(rainbow), cue, 1_200, 1.0, 1.0),
    "replay, numbers": (sac, Aim, 1_200, 0.9, 1.0),
    "a queue": (impala, cue, 1_500, 0.95, 1.0),
    "on-policy, a memory": (PPO(on_policy), recall, 2_000, 0.95, 1.0),
    "sequences": (R2D2(r2d2), recall, 2_000, 0.95, 1.0),
    # Without the memory, a policy that always names the same is right every second time.
    "sequences without a memory": (R2D2(dataclasses.replace(r2d2, lstm_size=None)), recall, 1_200, 0.2, 0.8),
    "a plan": (DQNPlan(DQNConfig(**VALUES)), cue, 1_000, 1.0, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_learns(name, train):
    agent, environment, steps, least, most = CASES[name]
    result, _ = train(agent, environment, steps)
    assert result["env_steps"] == steps
    assert least <= result["episode_return"] <= most
