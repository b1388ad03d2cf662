"""PPO: the update against a loop, and acting against learning; see test_ppo_spaces.py."""

import dataclasses
import functools
import unittest.mock

import numpy as np
import pytest
import torch
from agent_batches import CONTINUOUS, DISCRETE, ENVS, learn, make_learner, unrolls
from agent_cases import SMALL as AGENTS
from dm_env import specs as dm_specs
from ppo_programs import play

from agents.ppo import PPO, PPOConfig
from agents.ppo_dqn import PPODQN
from examples.flows import PPOPlan
from framework import environments
from framework.environments.testing import FakeEnvironment, MemoryEnvironment

SMALL = AGENTS["ppo"].config
EPISODES = functools.partial(FakeEnvironment, episode_length=5)


# --- the update ---


@pytest.mark.parametrize("recurrent", [None, "lstm"])
def test_masked_rows_teach_nothing(recurrent):
    config = dataclasses.replace(SMALL, recurrent=recurrent, target_kl=0.01)
    results = []
    for garbage in (0.0, 1e6):
        learner, batch = make_learner(PPO(config)), unrolls(PPO(config))
        masked = batch.data.mask == 0
        masked[:, -1] = False
        batch.data.reward[masked] = garbage
        batch.data.extras["policy"]["logits"][masked] = garbage
        learn(learner, batch)
        results.append(torch.cat([p.detach().flatten() for p in learner.networks.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_the_first_loss_against_a_loop():
    changes = {"epochs": 1, "minibatch_size": 1000, "entropy_coefficient": 0.5, "value_coefficient": 0.7}
    # Half of the decay: the coefficient is 0.5 * (1 + 0.2) / 2 = 0.3.
    changes |= {"entropy_end": 0.2, "learning_rate_decay": 1_000}
    config = dataclasses.replace(SMALL, **changes)
    learner, batch = make_learner(PPO(config)), unrolls(PPO(config))
    learner.env_steps = 500
    nets, data = learner.networks, batch.data
    with torch.no_grad():
        new, values = nets(torch.as_tensor(data.observation))
    advantages, places = {}, []
    for env in range(ENVS):
        following = 0.0
        for t in reversed(range(config.unroll_length)):
            real, next_real = data.mask[env, t], data.mask[env, t + 1] * (t + 1 < config.unroll_length)
            discount = config.discount * data.discount[env, t]
            error = data.reward[env, t] + discount * values[env, t + 1] - values[env, t]
            following = (error + discount * config.gae_lambda * following * next_real) if real else 0.0
            if real:
                advantages[env, t] = float(following)
                places.append((env, t))
    raw = np.array([advantages[place] for place in places])
    normal = (raw - raw.mean()) / raw.std()
    expected = 0.0
    for advantage, unscaled, (env, t) in zip(normal, raw, places, strict=True):
        logits = new.logits[env, t].double().numpy()
        old = data.extras["policy"]["logits"][env, t].astype(float)
        probabilities = np.exp(logits) / np.exp(logits).sum()
        action = data.action[env, t]
        ratio = probabilities[action] / (np.exp(old) / np.exp(old).sum())[action]
        expected -= min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        expected += 0.7 * 0.5 * unscaled**2 + 0.3 * (probabilities * np.log(probabilities)).sum()
    assert float(learn(learner, batch).metrics["loss"]) == pytest.approx(expected / len(places), rel=1e-4)


def test_the_penalty_follows_the_divergence():
    for rate, target, factor in ((1e-6, 0.3, 1 / 1.5), (0.1, 0.001, 1.5)):
        learner = make_learner(PPO(dataclasses.replace(SMALL, target_kl=target, learning_rate=rate)))
        batch = unrolls(PPO(SMALL))
        # What acted is what learns, so that only learning makes a divergence.
        with torch.no_grad():
            logits = learner.networks(torch.as_tensor(batch.data.observation))[0].logits
        batch.data.extras["policy"]["logits"][:] = logits.numpy()
        metrics = learn(learner, batch).metrics
        kl = float(metrics["kl"])
        assert kl < 0.7 * target if factor < 1 else kl > 1.3 * target
        assert float(metrics["kl_coefficient"]) == pytest.approx(factor)
        assert float(learner.networks.kl_coefficient) == pytest.approx(factor)


@pytest.mark.parametrize("recurrent", [None, "lstm"])
@pytest.mark.parametrize("minibatch_size", [8, None])
def test_a_batch_without_real_steps_changes_nothing(minibatch_size, recurrent):
    """Agents that wait for others write such unrolls."""
    normalized = {"normalize_observations": True, "normalize_rewards": True}
    config = dataclasses.replace(SMALL, recurrent=recurrent, minibatch_size=minibatch_size, **normalized)
    learner, batch = make_learner(PPO(config)), unrolls(PPO(config))
    before = {name: value.clone() for name, value in learner.networks.state_dict().items()}
    data = batch.data._replace(mask=np.zeros_like(batch.data.mask))
    metrics = learn(learner, batch._replace(data=data)).metrics
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert all(torch.equal(value, before[name]) for name, value in learner.networks.state_dict().items())
    assert np.isfinite(float(learn(learner, batch).metrics["loss"]))


# --- normalisation ---


def test_statistics_follow_the_data_and_are_part_of_the_state():
    config = dataclasses.replace(SMALL, normalize_observations=True, normalize_rewards=True)
    learner, seen = make_learner(PPO(config)), []
    for seed in range(3):
        batch = unrolls(PPO(config), seed=seed)
        seen.append(batch.data.observation[batch.data.mask > 0])
        learn(learner, batch)
    every = np.concatenate(seen).astype(np.float64)
    moments = learner.networks.normalizer.moments[0]
    np.testing.assert_allclose(moments.mean.numpy(), every.mean(0), rtol=1e-9)
    np.testing.assert_allclose(moments.std().numpy(), every.std(0), rtol=1e-5)


# --- acting and learning fit each other ---


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("lag", [0, 1])
def test_actors_act_with_the_version_they_should(engine, lag):
    config = dataclasses.replace(SMALL, max_policy_lag=lag)
    batches = play(config, functools.partial(FakeEnvironment, episode_length=4), engine)
    assert len(batches) > 5
    for steps, batch, _ in batches:
        data = batch.data
        assert data.mask.shape == (6, config.unroll_length + 1)
        versions = np.asarray(data.extras["version"])[np.asarray(data.mask) > 0]
        if lag:
            # Two actors are not in step: while one hands in its unroll the other may be one ahead.
            assert (versions >= steps - 2).all() and (versions <= steps).all()
        else:
            assert (versions == steps).all()


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("recurrent", [None, "lstm", "gru"])
def test_the_learner_sees_the_policy_that_acted(recurrent, engine):
    config = dataclasses.replace(SMALL, recurrent=recurrent, normalize_observations=True, recurrent_size=8)
    # Episodes end, and unrolls too, at every place; the cue makes a wrong state visible.
    batches = play(config, functools.partial(MemoryEnvironment, length=4, seed=1), engine)
    episodes_end_inside = 0
    for _, batch, parameters in batches:
        real = np.asarray(batch.data.mask) > 0
        acted = np.asarray(batch.data.extras["policy"]["logits"])
        np.testing.assert_allclose(parameters["logits"].numpy()[real], acted[real], atol=1e-5)
        episodes_end_inside += int((~real[:, :-1]).sum())
    assert episodes_end_inside > 5


# --- BatchPPO's options ---


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_a_batch_is_whole_episodes(engine, recurrent):
    """Those of one version of the parameters where all of them end at the same time."""
    config = dataclasses.replace(SMALL, episodes_per_batch=6, recurrent=recurrent, minibatch_size=None)
    batches = play(config, EPISODES, engine)
    assert len(batches) > 7
    for steps, batch, parameters in batches:
        data = batch.data
        assert data.mask.tolist() == 6 * [5 * [1.0] + [0.0]]
        assert data.start_of_episode.tolist() == 6 * [[True] + 5 * [False]]
        assert (data.discount[:, 4] == 0).all() and (data.discount[:, :4] == 1).all()
        real = np.asarray(data.mask) > 0
        assert (np.asarray(data.extras["version"])[real] == steps).all()
        for name, value in parameters.items():
            acted = np.asarray(data.extras["policy"][name])
            np.testing.assert_allclose(value.numpy()[real], acted[real], atol=1e-4)


@pytest.mark.parametrize("inference", ["local", "server", "alternating+server"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_batch_of_other_episodes_than_those_of_one_step(inference, lag):
    """Actors go on when their part of the episodes is done, on which the versions still depend."""
    config = dataclasses.replace(SMALL, episodes_per_batch=4, max_policy_lag=lag, unroll_length=9)
    environment = functools.partial(MemoryEnvironment, length=3)
    batches = play(config, environment, inference=inference, max_env_steps=240)
    assert len(batches) >= 12
    for steps, batch, _ in batches:
        data = batch.data
        assert len(data.mask) == 4
        versions = np.asarray(data.extras["version"])[np.asarray(data.mask) > 0]
        assert (versions >= steps - 2 - lag).all() and (versions <= steps).all()


def test_an_episode_that_is_longer_than_an_unroll_is_an_error():
    config = dataclasses.replace(SMALL, unroll_length=4, episodes_per_batch=4)
    with pytest.raises(Exception, match="unroll_length: got episodes of more than"):
        play(config, EPISODES)


def test_a_value_learning_rate_is_an_optimizer_of_its_own():
    """Without a norm that both share, each part goes the way that it goes with one rate for all."""

    def trained(**changes):
        config = dataclasses.replace(SMALL, max_gradient_norm=None, learning_rate_decay=80, **changes)
        learner = make_learner(PPO(config))
        learner.env_steps = 20
        learn(learner, unrolls(PPO(config)))
        return dict(learner.networks.named_parameters())

    both = trained(learning_rate=1e-3, value_learning_rate=5e-3)
    slow, fast = trained(learning_rate=1e-3), trained(learning_rate=5e-3)
    for name, parameter in both.items():
        alike, unlike = (fast, slow) if name.startswith("value_") else (slow, fast)
        assert torch.equal(parameter, alike[name]) and not torch.equal(parameter, unlike[name])


def test_a_value_learning_rate_needs_layers_of_the_value():
    agent = PPO(dataclasses.replace(SMALL, value_learning_rate=1e-3))
    networks = agent.make_networks(DISCRETE)
    del networks.value_body, networks.value_head
    with pytest.raises(ValueError, match=r"value_learning_rate: got 0\.001, expected None for networks"):
        agent.make_optimizer(networks)


def test_no_minibatch_size_is_one_step_an_epoch_on_all_rows():
    config = dataclasses.replace(SMALL, minibatch_size=None)
    large = dataclasses.replace(SMALL, minibatch_size=10_000)
    whole, large = make_learner(PPO(config)), make_learner(PPO(large))
    for learner in (whole, large):
        steps = learner.optimizer.step
        learner.optimizer.step = unittest.mock.Mock(side_effect=steps)
        learn(learner, unrolls(PPO(SMALL)))
        assert learner.optimizer.step.call_count == SMALL.epochs
    for one, other in zip(whole.networks.parameters(), large.networks.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_tanh_keeps_the_mean_in_the_range_of_the_actions():
    config = dataclasses.replace(SMALL, tanh_mean=True)
    torch.manual_seed(0)
    networks = PPO(config).make_networks(CONTINUOUS)
    torch.nn.init.normal_(networks.head.mean.weight, std=10.0)
    observation = 10 * torch.randn(50, 4)
    policy, _ = networks(observation)
    inside = policy.mean.abs() <= 1
    assert inside.all() and (policy.mean.abs() > 0.99).any()
    torch.testing.assert_close(policy.mean, torch.tanh(networks.head.mean(networks.body(observation))))


@pytest.mark.parametrize(
    "actions",
    [
        dm_specs.Array((2,), np.float32),
        dm_specs.BoundedArray((2,), np.float32, np.finfo(np.float32).min, np.finfo(np.float32).max),
    ],
    ids=["none", "largest"],
)
def test_without_bounds_the_mean_has_no_range(actions):
    spec = CONTINUOUS._replace(actions=actions)
    with pytest.raises(ValueError, match=r"tanh_mean: got True for .*Array.*, expected False"):
        PPO(PPOConfig(tanh_mean=True)).make_networks(spec)
    PPO(PPOConfig()).make_networks(spec)


def test_a_plan_collects_unrolls():
    with pytest.raises(ValueError, match="episodes_per_batch: got 3, expected None for a plan"):
        PPOPlan(PPOConfig(episodes_per_batch=3))
    agent = PPODQN()
    agent.parts["ppo"] = PPO(PPOConfig(episodes_per_batch=3))
    with pytest.raises(ValueError, match="episodes_per_batch: got 3 in policy 'ppo', expected None"):
        agent.sized_parts(environments.make("multi_agent:CartPole").spec, 1)
