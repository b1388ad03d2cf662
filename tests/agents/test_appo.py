"""APPO and IMPACT: the loss against a loop, how often an unroll is drawn."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from agent_batches import DISCRETE, learn, log_probs_and_values, make_learner, unrolls
from agent_cases import SMALL

from agents.appo import APPO
from agents.impact import IMPACT, IMPACTConfig
from framework import adders, replay


@pytest.mark.parametrize("changes", [{}, {"lstm_size": 6}], ids=["feed-forward", "lstm"])
@torch.no_grad()
def test_the_loss_against_a_loop(changes):
    rates = {"learning_rate": 0.05, "entropy_coefficient": 0.1}
    weights = {"discount": 0.9, "vtrace_lambda": 0.8, "clip": 0.1, "clip_target": 1.2}
    bounds = {"reward_clip": 2.0, "clip_rho": 0.8, "clip_c": 0.7, "target_update_period": 3}
    config = dataclasses.replace(SMALL["appo"].config, **changes, **rates, **weights, **bounds)
    agent = APPO(config)
    learner, batch = make_learner(agent), unrolls(agent)
    with torch.enable_grad():
        learn(learner, unrolls(agent, seed=1))  # The networks leave the target network behind.
    data, terms = batch.data, []
    for n in range(config.batch_size):
        log_probs, entropies, values = log_probs_and_values(learner.networks.actor_critic, data, n)
        targets, _, _ = log_probs_and_values(learner.targets["actor_critic"], data, n)
        acting = data.extras["log_prob"][n]
        rhos, carried = np.exp(targets - acting), 0.0
        for t in reversed(range(config.unroll_length)):
            if not data.mask[n, t]:
                carried = 0.0
                continue
            discount = 0.9 * data.discount[n, t]
            error = np.clip(data.reward[n, t], -2, 2) + discount * values[t + 1] - values[t]
            advantage = min(0.8, rhos[t]) * (error + discount * 0.8 * carried)
            carried = min(0.8, rhos[t]) * error + discount * 0.8 * min(0.7, rhos[t]) * carried
            ratio = min(math.exp(acting[t] - targets[t]), 1.2) * math.exp(log_probs[t] - acting[t])
            gain = min(ratio * advantage, np.clip(ratio, 0.9, 1.1) * advantage)
            terms.append(-gain + 0.5 * 0.5 * carried**2 - 0.1 * entropies[t])
    with torch.enable_grad():
        metrics = learn(learner, batch).metrics
    assert metrics["loss"].item() == pytest.approx(np.mean(terms), rel=1e-4)
    assert metrics["kl"] > 0 and 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("uses", [1, 3])
def test_each_unroll_is_drawn_as_often_as_the_config_says(uses):
    agent = APPO(dataclasses.replace(SMALL["appo"].config, samples_per_insert=uses, queue_batches=2))
    client = replay.EmbeddedClient(agent.make_tables(DISCRETE), concurrent=False)
    drawn, inserted, waits = [], 0, 0
    while inserted < 40:
        if client.can_insert(adders.QUEUE_TABLE):
            client.insert(inserted, {adders.QUEUE_TABLE: 1.0})
            inserted += 1
        else:
            waits += 1
            drawn += np.ravel(client.sample_batch(adders.QUEUE_TABLE, agent.config.batch_size).data).tolist()
    while client.can_sample(adders.QUEUE_TABLE, 1):
        drawn += np.ravel(client.sample_batch(adders.QUEUE_TABLE, 1).data).tolist()
    times = np.bincount(drawn, minlength=40)
    assert times.max() == uses and waits > 0
    if uses == 1:
        assert times.min() == 1 and drawn == sorted(drawn)
    else:
        left = agent.config.batch_size * uses / 2  # So that a batch holds hardly any unroll twice.
        assert times.sum() == uses * 40 - left and drawn != sorted(drawn)


def test_a_fast_learner_does_not_draw_the_same_unrolls_again_and_again():
    agent = IMPACT(IMPACTConfig(batch_size=16))
    client = replay.EmbeddedClient(agent.make_tables(DISCRETE), concurrent=False)
    distinct, inserted = [], 0
    while inserted < 1_000:
        for _ in range(8):
            client.insert(inserted, {adders.QUEUE_TABLE: 1.0})
            inserted += 1
        while client.can_sample(adders.QUEUE_TABLE, 16):
            distinct.append(len(np.unique(client.sample_batch(adders.QUEUE_TABLE, 16).data)))
    assert np.mean(distinct) > 14  # 8 if the learner could empty the buffer.
