"""Base classes of agents: what policies keep, and what the smallest agent is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agent_batches import DISCRETE, learn, make_learner
from torch import nn

from framework import networks, replay
from framework.learners import LossOutput
from framework.networks import Actions
from framework.torch_agents import OnPolicyAgent, OnPolicyConfig, TorchPolicy
from framework.types import Step


class Dropped(TorchPolicy):
    def act(self, observation, state):
        drawn = torch.rand(len(observation), generator=self.random, device=self.device)
        return (self.networks(observation).sum(-1) + drawn > 0.5).long(), {"drawn": drawn}, state


def test_a_policy_is_in_evaluation_mode_and_without_gradients():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    policy = Dropped(module, Actions(DISCRETE.actions))
    assert not module.training
    observation = np.ones((6, 4), np.float32)
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

    policy = OneTensor(nn.Linear(4, 4), Actions(DISCRETE.actions))
    _, extras, _ = policy.step(np.ones((envs, 4), np.float32), ())
    np.testing.assert_array_equal(extras, np.zeros(envs))


def test_random_choices_are_seeded_saved_and_restored():
    policy, other = (Dropped(nn.Linear(4, 4), Actions(DISCRETE.actions)) for _ in range(2))
    observation = np.ones((6, 4), np.float32)

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
        self.policy = networks.MLP(4, (8,), int(spec.actions.num_values))
        self.value = networks.MLP(4, (8,), 1)


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
    learner = make_learner(agent)
    shape = (6, 5)
    ones = np.ones(shape, np.float32)
    data = Step(np.ones((*shape, 4), np.float32), np.zeros(shape, np.int64), ones, ones, ones > 1, (), ones)
    losses = [learn(learner, replay.ReplaySample(None, data)).metrics["loss"].item() for _ in range(200)]
    assert losses[-1] < 0.5 * losses[0]
