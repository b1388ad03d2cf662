"""IQN: its loss against a loop, its network, and its fractions."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import DISCRETE, apart, learn, make_learner, transitions

from agents.iqn import IQN, IQNConfig, stratified
from framework import networks
from framework.learners import LossContext
from framework.types import Transition

Group = collections.namedtuple("Group", "rank size")
SMALL = IQNConfig(hidden_sizes=(8, 8), batch_size=16, num_policy_quantiles=4)


MUNCHAUSEN = {"munchausen": 0.9, "munchausen_temperature": 0.5}
# As Beyond the Rainbow.
ALL = {**MUNCHAUSEN, "prioritized": True, "importance_sampling_exponent": 0.5, "dueling": True, "noisy": True}


@pytest.mark.parametrize("changes", [{}, {"double": False}, MUNCHAUSEN, ALL])
def test_the_loss_against_a_loop(changes):
    config = dataclasses.replace(SMALL, num_quantiles=3, num_target_quantiles=2, discount=0.9, **changes)
    learner, batch = apart(make_learner(IQN(config))), transitions()
    online, target = learner.networks.q_network, learner.targets["q_network"]
    generator = torch.Generator()
    generator.set_state(learner.save()["generator"])
    if config.noisy:
        for network in (online, target):
            networks.redraw_noise(network, lambda *shape: torch.empty(shape).normal_(generator=generator))
    weights = batch.info.probability ** (-0.5 if config.prioritized else 0.0)
    weights /= weights.max()
    # One fraction in each third, and one in each half for the targets.
    drawn = torch.cat([(torch.rand((16, k), generator=generator) + torch.arange(k)) / k for k in (3, 2)], 1)
    even = (torch.arange(4) + 0.5).unsqueeze(0) / 4
    expected = 0.0
    with torch.no_grad():
        for n in range(16):
            row = Transition(*(torch.as_tensor(np.asarray(leaf[n : n + 1])) for leaf in batch.data[:5]))
            following = target(row.next_observation, drawn[n : n + 1, 3:])[0]
            if config.munchausen:
                first, second = (
                    target(each, even).mean(-1)[0] / 0.5 for each in (row.observation, row.next_observation)
                )
                bonus = 0.9 * max(-1.0, 0.5 * float(first.log_softmax(-1)[row.action]))
                policy = second.softmax(-1)
                samples = [float((policy * (following[:, j] - 0.5 * policy.log())).sum()) for j in range(2)]
            else:
                chooser, bonus = (online if config.double else target), 0.0
                samples = following[int(chooser(row.next_observation, even).mean(-1).argmax())].tolist()
            quantiles = online(row.observation, drawn[n : n + 1, :3])[0, int(row.action)].tolist()
            for fraction, quantile in zip(drawn[n, :3].tolist(), quantiles, strict=True):
                for sample in samples:
                    error = float(row.reward) + bonus + 0.9 * float(row.discount) * sample - quantile
                    huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                    expected += weights[n] * abs(fraction - (error < 0)) * huber / 2 / 16
    assert learn(learner, batch).metrics["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"dueling": True}, {"noise": 0.5, "layer_norm": True}])
def test_the_network_gives_each_item_its_own_fractions(changes):
    network = networks.ImplicitQuantileNetwork(DISCRETE.observations, 3, [0.25, 0.75], (8, 8), **changes)
    generator = torch.Generator().manual_seed(0)
    observation, fractions = torch.randn(5, 4, generator=generator), torch.rand(5, 6, generator=generator)
    networks.redraw_noise(network, generator, rows=5)
    made = network(observation, fractions)
    assert made.shape == (5, 3, 6)
    # One fraction after the other is the same.
    for k in range(6):
        torch.testing.assert_close(made[:, :, k], network(observation, fractions[:, k : k + 1]).squeeze(-1))
    assert not torch.allclose(made[:, :, 0], made[:, :, 1])
    # Without fractions it takes its own, in all rows.
    torch.testing.assert_close(
        network(observation), network(observation, torch.tensor([[0.25, 0.75]]).expand(5, 2))
    )


def test_the_embedding_of_a_fraction_is_equation_4():
    network = networks.ImplicitQuantileNetwork(DISCRETE.observations, 1, [0.5], (8,), num_cosines=3)
    weight, bias = network.embedding.weight, network.embedding.bias
    observation, tau = torch.randn(1, 4), 0.3
    cosines = torch.tensor([np.cos(np.pi * i * tau) for i in range(3)], dtype=torch.float32)
    features = observation * (weight @ cosines + bias).relu()  # No hidden layer is before the product.
    torch.testing.assert_close(
        network(observation, torch.tensor([[tau]])).squeeze(-1), network.head(features)
    )


def test_each_of_two_learners_draws_its_half_of_the_fractions_of_one():
    def draw(rank, num_learners):
        group = Group(rank, num_learners) if num_learners > 1 else None
        context = LossContext(None, None, None, torch.Generator().manual_seed(1), group=group)
        items = torch.zeros(16 // num_learners)
        return torch.cat([stratified(items, count, context) for count in (3, 2)], 1)

    alone = draw(0, 1)
    assert torch.equal(torch.cat([draw(0, 2), draw(1, 2)]), alone)
    generator = torch.Generator().manual_seed(1)
    expected = [(torch.arange(k) + torch.rand((16, k), generator=generator)) / k for k in (3, 2)]
    assert torch.equal(alone, torch.cat(expected, 1))  # To the last bit: recorded results stay.


def test_a_risk_rates_actions_by_the_mean_of_their_lowest_quantiles():
    nets = IQN(dataclasses.replace(SMALL, risk=0.4)).make_networks(DISCRETE)
    observation = torch.randn(3, 4)
    lowest = nets.q_network(observation, torch.tensor([[0.05, 0.15, 0.25, 0.35]]))
    torch.testing.assert_close(nets.values(observation), lowest.mean(-1))
