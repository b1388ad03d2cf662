"""DroQ: each pass of the critics drops units of its own, by numbers that the learner's generator gives."""

import dataclasses

import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, SCALE, apart, learn, make_learner, transitions
from agent_cases import SMALL
from torch import nn

from agents.droq import DroQ, DroQConfig
from framework.types import Transition

CONFIG = dataclasses.replace(
    SMALL["droq"].config, discount=0.9, initial_temperature=0.5, actor_delay=1, target_critics=None
)


def test_the_loss_against_a_second_formulation():
    learner, batch = apart(make_learner(DroQ(CONFIG), CONTINUOUS)), transitions(CONTINUOUS)
    nets, data, random = (
        learner.networks,
        Transition(*map(torch.as_tensor, batch.data[:5])),
        learner._generator,
    )
    state = random.get_state()

    def draw(observation):
        noise = torch.empty(16, 2).normal_(generator=random)
        return nets.policy(observation).rsample_with_log_prob(noise=noise)

    def rate(critics, observation, action):
        values = []
        for head in critics.heads:
            x = torch.cat([observation, action], -1)
            linears = [layer for layer in head.layers if isinstance(layer, nn.Linear)]
            norms = [layer for layer in head.layers if isinstance(layer, nn.LayerNorm)]
            for linear, norm in zip(linears[:-1], norms, strict=True):
                dropped = torch.empty(16, 8).uniform_(generator=random) < 0.2
                x = norm(linear(x).masked_fill(dropped, 0.0) / 0.8).relu()
            values.append(linears[-1](x).squeeze(-1))
        return torch.stack(values)

    with torch.no_grad():
        next_action, next_log_prob = draw(data.next_observation)
        least = rate(learner.targets["critics"], data.next_observation, next_action).amin(0)
        goal = data.reward + 0.9 * data.discount * (least - 0.5 * next_log_prob)
        values = rate(nets.critics, data.observation, (data.action - CENTRE) / SCALE)
        critic = 0.5 * ((values - goal) ** 2).mean(1).sum()
        action, log_prob = draw(data.observation)
        actor = (0.5 * log_prob - rate(nets.critics, data.observation, action).amin(0)).mean()
        # Outside of a loss, nothing is dropped.
        plain = [nets.critics(data.observation, action) for _ in range(2)]
    assert torch.equal(*plain)
    random.set_state(state)
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic.item(), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor.item(), rel=1e-4)


def test_its_defaults_are_the_papers():
    config = DroQConfig()
    assert DroQ().optimizer_steps(1_000) == 20_000 and config.actor_delay == 20
    made = str(DroQ().make_networks(CONTINUOUS).critics.heads[0])
    assert made.count("Dropout") == made.count("LayerNorm") == 2
