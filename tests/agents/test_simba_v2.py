"""SimBaV2: its loss and the scale of its rewards against a second formulation."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, SCALE, apart, batch_of, learn, make_learner, project
from agent_cases import SMALL

from agents.simba_v2 import SimBaV2
from framework.types import Transition

CONFIG = dataclasses.replace(
    SMALL["simba_v2"].config, discount=0.9, initial_temperature=0.5, num_atoms=7, largest_return=2.0
)
AGENT, ATOMS = SimBaV2(dataclasses.replace(CONFIG, normalize_observations=False)), np.linspace(-2.0, 2.0, 7)


def test_the_loss_against_a_second_formulation():
    learner, batches = (
        apart(make_learner(AGENT, CONTINUOUS)),
        [batch_of(AGENT, CONTINUOUS, n) for n in (0, 1)],
    )
    learn(learner, batches[0])
    nets, targets = copy.deepcopy((learner.networks, learner.targets["critics"]))
    state, temperature = learner._generator.get_state(), nets.temperature.log.exp().detach()
    data = Transition(*map(torch.as_tensor, batches[1].data[:5]), batches[1].data.extras)

    def draw(observation):
        base = nets.policy(observation).base
        raw = base.mean + base.log_std.exp() * torch.empty(16, 2).normal_(generator=learner._generator)
        normal = torch.distributions.Normal(base.mean, base.log_std.exp())
        squashed = torch.tanh(raw)
        return squashed, (normal.log_prob(raw) - torch.log(1 - squashed**2)).sum(-1)

    # Rewards are divided by what the running returns of both batches say.
    returns = np.concatenate(
        [0.9 * each.data.extras["running_return"] + each.data.reward for each in batches]
    ).astype(np.float64)
    assert np.abs(returns).max() > 2.0 * returns.std() + 0.1
    rewards = data.reward / float(max(returns.std(), np.abs(returns).max() / 2.0))
    with torch.no_grad():
        next_action, next_log_prob = draw(data.next_observation)
        next_rates = targets(data.next_observation, next_action).softmax(-1).double().numpy()
        logits = nets.critics(data.observation, (data.action - CENTRE) / SCALE)
        action, log_prob = draw(data.observation)
        values = (nets.critics(data.observation, action).softmax(-1).numpy() * ATOMS).sum(-1)
    critic = 0.0
    for n in range(16):
        chosen = min(next_rates[:, n], key=lambda each: each @ ATOMS)
        discount = 0.9 * float(data.discount[n])
        reward = float(rewards[n]) - discount * float(temperature * next_log_prob[n])
        target = np.array(project(chosen, reward, discount, ATOMS))
        critic -= (target * logits[:, n].log_softmax(-1).double().numpy()).sum() / 16
    learner._generator.set_state(state)
    metrics = learn(learner, batches[1]).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    actor = float((temperature * log_prob).mean()) - values.min(0).mean()
    assert metrics["actor_loss"].item() == pytest.approx(actor, rel=1e-4)
    taken = (logits.softmax(-1).numpy() * ATOMS).sum(-1)
    assert metrics["q_mean"].item() == pytest.approx(taken.mean(), rel=1e-4, abs=1e-6)
    assert nets.target_entropy == -1.0  # Half of two dimensions.
