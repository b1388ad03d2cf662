"""A2C and A3C: the loss against values worked by hand, gradients of workers."""

import dataclasses

import pytest
import torch
from agent_batches import CONTINUOUS, DISCRETE, ENVS, make_learner, unrolls
from agent_cases import SMALL as AGENTS

from agents.a2c import A2C
from agents.ppo import PPOConfig
from examples.flows import PPOPlan
from framework.networks import as_numpy, as_tensors

SMALL = AGENTS["a2c"].config


def learner_and_batch(config, spec=DISCRETE):
    batch = unrolls(A2C(config), spec)
    return make_learner(A2C(config), spec), batch._replace(data=as_tensors(batch.data))


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_the_loss_is_the_sum_of_its_parts_step_by_step(spec):
    changes = {"gae_lambda": 0.8, "entropy_coefficient": 0.05, "value_coefficient": 0.3, "reward_clip": 2.0}
    config = dataclasses.replace(SMALL, **changes)
    learner, batch = learner_and_batch(config, spec)
    networks, data = learner.networks, batch.data
    total = count = 0.0
    policy, values = networks(data.observation)
    log_probs, entropies = policy.log_prob(networks.actions.drawn(data)), policy.entropy()
    for env in range(ENVS):
        advantage = 0.0
        for t in reversed(range(config.unroll_length)):
            if data.mask[env, t] == 0:
                advantage = 0.0
                continue
            next_value = config.discount * data.discount[env, t] * values[env, t + 1].item()
            error = data.reward[env, t].clamp(-2, 2) + next_value - values[env, t].item()
            carried = config.discount * config.gae_lambda * data.discount[env, t] * advantage
            advantage = float(error + carried)
            target = values[env, t].item() + advantage
            total = total - log_probs[env, t] * advantage + 0.3 * 0.5 * (values[env, t] - target) ** 2
            total = total - 0.05 * entropies[env, t]
            count += 1
    result = learner.step(batch)
    assert result.metrics["loss"].item() == pytest.approx((total / count).item(), rel=1e-4)


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_applying_the_gradients_of_another_learner_is_a_step(recurrent):
    config = dataclasses.replace(SMALL, recurrent=recurrent, recurrent_size=8, max_gradient_norm=0.05)
    (alone, batch), (worker, _), (learner, _) = (learner_and_batch(config) for _ in range(3))
    expected = alone.step(batch)
    before = [parameter.clone() for parameter in worker.networks.parameters()]
    gradients = as_tensors(as_numpy(worker.gradients(batch)))  # As they travel.
    assert all(map(torch.equal, before, worker.networks.parameters()))
    learner.steps = 3
    result = learner.apply(gradients)
    for one, other in zip(alone.networks.parameters(), learner.networks.parameters(), strict=True):
        assert torch.equal(one, other)
    assert result.metrics["gradient_norm"] == expected.metrics["gradient_norm"]
    assert (int(result.metrics["gradient_age"]), learner.steps) == (3, 4)


def test_ppo_as_a_plan_has_no_policy_lag():
    with pytest.raises(ValueError, match="max_policy_lag: got 1, expected 0"):
        PPOPlan(PPOConfig(max_policy_lag=1))
