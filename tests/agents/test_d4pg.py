"""D4PG: the loss is that of the paper."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import CENTRE, CONTINUOUS, SCALE, learn, make_learner, project, transitions
from agent_cases import SMALL

from agents.d4pg import D4PG
from framework.types import Transition


@pytest.mark.parametrize("num_critics", [1, 2])
def test_the_losses_against_a_loop(num_critics):
    atoms = {"num_atoms": 5, "v_min": -3.0, "v_max": 2.0}
    changes = {"num_critics": num_critics, "discount": 0.9, "prioritized": True, **atoms}
    config = dataclasses.replace(SMALL["d4pg"].config, **changes)
    learner, batch = make_learner(D4PG(config), CONTINUOUS), transitions(CONTINUOUS)
    nets, targets = learner.networks, learner.targets
    data = Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    atoms = [-3.0, -1.75, -0.5, 0.75, 2.0]
    assert nets.atoms.tolist() == atoms
    critic = actor = 0.0
    divergences = []
    smallest = batch.info.probability.min()

    def mean(probabilities):
        return sum(float(p) * z for p, z in zip(probabilities, atoms, strict=True))

    with torch.no_grad():
        for i in range(16):
            following = targets["critics"](
                data.next_observation[i], targets["policy"](data.next_observation[i])
            )
            following = min(following.softmax(-1), key=mean)
            reward, discount = float(data.reward[i]), 0.9 * float(data.discount[i])
            projected = project(following.tolist(), reward, discount, atoms)
            logits = nets.critics(data.observation[i], (data.action[i] - CENTRE) / SCALE)
            crosses = [
                -sum(q * float(p) for q, p in zip(projected, row, strict=True))
                for row in logits.log_softmax(-1)
            ]
            entropy = -sum(q * np.log(q) for q in projected if q > 0)
            divergences.append(np.mean([cross - entropy for cross in crosses]))
            critic += (smallest / batch.info.probability[i]) ** 0.4 * sum(crosses) / 16
            own = nets.critics(data.observation[i], nets.policy(data.observation[i]))
            actor -= mean(own[0].softmax(-1)) / 16
    result = learn(learner, batch)
    assert result.metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert result.metrics["actor_loss"].item() == pytest.approx(actor, rel=1e-3, abs=1e-5)
    assert result.metrics["kl"].item() == pytest.approx(np.mean(divergences), rel=1e-3)
    assert result.priorities.tolist() == pytest.approx(divergences, rel=1e-3, abs=1e-5)
