"""PPO with a cost critic: advantages and both values against loops, the multiplier, the road, returns."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import COSTS, DISCRETE, learn, make_learner, unrolls
from agent_cases import SMALL as AGENTS

from agents.ppo import PPO, PPOConfig
from agents.ppo_lagrangian import PPOLagrangian
from framework.environments.constrained import WindingRoad

SMALL = dataclasses.replace(AGENTS["ppo_lagrangian"].config, epochs=1, minibatch_size=None)


def of_one_reward(agent, rewards, values):
    """Advantages and targets by PPO, of a batch with these rewards and values `[N, T]`."""
    batch = unrolls(agent, COSTS)
    discounts = agent.config.discount * torch.as_tensor(batch.data.discount)
    mask = torch.as_tensor(batch.data.mask)
    return PPO.estimates(agent, None, rewards, discounts, values, mask)[:2]


def test_the_advantages_are_those_of_the_weighted_rewards():
    config = dataclasses.replace(SMALL, initial_multiplier=0.7, proportional_gain=0.0, integral_gain=0.0)
    agent = PPOLagrangian(config)
    batch, learner = unrolls(agent, COSTS), make_learner(agent, COSTS)
    rewards, costs = (torch.as_tensor(batch.data.reward[name]) for name in ("reward", "cost"))
    with torch.no_grad():
        _, values = learner.networks(torch.as_tensor(batch.data.observation))
    weighted = (values[..., 0] - 0.7 * values[..., 1]) / 1.7
    expected, _ = of_one_reward(agent, (rewards - 0.7 * costs) / 1.7, weighted)
    pairs = zip((rewards, costs), values.unbind(-1), strict=True)
    targets = [of_one_reward(agent, *pair)[1] for pair in pairs]
    seen = {}

    def estimates(networks, *arguments):
        seen["advantages"], seen["targets"], metrics = type(agent).estimates(agent, networks, *arguments)
        return seen["advantages"], seen["targets"], metrics

    agent.estimates = estimates
    learner = make_learner(agent, COSTS)
    metrics = learn(learner, batch).metrics
    torch.testing.assert_close(seen["advantages"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["targets"], torch.stack(targets, -1))
    mask = torch.as_tensor(batch.data.mask).bool()
    errors = (seen["targets"] - values)[mask].double()
    assert float(metrics["value_loss"]) == pytest.approx(float((0.5 * errors**2).mean(0).sum()), rel=1e-5)
    assert float(metrics["multiplier"]) == pytest.approx(0.7)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_multiplier_follows_the_mean_cost_of_real_steps(sign):
    config = dataclasses.replace(SMALL, cost_limit=0.5, proportional_gain=2.0, integral_gain=1.0)
    learner, batch = make_learner(PPOLagrangian(config), COSTS), unrolls(PPOLagrangian(config), COSTS)
    batch.data.reward["cost"][:] = np.where(batch.data.mask > 0, 0.5 + sign * 0.25, np.nan)
    seen = [float(learn(learner, batch).metrics["multiplier"]) for _ in range(3)]
    assert seen == pytest.approx([0.75, 1.0, 1.25] if sign > 0 else [0.0] * 3)


def test_a_memory_learns_both_values():
    config = dataclasses.replace(SMALL, recurrent="gru", recurrent_size=8, value_clip=0.2)
    metrics = learn(make_learner(PPOLagrangian(config), COSTS), unrolls(PPOLagrangian(config), COSTS)).metrics
    assert np.isfinite(float(metrics["loss"]))


def test_rewards_without_a_cost_are_refused():
    with pytest.raises(ValueError, match=r"^rewards: got Array.*expected a dict of reward and cost"):
        PPOLagrangian(SMALL).make_networks(DISCRETE)


def test_the_road_by_hand():
    road = WindingRoad(num_envs=2, seed=0, max_steps=2)
    sine, cosine = road.reset().observation[:, 1:].T.astype(np.float64)
    angle = np.arctan2(sine, cosine)
    ways, types = [0.1, 0.05], []
    for way, acceleration in zip(ways, (3.0, -0.5), strict=True):
        timestep, angle = road.step(np.full((2, 1), acceleration, np.float32)), angle + np.pi / 10 * way
        np.testing.assert_allclose(timestep.reward["reward"], way, rtol=1e-5)
        np.testing.assert_allclose(timestep.reward["cost"], way**2 * (1 + np.sin(angle)) / 2, atol=1e-6)
        types.append(timestep.step_type.tolist())
    assert types == [[1, 1], [2, 2]] and timestep.discount.all() and np.ptp(sine) > 0


def test_the_return_of_an_evaluation_is_the_rewards():
    class Loop:
        def run_episodes(self, num_episodes):
            return {"episode_return": {"reward": np.full(num_episodes, 3.0), "cost": np.ones(num_episodes)}}

    played = PPOLagrangian(SMALL).play(Loop(), None, 4)
    assert played["episode_return"].tolist() == [3.0] * 4 and played["episode_cost"].tolist() == [1.0] * 4


def test_without_a_weight_the_policy_learns_as_ppos():
    """A multiplier that stays 0 gives PPO's advantages."""
    free = dataclasses.replace(SMALL, proportional_gain=0.0, integral_gain=0.0)
    shared = {field.name: getattr(free, field.name) for field in dataclasses.fields(PPOConfig)}
    batch = unrolls(PPOLagrangian(free), COSTS)
    plain = batch._replace(data=batch.data._replace(reward=batch.data.reward["reward"]))
    results = [
        learn(make_learner(PPOLagrangian(free), COSTS), batch).metrics["entropy"],
        learn(make_learner(PPO(PPOConfig(**shared)), DISCRETE), plain).metrics["entropy"],
    ]
    assert float(results[0]) == pytest.approx(float(results[1]), rel=1e-5)


def test_the_best_evaluation_keeps_to_the_limit():
    agent = PPOLagrangian(dataclasses.replace(SMALL, cost_limit=0.1))
    rows = [(90.0, 40.0), (49.0, 10.5), (47.0, 9.9), (40.0, 3.0), (50.0, 10.6)]
    rows = [{"episode_return": paid, "episode_cost": cost, "episode_length": 100.0} for paid, cost in rows]
    ranked = sorted(rows, key=agent.score, reverse=True)
    assert [row["episode_return"] for row in ranked] == [47.0, 40.0, 49.0, 50.0, 90.0]
