"""A2C and A3C: the loss against values worked by hand, gradients of workers, every field of the config."""

import dataclasses
import functools

import config_fields
import pytest
import torch
from test_ppo import CONTINUOUS, DISCRETE, ENVS, make_batch

from agents.a2c import A2C, A2CConfig
from agents.flow_ppo import FlowPPO
from agents.ppo import PPOConfig
from framework.networks import as_numpy, as_tensors

SMALL = A2CConfig(hidden_sizes=(8, 8), unroll_length=6)


def batch_of(config=SMALL, spec=DISCRETE, seed=0):
    acting = PPOConfig(
        hidden_sizes=config.hidden_sizes,
        unroll_length=config.unroll_length,
        recurrent=config.recurrent,
        recurrent_size=config.recurrent_size,
    )
    batch = make_batch(acting, spec, seed)
    return batch._replace(data=as_tensors(batch.data))


def make_learner(config=SMALL, spec=DISCRETE):
    torch.manual_seed(0)
    agent = A2C(config).for_program(ENVS)
    return agent.make_learner(agent.make_networks(spec), spec)


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_the_loss_is_the_sum_of_its_parts_step_by_step(spec):
    config = dataclasses.replace(SMALL, gae_lambda=0.8, entropy_coefficient=0.05, value_coefficient=0.3)
    learner, batch = make_learner(config, spec), batch_of(config, spec)
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
            error = data.reward[env, t] + next_value - values[env, t].item()
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
    batch = batch_of(config)
    alone, worker, learner = (make_learner(config) for _ in range(3))
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


def learned(config, spec=DISCRETE):
    """Parameters and learning rates after three steps, as one vector."""
    learner, rates = make_learner(config, spec), []
    for seed in range(3):
        learner.env_steps = 30 * seed
        rates.append(float(learner.step(batch_of(config, spec, seed)).metrics["learning_rate"]))
    parameters = [p.detach().flatten() for p in learner.networks.parameters()]
    return torch.cat([torch.tensor(rates), *parameters]).double().numpy()


def network(config, spec=DISCRETE):
    torch.manual_seed(0)
    nets = A2C(config).make_networks(spec)
    return str(nets) + str([p.sum().item() for p in nets.parameters()])


DECAY = {"learning_rate_decay": 40}
# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    "unroll_length": (7, lambda config: A2C(config).unroll_length, {}),
    "gae_lambda": (0.5, learned, {}),
    "normalize_advantages": (True, learned, {}),
    "value_coefficient": (5.0, learned, {}),
    "entropy_coefficient": (1.0, learned, {}),
    "learning_rate_decay": (40, learned, {}),
    "learning_rate_end": (0.5, learned, DECAY),
    "max_gradient_norm": (1e-6, learned, {}),
    "hidden_sizes": ((8,), network, {}),
    "activation": ("relu", network, {}),
    "shared": (True, network, {}),
    "recurrent": ("gru", network, {}),
    "recurrent_size": (16, network, {"recurrent": "lstm"}),
    "autocast": (True, learned, {}),
    "tanh_mean": (True, functools.partial(learned, spec=CONTINUOUS), {}),
    "initial_std": (0.5, functools.partial(network, spec=CONTINUOUS), {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, A2CConfig)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch(PPOConfig(unroll_length=6)))


def test_ppo_as_a_plan_has_no_policy_lag():
    with pytest.raises(ValueError, match="max_policy_lag: got 1, expected 0"):
        FlowPPO(PPOConfig(max_policy_lag=1))
