"""Ape-X: the priorities of new items, and one exploration rate for each env of a program."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import launch
from agents.apex import ApeX, ApeXConfig, PriorityWorker
from agents.dqn import DQN, DQNConfig
from framework import environments, replay, specs
from framework.actors import PolicyActor
from framework.environments.testing import EchoEnvironment, FakeEnvironment
from framework.flow import Node
from framework.networks import redraw_noise
from framework.programs import RunConfig, make_program
from framework.replay.writer import SHARD_SHIFT
from framework.types import Transition

SPEC = specs.make_environment_spec(environments.make(FakeEnvironment))


def transitions(k):
    generator = np.random.default_rng(0)
    observations = [SPEC.observations.generate_value()[None].repeat(k, 0) for _ in range(2)]
    actions = generator.integers(SPEC.actions.num_values, size=k).astype(SPEC.actions.dtype)
    rewards = generator.normal(size=k).astype(np.float32)
    discounts = generator.choice([0.0, 0.9], size=k).astype(np.float32)
    return Transition(observations[0], actions, rewards, discounts, observations[1], ())


def test_priorities_of_new_items_are_the_errors_of_the_acting_networks():
    agent = ApeX(ApeXConfig(discount=0.9, hidden_sizes=(8,)))
    networks = agent.make_networks(SPEC)
    items = transitions(6)
    priorities = agent.priorities(networks, items)
    with torch.no_grad():
        values = networks.q_network(torch.as_tensor(items.observation))
        best = networks.q_network(torch.as_tensor(items.next_observation)).max(-1).values
    chosen = values[torch.arange(6), torch.as_tensor(items.action).long()]
    targets = torch.as_tensor(items.reward) + 0.9 * torch.as_tensor(items.discount) * best
    np.testing.assert_allclose(priorities, (targets - chosen).abs() + 1e-6, rtol=1e-5)
    assert priorities.dtype == np.float64


def test_the_ladder_goes_over_all_envs_of_a_program():
    """Three actors of two envs have the six rates of one actor of six envs."""
    agent = DQN(DQNConfig(epsilon_ladder=7.0, hidden_sizes=(8,)))
    networks = agent.make_networks(SPEC)

    def rates(envs, offset=0):
        actor = PolicyActor(agent.make_policy(networks), num_envs=envs, offset=offset, total=6)
        actor.observe_first(environments.make(FakeEnvironment, num_envs=envs).reset())
        return actor.state

    together = rates(6)
    np.testing.assert_allclose(together, 1.0 + 7.0 * np.arange(6) / 5)
    np.testing.assert_array_equal(np.concatenate([rates(2, offset) for offset in (0, 2, 4)]), together)


def test_the_oldest_items_leave_replay_first():
    agent = ApeX(ApeXConfig(n_step=1, max_replay_size=20, min_replay_size=1, batch_size=8, hidden_sizes=(8,)))
    environment = environments.make(EchoEnvironment, num_envs=1)
    client = replay.EmbeddedClient(agent.make_tables(SPEC))
    adder = agent.make_adder(client, SPEC)
    adder.add_first(environment.reset())
    for _ in range(59):  # Ten episodes of five transitions; a reset counts as an observation too.
        adder.add(np.zeros(1, np.int64), environment.step(np.zeros(1, np.int64)))
    adder.close()
    seen = {int(each) for each in client.sample_batch("replay", 500).data.observation[:, 0]}
    newest = [count for count in range(60) if count % 6 != 5][-20:]
    assert client.server_info()["replay"].current_size == 20
    assert seen <= {*newest} and len(seen) > 15


def test_workers_are_spread_over_the_shards_of_replay(tmp_path):
    """Each worker writes to one of two servers, and batches are drawn from both."""
    config = RunConfig(
        num_actors=2, replay_shards=2, max_env_steps=300, evaluate_period=300, num_evaluation_episodes=1,
        learner_log_period=1, directory=tmp_path,
    )  # fmt: skip
    settings = {"min_replay_size": 40, "batch_size": 16, "samples_per_insert": 4.0, "insert_burst": 32}
    agent = ApeX(ApeXConfig(**settings, hidden_sizes=(8,), rollout_length=2))
    inserted = []
    agent.loss = _noting(agent.loss, inserted)  # type: ignore[method-assign]
    result = launch.launch(make_program(agent, FakeEnvironment, config), engine="serial")
    assert result["env_steps"] == 300 and result["learner_steps"] > 40
    shards = np.concatenate(inserted)
    assert set(shards) == {0, 1}
    assert 0.3 < (shards == 0).mean() < 0.7  # Items are as likely as if all were in one table.


def _noting(loss, seen):
    def noting(networks, batch, context):
        seen.append((batch.info.key >> np.uint64(SHARD_SHIFT)) & np.uint64(31))
        return loss(networks, batch, context)

    return noting


def test_the_steps_of_a_call_fit_into_the_burst():
    agent = ApeX(ApeXConfig(rollout_length=65)).for_program(num_envs=8)
    with pytest.raises(ValueError, match=r"rollout_length: got 260 .* at most 256, insert_burst"):
        agent.plan([Node(None), Node(None)], None)


def test_priorities_of_noisy_networks_are_those_of_the_means():
    agent = ApeX(ApeXConfig(hidden_sizes=(8,), noisy=True))
    networks, items = agent.make_networks(SPEC), transitions(6)
    expected = agent.priorities(networks, items)
    redraw_noise(networks, torch.Generator().manual_seed(0), 4)  # as the policy of four envs leaves it
    np.testing.assert_array_equal(agent.priorities(networks, items), expected)


def test_new_items_get_their_priorities_while_the_policy_acts_with_noise(monkeypatch):
    """Adders also write in a thread of their own."""
    agent = ApeX(ApeXConfig(hidden_sizes=(8,), noisy=True))
    networks, items = agent.make_networks(SPEC), transitions(6)
    monkeypatch.setattr(agent, "make_adder", lambda client, spec, priority_fn: priority_fn)
    priorities = PriorityWorker.make_adder(SimpleNamespace(agent=agent, networks=networks, spec=SPEC), None)
    redraw_noise(networks, torch.Generator().manual_seed(0), 6)
    observation = torch.as_tensor(items.observation)
    noisy = networks.values(observation)
    before = priorities(items)
    assert torch.equal(networks.values(observation), noisy)
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.mul_(2.0)
    assert (priorities(items) != before).all()  # They follow the parameters.
