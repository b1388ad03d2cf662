"""DQN learns with all its real parts in one thread: environment, adder, replay, dataset, learner, client."""

import dm_env
import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from agents.dqn import DQN, DQNConfig
from framework import environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.variables import VariableBlock, VariableClient

LENGTH = 4


class CopyEnvironment(dm_env.Environment):
    """Shows one of three cues at each step; the action that names it earns 1. Truncated or terminated."""

    def __init__(self, truncate, seed=0):
        self._random = np.random.default_rng(seed)
        self._truncate = truncate
        self._left = 0

    def reset(self):
        self._left = LENGTH
        return dm_env.restart(self._show())

    def step(self, action):
        if self._left == 0:
            return self.reset()
        reward = np.float32(int(action) == self._cue)
        self._left -= 1
        if self._left:
            return dm_env.transition(np.float32(reward), self._show(), np.float32(1))
        ends = dm_env.truncation if self._truncate else dm_env.termination
        return ends(np.float32(reward), self._show())

    def _show(self):
        self._cue = int(self._random.integers(3))
        return np.eye(3, dtype=np.float32)[self._cue]

    def observation_spec(self):
        return dm_specs.BoundedArray((3,), np.float32, 0, 1)

    def action_spec(self):
        return dm_specs.DiscreteArray(3)

    def reward_spec(self):
        return dm_specs.Array((), np.float32)

    def discount_spec(self):
        return dm_specs.BoundedArray((), np.float32, 0, 1)


BASE = {
    "hidden_sizes": (32,),
    "batch_size": 32,
    "min_replay_size": 64,
    "learning_rate": 5e-3,
    "discount": 0.9,
    # Squared errors: Huber's loss leans to the median, and the cue does not tell how near the end is.
    "huber_delta": 100.0,
    "epsilon_decay": 464,
    "insert_burst": 32,
    "samples_per_insert": 8.0,
}
VARIANTS = {
    "default, truncated": ({}, True),
    "plain": (
        {
            "n_step": 1,
            "double": False,
            "layer_norm": False,
            "target_update_period": 20,
            "target_update_rate": 1.0,
        },
        False,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_dqn_learns(variant):
    changes, truncate = VARIANTS[variant]
    torch.manual_seed(0)
    config = DQNConfig(**{**BASE, **changes})
    agent = DQN(config)
    environment = environments.make(lambda: CopyEnvironment(truncate), num_envs=4)
    spec = specs.make_environment_spec(environment)
    tables = agent.make_tables(spec)
    tables[0].set_seed(0)
    client = replay.EmbeddedClient(tables, concurrent=False)
    learner = agent.make_learner(agent.make_networks(spec), spec)
    networks = agent.make_networks(spec)
    adder, dataset = agent.make_adder(client, spec), agent.make_dataset(client)
    block = VariableBlock(learner.parameters())
    policy = agent.make_policy(networks)
    client_of_variables = VariableClient(block, networks, policy)
    actor = PolicyActor(policy, adder, client_of_variables, 4, seed=0)
    loop = EnvironmentLoop(environment, actor)
    for _ in range(20_000):
        if actor.ready():
            loop.step()
        elif dataset.ready():
            sample = next(dataset)
            learner.step(sample)
            block.publish(learner.steps, learner.parameters(), loop.num_steps)
        else:
            pytest.fail(f"neither side can continue: {tables[0].info}")
        if learner.steps == 300:
            break
    # The limiter's ratio: each learner step beyond the burst costs batch_size / samples_per_insert items.
    info = tables[0].info.rate_limiter_info
    samples = 300 * config.batch_size
    assert abs(samples - (loop.num_steps - config.min_replay_size) * 8.0) < 2 * 32 * 8 + 0.6 * samples
    assert info.samples_per_insert == 8.0
    actor.update(wait=True)
    greedy = agent.make_policy(networks, evaluation=True)
    actions, _, _ = greedy.step(np.eye(3, dtype=np.float32), ())
    assert actions.tolist() == [0, 1, 2]
    # The truth: each step earns 1, for four steps (terminated) or forever (truncated).
    value = networks.q_network(torch.eye(3)).max(-1).values.mean().item()
    least, most = (6.0, 11.0) if truncate else (1.5, 3.6)
    assert least < value < most
    dataset.close()
