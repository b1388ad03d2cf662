"""TD7: losses, frozen copies and the range of targets are the paper's."""

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import CONTINUOUS, flat, learn, make_learner, transitions
from agent_cases import SMALL

from agents.td7 import TD7
from framework.types import Transition

SMALL_TD7 = SMALL["td7"].config


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def relu(x):
    return np.maximum(x, 0)


def linear(layer, x):
    return layer.weight.detach().double().numpy() @ x + layer.bias.detach().double().numpy()


def layers(module, x, activation, last=False):
    """A network of linear layers, with an activation between them, and behind the last one with `last`."""
    all_layers = [each for each in module.modules() if isinstance(each, torch.nn.Linear)]
    for layer in all_layers:
        x = linear(layer, x)
        if last or layer is not all_layers[-1]:
            x = activation(x)
    return x


def unit(x):
    return x / max(np.mean(np.abs(x)), 1e-8)


def embedded(part, observation, action):
    """z^s and z^sa of one observation and action."""
    state = unit(layers(part.of_features, observation, elu))
    return state, layers(part.of_action, np.concatenate([state, action]), elu)


def act(policy, observation):
    state, _ = embedded(policy.embeddings, observation, np.zeros(2))
    features = unit(linear(policy.features, observation))
    hidden = layers(policy.body, np.concatenate([features, state]), relu, last=True)
    return np.tanh(linear(policy.head.actions, hidden))


def values(critics, observation, action):
    state, both = embedded(critics.embeddings, observation, action)
    result = []
    for features, head in zip(critics.features, critics.heads, strict=True):
        own = unit(linear(features, np.concatenate([observation, action])))
        result.append(float(layers(head, np.concatenate([own, both, state]), elu)[0]))
    return result


@pytest.mark.parametrize("clip", [True, False])
def test_the_losses_against_a_loop(clip):
    """In NumPy, one item at a time, with targets and embeddings that differ from the networks'."""
    config = dataclasses.replace(
        SMALL_TD7, discount=0.9, actor_delay=1, clip_targets=clip, importance_sampling_exponent=0.4
    )
    learner, batch = make_learner(TD7(config), CONTINUOUS), transitions(CONTINUOUS)
    nets, targets = learner.networks, learner.targets
    with torch.no_grad():
        for parameter in targets.parameters():
            parameter += 0.1
        for parameter in nets.embeddings.parameters():
            parameter -= 0.05
        nets.target_range.used.copy_(torch.tensor([0.1, 0.2]))
    state = learner._generator.get_state()
    noise = torch.empty(16, 2).normal_(generator=learner._generator).numpy()
    learner._generator.set_state(state)
    data = Transition(*(np.asarray(leaf, np.float64) for leaf in batch.data[:5]))
    scale, centre = np.array([2.0, 0.5]), np.array([0.0, 0.5])
    smallest, critic, actor, embedding = batch.info.probability.min(), 0.0, 0.0, 0.0
    priorities, seen = [], []
    for i in range(16):
        observation, following = data.observation[i], data.next_observation[i]
        action = (data.action[i] - centre) / scale
        next_action = act(targets["policy"], following) + np.clip(0.2 * noise[i], -0.5, 0.5)
        least = min(values(targets["critics"], following, np.clip(next_action, -1, 1)))
        if clip:
            least = min(max(least, -0.1), 0.2)
        target = data.reward[i] + 0.9 * data.discount[i] * least
        errors = [abs(value - target) for value in values(nets.critics, observation, action)]
        # The authors' form: its gradient is that of Huber's loss, which is 0.5 less beyond 1.
        lap = sum(0.5 * e**2 if e < 1 else e - 0.5 for e in errors)
        critic += (smallest / batch.info.probability[i]) ** 0.4 * lap / 16
        actor -= np.mean(values(nets.critics, observation, act(nets.policy, observation))) / 16
        _, predicted = embedded(nets.embeddings, observation, action)
        embedding += np.mean((predicted - embedded(nets.embeddings, following, action)[0]) ** 2) / 16
        priorities.append(max(*errors, 1.0))
        seen.append(target)
    result = learn(learner, batch)
    assert result.metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert result.metrics["actor_loss"].item() == pytest.approx(actor, rel=1e-3, abs=1e-5)
    assert result.metrics["embedding_loss"].item() == pytest.approx(embedding, rel=1e-4)
    assert result.metrics["loss"].item() == pytest.approx(critic + actor + embedding, rel=1e-4)
    assert result.priorities.tolist() == pytest.approx(priorities, rel=1e-4)
    assert nets.target_range.seen.tolist() == pytest.approx([-min(seen), max(seen)], rel=1e-4)


def test_copies_are_renewed_with_the_targets_which_keep_those_before():
    learner = make_learner(TD7(dataclasses.replace(SMALL_TD7, target_update_period=3)), CONTINUOUS)
    nets, history = learner.networks, []
    for _ in range(8):
        learn(learner, transitions(CONTINUOUS))
        copies = [nets.policy.embeddings, nets.critics.embeddings]
        older = [learner.targets[name].embeddings for name in ("policy", "critics")]
        history.append([flat(module) for module in (nets.embeddings, *copies, *older)])
    first = flat(make_learner(SMALL["td7"], CONTINUOUS).networks.embeddings)
    # Steps count from 1. Copies are renewed at the beginning of steps 4 and 7, targets at the end of 3 and 6.
    expected_copies = [first] * 3 + [history[2][0]] * 3 + [history[5][0]] * 2
    expected_older = [first] * 5 + [history[2][0]] * 3
    for row, copied, older in zip(history, expected_copies, expected_older, strict=True):
        assert torch.equal(row[1], copied) and torch.equal(row[2], copied)
        assert torch.equal(row[3], older) and torch.equal(row[4], older)
    assert not torch.equal(history[2][0], first)


def test_nothing_is_bootstrapped_before_the_first_renewal_and_more_after_each():
    learner = make_learner(
        TD7(dataclasses.replace(SMALL_TD7, target_update_period=2, discount=0.9)), CONTINUOUS
    )
    nets, rewards = learner.networks, torch.as_tensor(transitions(CONTINUOUS).data.reward)
    used = []
    for step in range(4):
        metrics = learn(learner, transitions(CONTINUOUS)).metrics
        if step < 2:
            assert metrics["target_max"] == rewards.max() and metrics["target_min"] == rewards.min()
        used.append(nets.target_range.used.tolist())
    assert used[0] == used[1] == [0.0, 0.0]
    assert used[2] == used[3] == [-rewards.min(), rewards.max()]
    learn(learner, transitions(CONTINUOUS))
    assert all(np.greater_equal(nets.target_range.used.tolist(), used[3]))
