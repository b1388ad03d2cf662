"""CrossQ: its loss against a second formulation, and statistics that go where parameters go."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, DISCRETE, SCALE, learn, make_learner, make_policy, transitions
from agent_cases import SMALL
from torch import nn

from agents.crossq import CrossQ
from framework.types import Transition
from framework.variables import VariableBlock, VariableClient

CONFIG = dataclasses.replace(SMALL["crossq"].config, discount=0.9, initial_temperature=0.5, actor_delay=1)


def with_batch_norm(layers, x, is_batch):
    """The layers with torch's batch norm in place of ours, by the batch or by the running statistics."""
    for layer in layers:
        if hasattr(layer, "variance"):
            running = None if is_batch else (layer.mean, layer.variance)
            x = nn.functional.batch_norm(
                x, *(running or (None, None)), layer.weight, layer.bias, training=is_batch, eps=1e-3
            )
        else:
            x = layer(x)
    return x


def test_the_loss_against_a_second_formulation():
    learner, batch = make_learner(CrossQ(CONFIG), CONTINUOUS), transitions(CONTINUOUS)
    for seed in range(3):  # The running statistics are then other ones than a batch's.
        learn(learner, transitions(CONTINUOUS, seed + 1))
    nets, data = copy.deepcopy(learner.networks), Transition(*map(torch.as_tensor, batch.data[:5]))
    state, temperature = learner._generator.get_state(), nets.temperature.log.exp()

    def draw(observation, is_batch):
        features = with_batch_norm(nets.policy.body.layers, observation, is_batch)
        base = nets.policy.head(features).base
        raw = base.mean + base.log_std.exp() * torch.empty(16, 2).normal_(generator=learner._generator)
        normal = torch.distributions.Normal(base.mean, base.log_std.exp())
        squashed = torch.tanh(raw)
        return squashed, (normal.log_prob(raw) - torch.log(1 - squashed**2)).sum(-1)

    def rate(observation, action, is_batch):
        pairs = torch.cat([observation, action], -1)
        return torch.cat([with_batch_norm(head.layers, pairs, is_batch) for head in nets.critics.heads], -1).T

    with torch.no_grad():
        next_action, next_log_prob = draw(data.next_observation, False)
        taken = (data.action - CENTRE) / SCALE
        both = rate(
            torch.cat([data.observation, data.next_observation]), torch.cat([taken, next_action]), True
        )
        soft = both[:, 16:].amin(0) - temperature * next_log_prob
        critic = 0.5 * ((both[:, :16] - data.reward - 0.9 * data.discount * soft) ** 2).mean(1).sum()
        action, log_prob = draw(data.observation, True)
    learner._generator.set_state(state)
    metrics, before = learn(learner, batch).metrics, nets.state_dict()
    assert metrics["critic_loss"].item() == pytest.approx(critic.item(), rel=1e-4)
    assert metrics["entropy"].item() == pytest.approx(-log_prob.mean().item(), rel=1e-4)
    # The critics' statistics are those of both halves; the policy's loss sees them when they have moved.
    pairs = torch.cat(
        [torch.cat([data.observation, taken], -1), torch.cat([data.next_observation, next_action], -1)]
    )
    moved = learner.networks.state_dict()
    expected = 0.99 * before["critics.heads.0.layers.0.mean"] + 0.01 * pairs.mean(0)
    torch.testing.assert_close(moved["critics.heads.0.layers.0.mean"], expected)
    nets.load_state_dict(
        {n: v if n in dict(nets.named_parameters()) else moved[n] for n, v in before.items()}
    )
    actor = (temperature * log_prob - rate(data.observation, action, False).amin(0)).mean()
    assert metrics["actor_loss"].item() == pytest.approx(actor.item(), rel=1e-4)


def test_it_has_no_targets_and_another_momentum_for_policy_and_critics_only():
    learner = make_learner(CrossQ(CONFIG), CONTINUOUS)
    assert not list(learner.targets.parameters())
    assert [group["betas"][0] for group in learner.optimizer.param_groups] == [0.5, 0.5, 0.9]
    with pytest.raises(ValueError, match="bounded real numbers"):
        CrossQ(CONFIG).make_networks(DISCRETE)


def test_actors_and_checkpoints_have_the_running_statistics():
    agent, observation = CrossQ(CONFIG), np.random.default_rng(0).normal(3.0, 2.0, (5, 4)).astype(np.float32)
    learner = make_learner(agent, CONTINUOUS)
    for seed in range(3):
        learn(learner, transitions(CONTINUOUS, seed))
    policy, block = make_policy(agent, CONTINUOUS, evaluation=True), VariableBlock(learner.parameters())
    block.publish(3, learner.parameters(), 70)
    assert VariableClient(block, policy.networks, policy).update()
    restored = make_learner(agent, CONTINUOUS)
    restored.restore(learner.save())
    found = policy.step(observation, ())[0]
    for source in (learner, restored):
        expected = agent.make_policy(source.networks, evaluation=True).step(observation, ())[0]
        np.testing.assert_array_equal(found, expected)
    with torch.no_grad():
        for layer in learner.networks.policy.body.layers[::3]:
            layer.mean.zero_()
    other = agent.make_policy(learner.networks, evaluation=True).step(observation, ())[0]
    assert np.abs(found - other).max() > 1e-4
