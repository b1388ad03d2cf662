"""C51, QR-DQN and Rainbow: their losses against loops."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import DISCRETE, apart, learn, make_learner, project, transitions
from config_fields import learned

from agents.c51 import C51, C51Config
from agents.dqn import DQN, DQNConfig
from agents.qr_dqn import QRDQN, QRDQNConfig
from agents.rainbow import Rainbow, RainbowConfig
from framework.networks import NoisyLinear

SETTINGS = {"hidden_sizes": (8, 8), "batch_size": 16}


def rows_of(learner, batch, double):
    """For each item: reward, discount, outputs `[K]` of the action and of the target's best next action."""
    networks, target = learner.networks, learner.targets["q_network"]
    with torch.no_grad():
        outputs = networks.q_network(torch.as_tensor(batch.data.observation))
        following = target(torch.as_tensor(batch.data.next_observation))
        chooser = networks.q_network if double else target
        values = networks.expected(chooser(torch.as_tensor(batch.data.next_observation)))
    for i, action in enumerate(batch.data.action):
        best = int(np.argmax([float(value) for value in values[i]]))
        reward, discount = float(batch.data.reward[i]), float(batch.data.discount[i])
        yield reward, discount, outputs[i, action], following[i, best]


@pytest.mark.parametrize("double", [True, False])
def test_the_loss_of_c51_against_a_loop(double):
    config = C51Config(
        **SETTINGS, num_atoms=5, v_min=-3.0, v_max=2.0, discount=0.9, double=double, prioritized=True
    )
    config = dataclasses.replace(config, importance_sampling_exponent=0.0, priority_exponent=0.0)
    agent = C51(config)
    learner, batch = apart(make_learner(agent)), transitions()
    expected, priorities = 0.0, []
    for reward, discount, outputs, following in rows_of(learner, batch, double):
        target = project(following.softmax(-1).tolist(), reward, 0.9 * discount, np.linspace(-3, 2, 5))
        logs = outputs.log_softmax(-1).tolist()
        expected -= sum(p * log for p, log in zip(target, logs, strict=True)) / 16
        priorities.append(sum(p * (np.log(p) - q) for p, q in zip(target, logs, strict=True) if p > 0))
    result = learn(learner, batch)
    assert result.metrics["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert result.metrics["kl"].item() == pytest.approx(np.mean(priorities), rel=1e-4)
    np.testing.assert_allclose(result.priorities, np.array(priorities) + 1e-6, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("double", [True, False])
def test_the_loss_of_qr_dqn_against_a_loop(double):
    config = QRDQNConfig(**SETTINGS, num_quantiles=3, discount=0.9, double=double, huber_delta=0.5)
    agent = QRDQN(config)
    learner, batch = apart(make_learner(agent)), transitions()
    expected = 0.0
    for reward, discount, outputs, following in rows_of(learner, batch, double):
        for k, quantile in enumerate(outputs.tolist()):
            for value in following.tolist():
                error = reward + 0.9 * discount * value - quantile
                huber = 0.5 * error**2 if abs(error) <= 0.5 else 0.5 * (abs(error) - 0.25)
                expected += abs((k + 0.5) / 3 - (error < 0)) * huber / 0.5 / 3 / 16
    assert learn(learner, batch).metrics["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_rainbow_without_its_parts_is_dqn():
    plain = RainbowConfig(**SETTINGS, num_atoms=1, noisy=False, dueling=False, prioritized=False)
    shared = {field.name: getattr(plain, field.name) for field in dataclasses.fields(DQNConfig)}
    dqn = DQN(DQNConfig(**shared))
    np.testing.assert_array_equal(learned(Rainbow(plain), DISCRETE), learned(dqn, DISCRETE))


def test_the_parts_of_rainbow():
    networks = Rainbow().make_networks(DISCRETE)
    q_network = networks.q_network
    assert q_network.value is not None
    assert all(isinstance(each, NoisyLinear) for each in q_network.modules() if hasattr(each, "in_features"))
    assert networks.q_network(torch.zeros(2, 4)).shape == (2, 3, 51)
    values = networks.values(torch.zeros(2, 4))
    assert values.shape == (2, 3) and values.abs().max() < 10.0
