"""Base classes of agents: what policies keep and name, what a config gives, how batches are divided."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from batches import learn
from dm_env import specs as dm_specs
from torch import nn

from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.mpo import MPO, MPOConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.recurrent_td3 import RecurrentTD3, RecurrentTD3Config
from agents.sac import SAC, SACConfig
from agents.td3 import TD3, TD3Config
from agents.td7 import TD7, TD7Config
from framework import networks, replay
from framework.environments.testing import make_spec
from framework.learners import LossOutput
from framework.networks import Actions
from framework.torch_agents import OnPolicyAgent, OnPolicyConfig, TorchPolicy
from framework.types import Step
from framework.variables import VariableBlock, VariableClient

DISCRETE = make_spec()
CONTINUOUS = make_spec(actions=dm_specs.BoundedArray((2,), np.float32, -3.0, 1.0))
AGENTS = {
    "dqn": (DQN(DQNConfig(hidden_sizes=(8,))), DISCRETE, {"q_network"}),
    "r2d2": (R2D2(R2D2Config(hidden_sizes=(8,), lstm_size=8)), DISCRETE, {"q_network"}),
    "recurrent td3": (
        RecurrentTD3(RecurrentTD3Config(hidden_sizes=(8,), lstm_size=8)),
        CONTINUOUS,
        {"memory", "policy"},
    ),
    "mpo": (MPO(MPOConfig(hidden_sizes=(8,))), CONTINUOUS, {"policy"}),
    "sac": (SAC(SACConfig(hidden_sizes=(8,))), CONTINUOUS, {"policy"}),
    "td3": (TD3(TD3Config(hidden_sizes=(8,))), CONTINUOUS, {"policy"}),
    "td7": (TD7(TD7Config(hidden_sizes=(8,))), CONTINUOUS, {"policy"}),
    "impala": (IMPALA(IMPALAConfig(hidden_sizes=(8,))), DISCRETE, {"actor_critic"}),
    "ppo": (PPO(PPOConfig(hidden_sizes=(8,))), DISCRETE, {"normalizer", "encoder", "body", "head"}),
    "ppo with a memory": (
        PPO(PPOConfig(hidden_sizes=(8,), recurrent="lstm")),
        DISCRETE,
        {"normalizer", "encoder", "body", "head", "core"},
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_a_policy_names_the_variables_it_needs_and_no_others(name):
    agent, spec, needed = AGENTS[name]
    torch.manual_seed(0)
    trained, fresh = agent.make_networks(spec), agent.make_networks(spec)
    for parameter in trained.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    policy = agent.make_policy(fresh, evaluation=True)
    assert set(policy.variables) == needed
    untouched = {n: p.clone() for n, p in fresh.named_parameters() if n.split(".")[0] not in needed}
    block = VariableBlock({child: module.state_dict() for child, module in trained.named_children()})
    block.publish(3, {child: module.state_dict() for child, module in trained.named_children()}, 70)
    assert VariableClient(block, fresh, policy).update()
    assert policy.progress == (3, 70)
    for parameter_name, before in untouched.items():
        assert torch.equal(fresh.get_parameter(parameter_name), before)
    observation = np.random.default_rng(0).normal(size=(5, *spec.observations.shape)).astype(np.float32)
    expected = agent.make_policy(trained, evaluation=True)
    acted, wanted = (p.step(observation, p.initial_state(5))[0] for p in (policy, expected))
    np.testing.assert_array_equal(acted, wanted)


class Dropped(TorchPolicy):
    def act(self, observation, state):
        drawn = torch.rand(len(observation), generator=self.random, device=self.device)
        return (self.networks(observation).sum(-1) + drawn > 0.5).long(), {"drawn": drawn}, state


def test_a_policy_is_in_evaluation_mode_and_without_gradients():
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9))
    policy = Dropped(module, Actions(DISCRETE.actions))
    assert not module.training
    observation = np.ones((6, 3), np.float32)
    first, again = (policy.networks(torch.as_tensor(observation)) for _ in range(2))
    assert torch.equal(first, again)
    action, extras, state = policy.step(observation, ())
    assert action.dtype == DISCRETE.actions.dtype and action.shape == (6,) and state == ()
    assert isinstance(extras["drawn"], np.ndarray)


@pytest.mark.parametrize("envs", [1, 6])
def test_extras_may_be_one_tensor(envs):
    class OneTensor(Dropped):
        def act(self, observation, state):
            drawn, _, state = super().act(observation, state)
            return drawn, torch.zeros(envs), state

    policy = OneTensor(nn.Linear(3, 4), Actions(DISCRETE.actions))
    _, extras, _ = policy.step(np.ones((envs, 3), np.float32), ())
    np.testing.assert_array_equal(extras, np.zeros(envs))


def test_random_choices_are_seeded_saved_and_restored():
    policy, other = (Dropped(nn.Linear(3, 4), Actions(DISCRETE.actions)) for _ in range(2))
    observation = np.ones((6, 3), np.float32)

    def drawn(policy):
        return policy.step(observation, ())[1]["drawn"].tolist()

    policy.seed(4)
    other.seed(4)
    assert drawn(policy) == drawn(other)
    saved = policy.save()
    following = drawn(policy)
    other.seed(9)
    assert drawn(other) != following
    other.restore(saved)
    assert drawn(other) == following


class ActorCritic(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.actions = networks.Actions(spec.actions)
        self.policy = networks.MLP(3, (8,), int(spec.actions.num_values))
        self.value = networks.MLP(3, (8,), 1)


class ActorCriticPolicy(TorchPolicy):
    def act(self, observation, state):
        return networks.Categorical(self.networks.policy(observation)).sample(self.random), (), state


class A2C(OnPolicyAgent):
    """Advantage actor-critic with nothing but networks, policy and loss."""

    def __init__(self):
        self.config = OnPolicyConfig(unroll_length=4)

    def make_networks(self, spec):
        return ActorCritic(spec)

    def make_policy(self, networks, evaluation=False):
        return ActorCriticPolicy(networks, networks.actions, ("policy",))

    def loss(self, networks, batch, context):
        data = batch.data
        values = networks.value(data.observation).squeeze(-1)
        error = (data.reward + data.discount * 0.0 - values) * data.mask
        return LossOutput(error.square().mean(), {})


def test_an_on_policy_agent_is_networks_policy_and_loss():
    agent = A2C().for_program(num_envs=6)
    assert (agent.max_policy_lag, agent.unroll_length, agent.items_per_step) == (0, 4, 6)
    client = replay.EmbeddedClient(agent.make_tables(DISCRETE))
    assert client.can_insert("queue", 12)
    torch.manual_seed(0)
    learner = agent.make_learner(agent.make_networks(DISCRETE), DISCRETE)
    shape = (6, 5)
    ones = np.ones(shape, np.float32)
    data = Step(np.ones((*shape, 3), np.float32), np.zeros(shape, np.int64), ones, ones, ones > 1, (), ones)
    losses = [learn(learner, replay.ReplaySample(None, data)).metrics["loss"].item() for _ in range(50)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", AGENTS)
def test_two_learners_take_half_of_a_batch_each(name):
    agent = AGENTS[name][0]
    sizes = []
    for num_learners in (1, 2):
        with mock.patch("framework.torch_agents.Dataset") as dataset:
            agent.for_program(16, num_learners, rank=num_learners - 1).make_dataset(None)
        sizes.append(dataset.call_args.args[2])
    assert sizes[0] == 2 * sizes[1]
    assert agent.num_learners == 1  # a copy was placed
