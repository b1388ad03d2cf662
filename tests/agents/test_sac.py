"""SAC: the losses are those of the papers."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from agent_batches import (
    CENTRE,
    CHOICE,
    CONTINUOUS,
    DISCRETE,
    NUMBERS,
    SCALE,
    VECTOR,
    learn,
    make_learner,
    moved_by,
    transitions,
)
from agent_cases import SMALL
from dm_env import specs as dm_specs

from agents.sac import SAC
from framework.environments.testing import make_spec
from framework.types import Transition

SMALL_SAC = SMALL["sac"].config


@pytest.mark.parametrize(("critics", "of_targets"), [(2, None), (5, None), (5, 2)])
def test_the_continuous_losses_against_a_second_formulation(critics, of_targets):
    changes = {"num_critics": critics, "target_critics": of_targets, "layer_norm": critics > 2}
    config = dataclasses.replace(SMALL_SAC, discount=0.9, initial_temperature=0.5, **changes)
    learner, batch = make_learner(SAC(config), CONTINUOUS), transitions(CONTINUOUS)
    nets, data = learner.networks, Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    state = learner._generator.get_state()

    def draw(observation):
        base = nets.policy(observation).base
        normal = torch.distributions.Normal(base.mean, base.log_std.exp())
        raw = base.mean + base.log_std.exp() * torch.empty(16, 2).normal_(generator=learner._generator)
        squashed = torch.tanh(raw)
        log_prob = (normal.log_prob(raw) - torch.log(1 - squashed**2)).sum(-1)
        return squashed, log_prob

    with torch.no_grad():
        next_action, next_log_prob = draw(data.next_observation)
        rated = list(learner.targets["critics"](data.next_observation, next_action))
        if of_targets:
            lots = torch.empty(critics).normal_(generator=learner._generator).tolist()
            rated = [each for _, each in sorted(zip(lots, rated, strict=True), key=lambda pair: -pair[0])]
        soft = functools.reduce(torch.minimum, rated[:of_targets]) - 0.5 * next_log_prob
        target = data.reward + 0.9 * data.discount * soft
        values = nets.critics(data.observation, (data.action - CENTRE) / SCALE)
        critic = sum(0.5 * ((value - target) ** 2).mean() for value in values)
        action, log_prob = draw(data.observation)
        own = nets.critics(data.observation, action)
        own = own.mean(0) if of_targets else own.amin(0)
        actor = (0.5 * log_prob - own).mean()
        temperature = 0.5 * (-log_prob + 2.0).mean()
    learner._generator.set_state(state)
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic.item(), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor.item(), rel=1e-4)
    assert metrics["loss"].item() == pytest.approx((critic + actor + temperature).item(), rel=1e-4)
    assert metrics["entropy"].item() == pytest.approx(-log_prob.mean().item(), rel=1e-4)


def test_the_discrete_losses_against_a_loop():
    config = dataclasses.replace(SMALL_SAC, discount=0.9, initial_temperature=0.5)
    learner, batch = make_learner(SAC(config), DISCRETE), transitions(DISCRETE)
    nets, data = learner.networks, Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    critic = actor = temperature = 0.0
    with torch.no_grad():
        for i in range(16):
            chances = nets.policy(data.next_observation[i]).logits.softmax(-1)
            rated = learner.targets["critics"](data.next_observation[i])
            soft = sum(chances[a] * (rated[:, a].min() - 0.5 * chances[a].log()) for a in range(3))
            target = data.reward[i] + 0.9 * data.discount[i] * soft
            values = nets.critics(data.observation[i])
            critic += sum(0.5 * (values[c, data.action[i]] - target) ** 2 for c in range(2)) / 16
            chances = nets.policy(data.observation[i]).logits.softmax(-1)
            actor += sum(chances[a] * (0.5 * chances[a].log() - values[:, a].min()) for a in range(3)) / 16
            entropy = -(chances * chances.log()).sum()
            temperature += 0.5 * (entropy - 0.5 * math.log(3)) / 16
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic.item(), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor.item(), rel=1e-4)
    assert metrics["loss"].item() == pytest.approx((critic + actor + temperature).item(), rel=1e-4)


def test_a_delayed_actor_stays_between_its_steps():
    learner = make_learner(SAC(dataclasses.replace(SMALL_SAC, actor_delay=3)), CONTINUOUS)
    moved = ["policy" in moved_by(learner, transitions(CONTINUOUS, seed)) for seed in range(6)]
    assert moved == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("actions", "chosen", "expected"),
    [
        (NUMBERS, None, -2.0),
        (NUMBERS, 1.0, 1.0),
        (dm_specs.BoundedArray((), np.float32, 0, 4), None, -1.0),
        (dm_specs.BoundedArray((2, 3), np.float32, -1, 1), None, -6.0),
        (dm_specs.BoundedArray((3,), np.float32, [-2, 5, 0], [2, 5, 1]), None, -2.0),
        (dm_specs.BoundedArray((3,), np.float32, -1, 1), None, -3.0),
        (CHOICE, None, 0.5 * math.log(3)),
        (CHOICE, 0.7, 0.7),
    ],
)
def test_the_target_entropy_is_that_of_actions_from_minus_one_to_one(actions, chosen, expected):
    config = dataclasses.replace(SMALL_SAC, target_entropy=chosen)
    nets = SAC(config).make_networks(make_spec(VECTOR, actions))
    assert nets.target_entropy == pytest.approx(expected)


CONSTANT = dm_specs.BoundedArray((3,), np.float32, [-2, 5, 0], [2, 5, 1])


def test_a_constant_among_the_actions_changes_nothing():
    """The same as without it, to the last bit."""
    learners = make_learner(SMALL["sac"], CONTINUOUS), make_learner(SMALL["sac"], make_spec(VECTOR, CONSTANT))
    for seed in range(3):
        batch = transitions(CONTINUOUS, seed)
        action = np.insert(batch.data.action, 1, 5.0, axis=1)
        wider = batch._replace(data=batch.data._replace(action=action))
        results = [
            learn(learner, each).metrics for learner, each in zip(learners, (batch, wider), strict=True)
        ]
        assert {name: float(value) for name, value in results[0].items()} == {
            name: float(value) for name, value in results[1].items()
        }


def test_what_networks_do_not_have_is_refused():
    with pytest.raises(
        ValueError, match=r"^dropout: got 0.1, expected less than 1, and 0 with a network other"
    ):
        dataclasses.replace(SMALL_SAC, dropout=0.1, network="simba")


def test_a_fixed_temperature_is_that_of_the_config_after_a_resume():
    saved = make_learner(SAC(dataclasses.replace(SMALL_SAC, temperature=0.3)), CONTINUOUS).save()
    learner = make_learner(SAC(dataclasses.replace(SMALL_SAC, temperature=0.1)), CONTINUOUS)
    learner.restore(saved)
    assert learn(learner, transitions(CONTINUOUS)).metrics["temperature"].item() == pytest.approx(0.1)
