"""BC, CQL, IQL and TD3+BC: their losses by hand."""

import numpy as np
import pytest
import torch

from agents.bc import BC
from agents.cql import CQL, CQLConfig
from agents.iql import IQL, IQLConfig
from agents.td3_bc import TD3BC, TD3BCConfig
from framework import specs
from framework.environments.testing import make_spec
from framework.learners import LossContext
from framework.replay import ReplaySample
from framework.types import Transition

RNG = np.random.default_rng(0)
N = 6
DISCRETE = make_spec(observations=specs.Array((3,), np.float32), actions=specs.DiscreteArray(4))
BOX = specs.BoundedArray((2,), np.float32, -2.0, 2.0)
CONTINUOUS = make_spec(observations=specs.Array((3,), np.float32), actions=BOX)


def batch(spec):
    numbers = lambda *shape: torch.tensor(RNG.normal(size=shape), dtype=torch.float32)  # noqa: E731
    actions = torch.tensor(RNG.integers(4, size=N)) if spec is DISCRETE else numbers(N, 2).clamp(-2, 2)
    discounts = torch.tensor([1.0, 1, 0, 1, 1, 0])
    data = Transition(numbers(N, 3), actions, numbers(N), discounts, numbers(N, 3))
    return ReplaySample(None, data)


def context(targets=None):
    steps = torch.tensor(0)
    return LossContext(targets or {}, steps, steps, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS])
def test_iql_by_hand(spec):
    torch.manual_seed(0)
    agent = IQL(
        IQLConfig(hidden_sizes=(8,), expectile=0.8, temperature=2.0, largest_weight=1.5, discount=0.9)
    )
    networks, target = agent.make_networks(spec), agent.make_networks(spec).critics
    sample = batch(spec)
    data = sample.data
    found = agent.loss(networks, sample, context({"critics": target}))

    def q(critics, row):
        if spec is DISCRETE:
            return critics(data.observation)[:, row, data.action[row]]
        return critics(data.observation, data.action / 2.0)[:, row]

    total = 0.0
    for row in range(N):
        known, value = q(target, row).min().item(), networks.value(data.observation)[row]
        error = known - value
        total = total + (0.8 if error.item() > 0 else 0.2) * error**2
        goal = data.reward[row] + 0.9 * data.discount[row] * networks.value(data.next_observation)[row].item()
        total = total + sum(0.5 * (goal - each) ** 2 for each in q(networks.critics, row))
        weight = min(np.exp(2.0 * error.item()), 1.5)
        distribution = networks.policy(data.observation)
        taken = data.action if spec is DISCRETE else data.action / 2.0
        total = total - weight * distribution.log_prob(taken)[row]
    torch.testing.assert_close(found.loss, total / N)
    gradients = torch.autograd.grad(found.loss, list(networks.parameters()), allow_unused=True)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_td3_bc_by_hand():
    torch.manual_seed(0)
    agent = TD3BC(TD3BCConfig(hidden_sizes=(8,), value_weight=2.0, actor_delay=1, smoothing_std=0.0))
    networks, targets = agent.make_networks(CONTINUOUS), agent.make_networks(CONTINUOUS)
    sample = batch(CONTINUOUS)
    data = sample.data
    found = agent.loss(networks, sample, context({"policy": targets.policy, "critics": targets.critics}))
    following = targets.critics(data.next_observation, targets.policy(data.next_observation)).min(0).values
    goal = (data.reward + 0.99 * data.discount * following).detach()
    critic = 0.5 * (networks.critics(data.observation, data.action / 2.0) - goal).square().sum(0).mean()
    chosen = networks.policy(data.observation)
    value = networks.critics(data.observation, chosen)[0]
    actor = (chosen - data.action / 2.0).square().mean() - 2.0 * value.mean() / value.abs().mean().item()
    torch.testing.assert_close(found.loss, critic + actor)


def test_cql_is_dqn_with_a_penalty():
    torch.manual_seed(0)
    sample = batch(DISCRETE)
    settings = {"hidden_sizes": (8,), "layer_norm": False}
    networks = CQL(CQLConfig(**settings)).make_networks(DISCRETE)
    losses = [
        CQL(CQLConfig(conservative_weight=weight, **settings))
        .loss(networks, sample, context({"q_network": networks.q_network}))
        .loss
        for weight in (0.0, 2.0)
    ]
    values = networks.values(sample.data.observation)
    penalty = torch.nn.functional.cross_entropy(values, sample.data.action)
    torch.testing.assert_close(losses[1] - losses[0], 2.0 * penalty)


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS])
def test_bc_by_hand(spec):
    torch.manual_seed(0)
    networks, sample = BC().make_networks(spec), batch(spec)
    found = BC().loss(networks, sample, context()).loss
    chosen = networks.policy(sample.data.observation)
    if spec is DISCRETE:
        expected = torch.nn.functional.cross_entropy(chosen.logits, sample.data.action)
    else:
        expected = torch.nn.functional.mse_loss(chosen, sample.data.action / 2.0)
    torch.testing.assert_close(found, expected)
