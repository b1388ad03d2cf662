"""A loop that continues from a saved state makes the steps of the saved loop, bit for bit."""

import numpy as np
import pytest
import tree

from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from framework import environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.checkpoints.state import pack, unpack
from framework.variables import VariableBlock, VariableClient

AGENTS = {
    "dqn": lambda: DQN(DQNConfig(hidden_sizes=(8,), n_step=3)),
    "impala, recurrent": lambda: IMPALA(IMPALAConfig(hidden_sizes=(8,), lstm_size=4)),
    "ppo, recurrent": lambda: PPO(PPOConfig(hidden_sizes=(8,), recurrent="lstm", recurrent_size=4)),
}


class Recorder:
    """Keeps what an environment is told."""

    def __init__(self, actor):
        self._actor = actor
        self.actions = []

    def select_action(self, observation):
        self.actions.append(np.array(self._actor.select_action(observation)))
        return self.actions[-1]

    def __getattr__(self, name):
        return getattr(self._actor, name)


def make_loop(agent, seed):
    environment = environments.make("gymnasium:CartPole-v1", num_envs=3, seed=seed)
    spec = specs.make_environment_spec(environment)
    client = replay.EmbeddedClient(agent.make_tables(spec), concurrent=False)
    networks = agent.make_networks(spec)
    policy = agent.make_policy(networks)
    parameters = {name: child.state_dict() for name, child in networks.named_children()}
    block = VariableBlock(parameters)
    block.publish(1, parameters, 0)
    variables = VariableClient(block, networks, policy, update_period=7)
    actor = Recorder(PolicyActor(policy, agent.make_adder(client, spec), variables, num_envs=3, seed=seed))
    return EnvironmentLoop(environment, actor), actor


@pytest.mark.parametrize("at", [0, 30])
@pytest.mark.parametrize("name", AGENTS)
def test_the_same_steps_after_a_restart(name, at):
    agent = AGENTS[name]()
    loop, actor = make_loop(agent, seed=1)
    for _ in range(at):
        loop.step()
    saved = pack(loop.state())
    expected = [loop.step() for _ in range(40)]

    restored, other = make_loop(agent, seed=2)  # other parameters, environments and random numbers
    restored.set_state(unpack(saved))
    actual = [restored.step() for _ in range(40)]
    assert restored.num_steps == loop.num_steps
    np.testing.assert_array_equal(other.actions, actor.actions[-40:])
    for one, two in zip(actual, expected, strict=True):
        assert (one is None) == (two is None)
        tree.map_structure(np.testing.assert_array_equal, one, two)
