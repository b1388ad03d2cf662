"""IMPALA: its loss against a loop; action, reward and state stay together."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import DISCRETE, learn, log_probs_and_values, make_learner, played, unrolls
from agent_cases import SMALL as AGENTS
from dm_env import specs as dm_specs

from agents.impala import IMPALA
from framework import environments, specs
from framework.environments.testing import EchoEnvironment
from framework.networks import as_tensors
from framework.variables import VariableBlock, VariableClient

SMALL = AGENTS["impala"].config
LSTM = {"lstm_size": 6}


PREVIOUS = {"previous_action_and_reward": True}


@pytest.mark.parametrize("clip, reward", [(None, 102.0), (0.5, 0.5)])
def test_the_clipped_reward_is_what_the_policy_sees(clip, reward):
    config = dataclasses.replace(SMALL, previous_action_and_reward=True, reward_clip=clip)
    wrappers = IMPALA(config).environment_wrappers()
    environment = environments.make(EchoEnvironment, options={"first": 1}, wrappers=wrappers)
    environment.reset()
    assert environment.step(np.array([2])).observation["reward"].tolist() == [reward]


def test_several_choices_may_count_from_anywhere_and_have_any_shape():
    low, high = np.array([[1, 5], [0, -1]]), np.array([[2, 7], [0, 1]])
    spec = DISCRETE._replace(actions=dm_specs.BoundedArray((2, 2), np.int32, low, high))
    learner = make_learner(IMPALA(dataclasses.replace(SMALL, clip_rho=1.01, clip_c=1.01)), spec)
    policy = IMPALA(SMALL).make_policy(learner.networks)
    batch = unrolls(IMPALA(SMALL))
    observation = batch.data.observation
    envs, rows = observation.shape[:2]
    action, extras, _ = policy.step(observation.reshape(-1, 4), ())
    assert action.shape == (envs * rows, 2, 2) and action.dtype == np.int32
    assert (action.min(0) == low).all() and (action.max(0) == high).all()
    action[3] = 0  # as in a closing row, though there is no such action
    data = batch.data._replace(
        action=action.reshape(envs, rows, 2, 2),
        extras={name: value.reshape(envs, rows) for name, value in extras.items()},
    )
    data.mask[0, 3] = 0
    metrics = learn(learner, batch._replace(data=data)).metrics
    # The learner sees what was done: all weights are 1.
    assert metrics["rho_clipped"] == metrics["c_clipped"] == 0
    assert metrics["policy_loss"].isfinite()


def test_actions_of_real_numbers_are_learned_as_sampled():
    torch.manual_seed(0)
    agent = IMPALA(SMALL)
    spec = DISCRETE._replace(actions=dm_specs.BoundedArray((2,), np.float32, -0.1, 0.1))
    networks = agent.make_networks(spec)
    policy = agent.make_policy(networks)
    observation = specs.zeros(spec.observations, (6,))
    action, extras, _ = policy.step(observation, policy.initial_state(6))
    assert np.abs(action).max() <= 0.1 < np.abs(extras["action"] * 0.1).max()
    acted, _ = networks.actor_critic.step(as_tensors(observation), policy.initial_state(6))
    log_prob = acted.log_prob(torch.as_tensor(extras["action"]))
    np.testing.assert_allclose(extras["log_prob"], log_prob.detach(), rtol=1e-5)


# --- action, reward and state stay together ---


VARIANTS = {"feed-forward": {}, "lstm": LSTM, "previous": PREVIOUS, "lstm, previous": {**LSTM, **PREVIOUS}}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_learner_gives_every_action_the_probability_that_the_actor_gave_it(changes):
    """Unrolled from the stored state over the ends of episodes, it is where the actor was, step by step."""
    config = dataclasses.replace(SMALL, **changes)
    sample, networks, _ = played(IMPALA(config), EchoEnvironment, 200, episode_length=7)
    data = sample.data
    with torch.no_grad():
        state = tuple(torch.as_tensor(part) for part in data.extras.get("state", ()))
        observation = torch.utils._pytree.tree_map(torch.as_tensor, data.observation)
        policy, _ = networks.actor_critic.unroll(observation, state, torch.as_tensor(data.start_of_episode))
        log_probs = policy.log_prob(torch.as_tensor(data.action)).numpy()
    real = data.mask == 1
    np.testing.assert_allclose(log_probs[real], data.extras["log_prob"][real], atol=1e-5)
    if config.lstm_size:
        assert np.count_nonzero(data.extras["state"][0].any(-1) & real[:, 0]) > 10
        assert data.extras["state"][0].shape == (len(real), config.lstm_size)
        # The test can fail: without the state, or without a new start, the probabilities are others.
        for wrong in (
            (tuple(torch.zeros_like(part) for part in state), torch.as_tensor(data.start_of_episode)),
            (state, torch.zeros(real.shape, dtype=torch.bool)),
        ):
            other = networks.actor_critic.unroll(observation, *wrong)[0]
            other = other.log_prob(torch.as_tensor(data.action)).detach().numpy()
            assert np.abs(other[real] - data.extras["log_prob"][real]).max() > 1e-4


# --- the loss ---


@pytest.mark.parametrize("changes", [{}, LSTM], ids=["feed-forward", "lstm"])
def test_the_loss_against_a_loop(changes):
    config = dataclasses.replace(
        SMALL, **changes, discount=0.9, reward_clip=2.0, entropy_coefficient=0.1, clip_rho=0.8, clip_c=0.7
    )
    learner, batch = make_learner(IMPALA(config)), unrolls(IMPALA(config))
    data, policy_losses, squared_errors, entropies = batch.data, [], [], []
    for n in range(config.batch_size):
        with torch.no_grad():
            log_probs, entropy, values = log_probs_and_values(learner.networks.actor_critic, data, n)
        ratios = np.exp(log_probs - data.extras["log_prob"][n])
        rewards = np.clip(data.reward[n], -2, 2)
        targets = list(values)
        for t in reversed(range(config.unroll_length)):
            if data.mask[n, t]:
                discount = 0.9 * data.discount[n, t]
                delta = min(0.8, ratios[t]) * (rewards[t] + discount * values[t + 1] - values[t])
                goes_on = data.mask[n, t + 1] and t + 1 < config.unroll_length
                ahead = targets[t + 1] - values[t + 1] if goes_on else 0.0
                targets[t] = values[t] + delta + discount * min(0.7, ratios[t]) * ahead
        for t in range(config.unroll_length):
            if data.mask[n, t]:
                discount = 0.9 * data.discount[n, t]
                advantage = min(0.8, ratios[t]) * (rewards[t] + discount * targets[t + 1] - values[t])
                policy_losses.append(-log_probs[t] * advantage)
                squared_errors.append((targets[t] - values[t]) ** 2)
                entropies.append(entropy[t])
    expected = np.mean(policy_losses) + 0.5 * 0.5 * np.mean(squared_errors) - 0.1 * np.mean(entropies)
    metrics = learn(learner, batch).metrics
    assert metrics["loss"].item() == pytest.approx(expected, rel=1e-4)
    assert metrics["transitions"] == len(entropies)
    assert metrics["staleness"] == 2 and metrics["staleness_max"] == 2


def test_staleness_is_counted_in_learner_steps():
    agent, learner = IMPALA(SMALL), make_learner(IMPALA(SMALL))
    networks = agent.make_networks(DISCRETE)
    policy, block = agent.make_policy(networks), VariableBlock(learner.parameters())
    client = VariableClient(block, networks, policy)
    ages = []
    for seed in range(4):
        if seed == 2:
            block.publish(seed, learner.parameters())
            client.update()
        batch = unrolls(agent, seed=seed)
        age = policy.step(np.zeros((1, 4), np.float32), ())[1]["version"]
        batch.data.extras["version"][:] = age
        ages.append(learn(learner, batch).metrics["staleness"].item())
    assert ages == [0, 1, 0, 1]


# --- acting ---


def test_values_are_float32_in_mixed_precision():
    model = make_learner(IMPALA(SMALL)).networks.actor_critic
    torch.nn.init.zeros_(model.value.weight)
    torch.nn.init.constant_(model.value.bias, 90.1)  # bfloat16 has 90 and 90.5.
    data = as_tensors(unrolls(IMPALA(SMALL)).data)
    with torch.autocast("cpu", torch.bfloat16):
        _, values = model.unroll(data.observation, (), data.start_of_episode)
    torch.testing.assert_close(values, torch.full_like(values, 90.1))
    assert values.dtype == torch.float32
