"""PQN: its targets and loss against a loop, its networks, and what its batches leave out."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import IMAGES, learn, make_learner, unrolls
from agent_cases import SMALL as AGENTS

from agents.pqn import PQN
from framework.networks import as_tensors

SMALL = AGENTS["pqn"].config


def test_the_first_loss_against_a_loop():
    config = dataclasses.replace(SMALL, epochs=1, minibatch_size=None, trace_lambda=0.6, reward_scale=0.5)
    batch, learner = unrolls(PQN(config)), make_learner(PQN(config))
    data, errors = batch.data, []
    with torch.no_grad():
        values = learner.networks.q_network(torch.as_tensor(data.observation)).double().numpy()
    for n in range(len(values)):
        later = None  # The target of the next row, if it is a transition of the same episode.
        for t in reversed(range(config.unroll_length)):
            if not data.mask[n, t]:
                later = None
                continue
            best = values[n, t + 1].max()
            ahead = best if later is None else 0.4 * best + 0.6 * later
            later = 0.5 * data.reward[n, t] + config.discount * data.discount[n, t] * ahead
            errors.append(later - values[n, t, data.action[n, t]])
    assert set(data.discount[:, :-1][data.mask[:, 1:] == 0].tolist()) == {0.0, 1.0}  # Both kinds of ends.
    metrics = learn(learner, batch).metrics
    assert float(metrics["loss"]) == pytest.approx(0.5 * np.mean(np.square(errors)), rel=1e-5)
    assert int(metrics["rows"]) == len(errors)


def test_rows_that_do_not_count_teach_nothing():
    batch, learners = unrolls(PQN(SMALL)), [make_learner(PQN(SMALL)) for _ in range(2)]
    results = [learn(learners[0], batch).metrics["loss"]]
    batch.data.reward[batch.data.mask == 0] = np.nan
    batch.data.discount[batch.data.mask == 0] = np.nan
    results.append(learn(learners[1], batch).metrics["loss"])
    assert torch.isfinite(results[0]) and torch.equal(*results)


def test_each_layer_of_the_published_network_is_normalized():
    networks = PQN(dataclasses.replace(SMALL, hidden_sizes=())).make_networks(IMAGES)
    layers = [module for module in networks.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert [layer.normalized_shape for layer in layers] == [(32,), (64,), (64,), (512,)]
    images = as_tensors(np.random.default_rng(0).integers(0, 255, (2, 4, 44, 44), np.uint8))
    (convolution, norm), inputs = networks.q_network.encoder.images["0"].layers[:2], images.float() / 255
    pixel = convolution(inputs)[1, :, 3, 5]
    expected = (pixel - pixel.mean()) / (pixel.var(correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(norm(convolution(inputs))[1, :, 3, 5], expected)
