"""TQC: the targets are the paper's, and its other losses are SAC's."""

import dataclasses

import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, DISCRETE, SCALE, apart, learn, make_learner, transitions
from agent_cases import SMALL

from agents.tqc import TQC
from framework.types import Transition

CONFIG = dataclasses.replace(SMALL["tqc"].config, discount=0.9, initial_temperature=0.5, num_quantiles=4)


@pytest.mark.parametrize(("of_targets", "dropped"), [(None, 1), (None, 0), (2, 3)])
def test_the_loss_against_a_loop(of_targets, dropped):
    agent = TQC(dataclasses.replace(CONFIG, target_critics=of_targets, dropped_quantiles=dropped))
    learner, batch = apart(make_learner(agent, CONTINUOUS)), transitions(CONTINUOUS)
    nets, data = learner.networks, Transition(*map(torch.as_tensor, batch.data[:5]))
    state = learner._generator.get_state()

    def draw(observation):
        noise = torch.empty(16, 2).normal_(generator=learner._generator)
        return nets.policy(observation).rsample_with_log_prob(noise=noise)

    with torch.no_grad():
        next_action, next_log_prob = draw(data.next_observation)
        following, chosen = learner.targets["critics"](data.next_observation, next_action), range(3)
        if of_targets:
            lots = torch.empty(3).normal_(generator=learner._generator)
            chosen = lots.argsort(descending=True)[:of_targets].tolist()
        values = nets.critics(data.observation, (data.action - CENTRE) / SCALE)
        critic = 0.0
        for n in range(16):
            pooled = sorted(value for c in chosen for value in following[c, n].tolist())
            kept = pooled[: len(chosen) * (4 - dropped)]
            for c in range(3):
                for m in range(4):
                    for z in kept:
                        soft = z - 0.5 * next_log_prob[n].item()
                        goal = data.reward[n].item() + 0.9 * data.discount[n].item() * soft
                        error = goal - values[c, n, m].item()
                        size = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                        critic += abs((m + 0.5) / 4 - (error < 0)) * size / (16 * 4 * len(kept))
        action, log_prob = draw(data.observation)
        actor = (0.5 * log_prob - nets.critics(data.observation, action).mean((0, 2))).mean()
    learner._generator.set_state(state)
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor.item(), rel=1e-4)


def test_discrete_actions_are_refused():
    with pytest.raises(ValueError, match="bounded real numbers"):
        TQC(CONFIG).make_networks(DISCRETE)
