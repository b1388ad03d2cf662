"""Recurrent TD3: the losses are those of a loop, and the memory's part."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, SCALE, apart, learn, make_learner, moved_by, unrolled, unrolls
from agent_cases import SMALL as AGENTS

from agents.recurrent_td3 import RecurrentTD3, RecurrentTD3Networks

SMALL = AGENTS["recurrent_td3"].config


@pytest.mark.parametrize("lstm_size", [6, None], ids=["memory", "no memory"])
def test_the_losses_against_a_loop(lstm_size):
    """With the ends of truncated and of terminated episodes, and n steps from some rows only."""
    config = dataclasses.replace(
        SMALL, lstm_size=lstm_size, prioritized=True, n_step=2, smoothing_std=0.0, actor_delay=1,
        discount=0.9, reward_clip=2.0,
    )  # fmt: skip
    agent = RecurrentTD3(config)
    learner, batch = apart(make_learner(agent, CONTINUOUS)), unrolls(agent, CONTINUOUS)
    nets, targets, data = learner.networks, learner.targets, batch.data
    weights = (config.batch_size * batch.info.probability) ** -config.importance_sampling_exponent
    weights /= weights.max()
    last = data.mask.shape[1] - 1
    critic, actor, count, priorities = 0.0, 0.0, 0, []
    for n in range(config.batch_size):
        with torch.no_grad():
            features, rated = (
                unrolled(memory, data, n, config.burn_in) for memory in (nets.memory, targets["memory"])
            )
            next_values = targets["critics"](rated, targets["policy"](rated)).amin(0)
            values = nets.critics(features, (torch.as_tensor(data.action[n]) - CENTRE) / SCALE)
            own = nets.critics(features, nets.policy(features))[0]
        sizes = []
        for t in range(config.burn_in, last):
            if not data.mask[n, t]:
                continue
            target, factor, row = 0.0, 1.0, t
            while row < min(t + 2, last) and data.mask[n, row]:
                target += factor * float(np.clip(data.reward[n, row], -2, 2))
                factor *= 0.9 * float(data.discount[n, row])
                row += 1
            target += factor * float(next_values[row]) if factor else 0.0
            errors = [target - float(value) for value in values[:, t]]
            critic += weights[n] * 0.5 * sum(error**2 for error in errors)
            actor -= float(own[t])
            sizes.append(np.mean(np.abs(errors)))
            count += 1
        priorities.append(0.9 * max(sizes) + 0.1 * np.mean(sizes) + 1e-6)
    result = learn(learner, batch)
    assert result.metrics["transitions"] == count
    assert result.metrics["critic_loss"].item() == pytest.approx(critic / count, rel=1e-4)
    assert result.metrics["actor_loss"].item() == pytest.approx(actor / count, rel=1e-4, abs=1e-5)
    assert result.priorities.tolist() == pytest.approx(priorities, rel=1e-4)


@pytest.mark.parametrize("frozen", ["learning_rate", "critic_learning_rate"])
def test_the_memory_learns_from_the_critics(frozen):
    agent = RecurrentTD3(dataclasses.replace(SMALL, actor_delay=1, **{frozen: 0.0}))
    moved = moved_by(make_learner(agent, CONTINUOUS), unrolls(agent, CONTINUOUS))
    assert moved == ({"memory", "critics"} if frozen == "learning_rate" else {"policy"})


def test_the_policy_stores_the_state_before_each_step():
    networks = RecurrentTD3Networks(SMALL, CONTINUOUS)
    policy = RecurrentTD3(SMALL).make_policy(networks)
    observation = np.ones((3, 4), np.float32)
    state = policy.initial_state(3)
    _, extras, state = policy.step(observation, state)
    assert not any(part.any() for part in extras["state"])
    after = networks.memory.step(torch.ones(3, 4), networks.memory.initial_state(3))[1]
    _, extras, _ = policy.step(observation, state)
    for part, expected in zip(extras["state"], after, strict=True):
        np.testing.assert_allclose(part, expected.detach().numpy(), rtol=1e-6)
    assert policy.variables == ("memory", "policy")


def test_networks_without_a_memory_are_refused():
    agent = RecurrentTD3(SMALL, lambda c, s: RecurrentTD3Networks(dataclasses.replace(c, lstm_size=None), s))
    with pytest.raises(ValueError, match="networks without a memory and lstm_size 6"):
        agent.make_networks(CONTINUOUS)
