"""Statistics of observations: an agent with them does what one does that sees observations scaled by hand."""

import dataclasses

import numpy as np
import pytest
import torch
import tree
from agent_batches import batch_of, flat, learn, make_learner, make_policy, transitions
from agent_cases import SMALL, spec_of
from dm_env import specs as dm_specs

from agents.apex import ApeX, ApeXConfig
from agents.dqfd import DQfD, DQfDConfig
from framework import specs
from framework.environments.testing import make_spec
from framework.torch_agents import OffPolicyAgent
from framework.types import OneStep
from framework.variables import VariableBlock, VariableClient

NAMES = [name for name, agent in SMALL.items() if isinstance(agent, OffPolicyAgent)]
SCALE, OFFSET = np.array([1e3, 1.0, 1e-3, 1.0], np.float32), np.array([1e4, 0.0, 0.0, -3.0], np.float32)


def with_statistics(agent, value=True):
    return type(agent)(dataclasses.replace(agent.config, normalize_observations=value))


def raw_batches(agent, spec, count=3):
    """Batches of badly scaled observations. Rows of sequences that do not count hold no numbers."""
    for seed in range(count):
        batch = batch_of(agent, spec, seed)
        fields = {f: getattr(batch.data, f) * SCALE + OFFSET for f in observed(batch.data)}
        if hasattr(batch.data, "mask"):
            fields["observation"][:, -1] = np.where(
                batch.data.mask[:, -1, None] > 0, fields["observation"][:, -1], 1e30
            )
        yield batch._replace(data=batch.data._replace(**fields))


def observed(data):
    return [field for field in ("observation", "next_observation") if field in data._fields]


def by_hand(seen, observation):
    """Observations by the statistics of all rows `[n, 4]` in `seen`."""
    rows = np.concatenate(seen).astype(np.float64)
    return ((observation - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8)).clip(-10, 10).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_learning_and_acting_are_those_on_observations_scaled_by_hand(name):
    spec, plain = spec_of(name), with_statistics(SMALL[name], False)
    agent = with_statistics(plain)
    learner, expected, seen = make_learner(agent, spec), make_learner(plain, spec), []
    for batch in raw_batches(plain, spec):
        data = batch.data
        counted = data.mask > 0 if hasattr(data, "mask") else np.ones(len(data.observation), bool)
        seen.append(data.observation[counted])
        scaled = data._replace(**{f: by_hand(seen, getattr(data, f)) for f in observed(data)})
        one, other = learn(learner, batch), learn(expected, batch._replace(data=scaled))
        torch.testing.assert_close(one.priorities, other.priorities, rtol=1e-3, atol=1e-4)
        for metric, value in other.metrics.items():  # Losses are those of the targets.
            assert float(one.metrics[metric]) == pytest.approx(float(value), rel=1e-3, abs=1e-3), metric
    assert not [key for key in learner.targets.state_dict() if "normalizer" in key]
    torch.testing.assert_close(flat(learner.networks), flat(expected.networks), rtol=0, atol=1e-4)

    # An actor gets the statistics by the variables of its policy.
    policies = [make_policy(each, spec, evaluation=True) for each in (agent, plain)]
    for policy, source in zip(policies, (learner, expected), strict=True):
        block = VariableBlock(source.parameters())
        block.publish(3, source.parameters(), 70)
        assert VariableClient(block, policy.networks, policy).update()
    raw = seen[-1][:5]
    actions = [
        policy.step(observation, policy.initial_state(5))[0]
        for policy, observation in zip(policies, (raw, by_hand(seen, raw)), strict=True)
    ]
    np.testing.assert_allclose(*actions, atol=1e-4)


@pytest.mark.parametrize("name", ["r2d2", "recurrent_td3"])
def test_frames_of_sequences_are_stacked_before_they_are_counted(name):
    plain = SMALL[name]
    actions, whole = spec_of(name).actions, dm_specs.Array((2, 4), np.float32)
    stacked = make_spec(specs.StackedArray((2, 4), np.float32), actions)
    results = []
    for spec in (make_spec(whole, actions), stacked):
        batch = batch_of(plain, make_spec(whole, actions))
        if spec is stacked:  # As a `SequenceAdder` stores them: the frames of all rows on one axis.
            batch = batch._replace(
                data=batch.data._replace(
                    observation=batch.data.observation.reshape(len(batch.data.mask), -1, 4)
                )
            )
        learner = make_learner(with_statistics(plain), spec)
        results.append((float(learn(learner, batch).metrics["loss"]), learner.networks.normalizer))
    assert results[0][0] == results[1][0]
    tree.map_structure(
        lambda a, b: torch.testing.assert_close(a, b), *[list(each.buffers()) for _, each in results]
    )


def test_the_observation_after_one_step_is_scaled_too():
    batch, agent = transitions(), with_statistics(DQfD(DQfDConfig(hidden_sizes=(8, 8))))
    data, one = batch.data, batch.data.next_observation + 1.0
    networks = agent.make_networks(spec_of("dqn"))
    networks.normalizer.update(torch.from_numpy(data.observation))
    short = OneStep(data.reward, data.discount, torch.from_numpy(one))
    found = networks.normalizer.records(tree.map_structure(torch.as_tensor, data._replace(extras=short)))
    np.testing.assert_allclose(
        found.extras.next_observation, by_hand([data.observation], one), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(found.extras.reward, data.reward)


def test_workers_of_apex_rate_new_items_by_scaled_observations():
    spec, plain = spec_of("dqn"), ApeX(ApeXConfig(hidden_sizes=(8, 8)))
    agent, (batch,) = with_statistics(plain), raw_batches(SMALL["dqn"], spec, 1)
    torch.manual_seed(0)
    networks = agent.make_networks(spec)
    networks.normalizer.update(torch.from_numpy(batch.data.observation))
    seen = [batch.data.observation]
    scaled = batch.data._replace(**{f: by_hand(seen, getattr(batch.data, f)) for f in observed(batch.data)})
    np.testing.assert_allclose(
        agent.priorities(networks, batch.data), plain.priorities(networks, scaled), rtol=1e-3
    )


def test_pictures_of_bytes_stay_as_they_are():
    spec = make_spec(dm_specs.BoundedArray((4, 44, 44), np.uint8, 0, 255), spec_of("dqn").actions)
    batch = batch_of(SMALL["dqn"], spec)
    losses = [
        float(learn(make_learner(agent, spec), batch).metrics["loss"])
        for agent in (SMALL["dqn"], with_statistics(SMALL["dqn"]))
    ]
    assert losses[0] == losses[1]
