"""DQN: its loss against a loop, and how it explores."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import DISCRETE, apart, learn, make_learner, transitions
from agent_cases import SMALL
from config_fields import explored

from agents.dqn import DQN
from framework.types import Transition
from framework.variables import VariableBlock, VariableClient

SMALL_DQN = SMALL["dqn"].config


def test_the_loss_against_a_loop():
    config = dataclasses.replace(SMALL_DQN, prioritized=True, discount=0.9, max_gradient_norm=None)
    learner, batch = make_learner(DQN(config)), transitions()
    network, target = learner.networks.q_network, learner.targets["q_network"]
    expected, errors = 0.0, []
    weights = (16 * batch.info.probability) ** -config.importance_sampling_exponent
    weights /= weights.max()
    with torch.no_grad():
        for i in range(16):
            row = Transition(*(torch.as_tensor(np.asarray(leaf[i])) for leaf in batch.data[:5]))
            best = network(row.next_observation).argmax()
            bootstrap = 0.9 * row.discount * target(row.next_observation)[best]
            error = float(row.reward + bootstrap - network(row.observation)[row.action])
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            expected += weights[i] * huber / 16
            errors.append(abs(error) + 1e-6)
    result = learn(learner, batch)
    assert result.metrics["loss"].item() == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(result.priorities, errors, rtol=1e-4)


def test_the_munchausen_loss_is_that_of_the_target_networks_policy():
    config = dataclasses.replace(SMALL_DQN, munchausen=0.9, munchausen_temperature=0.5, discount=0.9)
    learner, batch = apart(make_learner(DQN(config))), transitions()
    target = learner.targets["q_network"]
    data = Transition(*(torch.as_tensor(np.asarray(leaf)) for leaf in batch.data[:5]))
    with torch.no_grad():
        values = learner.networks.q_network(data.observation)[range(16), data.action]
        log_policy = (target(data.observation) / 0.5).log_softmax(-1)[range(16), data.action]
        bonus = 0.9 * (0.5 * log_policy).clamp(min=-1.0)
        soft = 0.5 * torch.logsumexp(target(data.next_observation) / 0.5, -1)
        expected = (data.reward + bonus + 0.9 * data.discount * soft - values).abs().mean()
    assert learn(learner, batch).metrics["td_error"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_epsilon_falls_with_the_env_steps_that_come_with_the_parameters():
    config = dataclasses.replace(SMALL_DQN, epsilon_start=0.8, epsilon_end=0.2, epsilon_decay=3000)
    agent, learner = DQN(config), make_learner(DQN(config))
    networks = agent.make_networks(DISCRETE)
    policy, block = agent.make_policy(networks), VariableBlock(learner.parameters())
    client = VariableClient(block, networks, policy)
    observation, seen = np.zeros((2000, 4), np.float32), []
    greedy = agent.make_policy(learner.networks, evaluation=True).step(observation[:1], ())[0]
    for version, env_steps in enumerate((0, 1000, 2000, 9000)):
        block.publish(version, learner.parameters(), env_steps)
        client.update()
        seen.append((policy.step(observation, ())[0] != greedy).mean() * 1.5)
    # A random action is the greedy one in a third of the cases.
    assert seen == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.06)


def test_the_ladder_spreads_epsilon_over_the_envs():
    config = dataclasses.replace(SMALL_DQN, epsilon_start=0.5, epsilon_ladder=7.0)
    rates = (
        explored(DQN(config), DISCRETE) * 1.5
    )  # A random action is the greedy one in a third of the cases.
    assert rates[0] == pytest.approx(0.5, abs=0.1)
    assert rates[1] == pytest.approx(0.5**8, abs=0.03)


def test_a_noisy_network_explores_without_epsilon_and_evaluates_with_the_means():
    agent = DQN(dataclasses.replace(SMALL_DQN, noisy=True))
    networks = agent.make_networks(DISCRETE)
    acting, evaluating = agent.make_policy(networks), agent.make_policy(networks, evaluation=True)
    observation = np.zeros((64, 4), np.float32)
    assert len(set(acting.step(observation, ())[0])) > 1  # Each env has noise of its own.
    first, second = (evaluating.step(observation, ())[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(set(first)) == 1
    for size in (p for name, p in networks.named_parameters() if name.endswith("_noise")):
        size.data.zero_()
    np.testing.assert_array_equal(acting.step(observation, ())[0], first)


@pytest.mark.parametrize("outputs", [2, 4])
def test_a_network_that_does_not_fit_the_actions_is_an_error_in_actor_and_learner(outputs):
    agent = SMALL["dqn"]
    networks = agent.make_networks(DISCRETE)
    networks.q_network = torch.nn.Linear(4, outputs)
    message = rf"shape \(\d+, {outputs}\), expected \(envs, 3\)"
    with pytest.raises(ValueError, match=message):
        agent.make_policy(networks).step(np.zeros((5, 4), np.float32), ())
    with pytest.raises(ValueError, match=message):
        learn(agent.make_learner(networks, DISCRETE), transitions())


def test_the_rate_limiter_leaves_room_for_a_burst_and_a_batch():
    config = dataclasses.replace(SMALL_DQN, samples_per_insert=16.0, insert_burst=64, min_replay_size=100)
    limiter = DQN(config).make_tables(DISCRETE)[0].info.rate_limiter_info
    assert limiter.samples_per_insert == 16.0
    assert limiter.min_size_to_sample == 100
    assert limiter.max_diff - 100 * 16 >= 64 * 16 + config.batch_size
    assert 100 * 16 - limiter.min_diff >= config.batch_size
