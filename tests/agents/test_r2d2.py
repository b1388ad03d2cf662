"""R2D2: its loss against a loop; stored states, burn-in and the ends of episodes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from agent_batches import apart, learn, make_learner, played, unrolled, unrolls
from agent_cases import SMALL as AGENTS

from agents.r2d2 import R2D2, R2D2Networks
from framework import losses, networks
from framework.environments.testing import EchoEnvironment
from framework.networks import as_tensors
from framework.types import Step

SMALL = AGENTS["r2d2"].config

# --- the priorities of new sequences ---

VALUES = ((1, 3), (2, 2), (5, 7), (4, 4), (6, 8), (0, 1))  # of the action and of the greedy one, by row


def sequence(discounts, mask):
    values = np.array(VALUES, np.float32) * np.array(mask, np.float32)[:, None]  # None in closing rows
    reward, extras = np.float32([[9, 1, 2, 3, 4, 5]]), {"values": values[None]}
    return Step((), (), reward, np.float32([discounts]), (), extras, np.float32([mask]))


PRIORITIES = {
    # name: (discounts, mask, changes; absolute errors of rows 1 to 4, without those that do not count)
    # Row 1: 1 + 2/2 + 4/4 - 2. Row 2: 2 + 3/2 + 8/4 - 5. Row 3: 3 + 4/2 + 1/4 - 4. Row 4: 4 + 1/2 - 6.
    "an episode that goes on": ((1,) * 6, (1,) * 6, {}, (1, 0.5, 1.25, 1.5)),
    # Rows 3 and 4 are the last of an episode and its closing row. Row 2: 2 + 3/2 - 5. Row 3: 3 - 4.
    "terminated": ((1, 1, 1, 0, 0, 1), (1, 1, 1, 1, 0, 1), {}, (1, 1.5, 1)),
    # The closing row has the value of row 3. Row 2: 2 + 3/2 + 4/4 - 5. Row 3: 3 + 4/2 - 4.
    "truncated": ((1, 1, 1, 1, 0, 1), (1, 1, 1, 1, 0, 1), {}, (1, 0.5, 1)),
    # Row 1: 1 + 2/2 + 4/4 - 2. Row 2: 2 + 2/2 + 8/4 - 5. Row 3: 2 + 2/2 + 1/4 - 4. Row 4: 2 + 1/2 - 6.
    "clipped rewards": ((1,) * 6, (1,) * 6, {"reward_clip": 2.0}, (1, 0, 0.75, 3.5)),
}


@pytest.mark.parametrize("name", PRIORITIES)
def test_actors_compute_priorities_by_hand(name):
    discounts, mask, changes, errors = PRIORITIES[name]
    settings = {"burn_in": 1, "unroll_length": 4, "n_step": 2, "discount": 0.5, "rescale_values": False}
    agent = R2D2(dataclasses.replace(SMALL, actor_priorities=True, **settings, **changes))
    expected = 0.9 * max(errors) + 0.1 * np.mean(errors)
    np.testing.assert_allclose(agent.initial_priorities(sequence(discounts, mask)), [expected], rtol=1e-5)


@pytest.mark.parametrize("targets", ["n_step", "watkins", "peng"])
def test_actors_compute_the_priorities_of_a_learner_with_their_parameters(targets):
    config = dataclasses.replace(SMALL, actor_priorities=True, targets=targets, epsilon_start=0.3)
    sample, nets, _ = played(R2D2(config), EchoEnvironment, 300, episode_length=7)
    data = as_tensors(sample.data)
    errors, counted, _ = R2D2(config).errors(nets.q_network, nets.q_network, data)
    expected = networks.as_numpy(losses.sequence_priorities(errors, counted, config.priority_eta)) + 1e-6
    assert len(set(expected.tolist())) > 5
    np.testing.assert_allclose(sample.info.priority, expected, rtol=1e-4, atol=1e-5)


# --- what is stored, and where it is learned from ---


class CountingCore(networks.RecurrentCore):
    """Its state and its output are the number of rows since the episode began."""

    def step(self, inputs, state):
        count = state[0] + 1.0
        return count, (count, state[1])


def counting(config, spec):
    nets = R2D2Networks(config, spec)
    nets.q_network.core = CountingCore(nets.q_network.torso.output_size, config.lstm_size)
    nets.q_network.head = torch.nn.Identity()
    return nets


@pytest.mark.parametrize("burn_in", [0, 3, 9])
def test_the_stored_state_is_that_before_the_first_row_and_counts_on_through_burn_in_and_episodes(burn_in):
    config = dataclasses.replace(SMALL, burn_in=burn_in, lstm_size=4)  # As many counts as actions.
    sample, nets, _ = played(R2D2(config, counting), EchoEnvironment, 300, episode_length=7)
    data = sample.data
    # Observations count the rows of an env, from 0. An episode has seven steps, thus eight rows.
    time = data.observation[..., 0] % 8
    stored = data.extras["state"][0]
    assert stored.shape == (len(time), config.lstm_size) and len(time) > 20
    # The state at a closing row is not kept: nothing that is learned depends on it.
    np.testing.assert_array_equal(stored[:, 0], time[:, 0] % 7)
    rows = as_tensors((data.observation, data.extras["state"], data.start_of_episode))
    counts = nets.q_network.unroll(*rows, burn_in)
    assert counts.shape[1] == config.unroll_length + 1
    counts, expected = counts[..., 0].detach().numpy(), time[:, burn_in:] + 1
    if burn_in == 0:
        counts, expected = counts[time[:, 0] < 7], expected[time[:, 0] < 7]
    np.testing.assert_array_equal(counts, expected)
    # The closing row is the eighth; no other has a mask of 0.
    np.testing.assert_array_equal(data.mask == 0, time == 7)


@pytest.mark.parametrize("truncate", [False, True], ids=["terminated", "truncated"])
def test_rewards_tell_the_observation_and_action_of_their_row(truncate):
    config = dataclasses.replace(SMALL, previous_action_and_reward=True)
    data = played(R2D2(config), EchoEnvironment, 300, episode_length=7, truncate=truncate)[0].data
    real, observation = data.mask == 1, data.observation
    np.testing.assert_array_equal(
        data.reward[real], (100 * observation["observation"][..., 0] + data.action)[real]
    )
    follows = real[:, :-1]
    np.testing.assert_array_equal(observation["action"][:, 1:][follows], data.action[:, :-1][follows])
    np.testing.assert_array_equal(observation["reward"][:, 1:][follows], data.reward[:, :-1][follows])
    ends = real[:, :-1] & ~real[:, 1:]
    assert ends.any() and (data.discount[:, :-1][ends] == float(truncate)).all()


# --- the loss ---


def h(x):
    return math.copysign(1.0, x) * (math.sqrt(abs(x) + 1.0) - 1.0) + 1e-3 * x


def h_inverse(x):
    root = (math.sqrt(1.0 + 4e-3 * (abs(x) + 1.0 + 1e-3)) - 1.0) / 2e-3
    return math.copysign(1.0, x) * (root**2 - 1.0)


VARIANTS = {
    "defaults": {},
    "no memory": {"lstm_size": None},
    "no burn-in": {"burn_in": 0, "n_step": 1, "unroll_length": 8},
    "plain": {"double": False, "dueling": False, "rescale_values": False, "n_step": 50},
    "traces": {"targets": "watkins", "trace_lambda": 0.8},
    "traces, not double": {"targets": "watkins", "trace_lambda": 0.8, "double": False},
}


def traced(config, data, n, values, rated, back):
    """Retrace's targets of sequence `n`: the trace is cut where the action is not greedy."""
    last = data.mask.shape[1] - 1
    targets = [0.0] * (last + 1)
    for t in reversed(range(config.burn_in, last)):
        row = t + 1
        best = int((values if config.double else rated)[row].argmax())
        expected = back(float(rated[row, best]))
        if row < last and data.mask[n, row] and best == data.action[n, row]:
            expected += config.trace_lambda * (targets[row] - back(float(rated[row, best])))
        discount = 0.9 * float(data.discount[n, t])
        targets[t] = float(np.clip(data.reward[n, t], -2, 2)) + (discount * expected if discount else 0.0)
    return targets


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_loss_against_a_loop(changes):
    config = dataclasses.replace(SMALL, **changes, discount=0.9, reward_clip=2.0)
    learner, batch = apart(make_learner(R2D2(config))), unrolls(R2D2(config))
    data, online, target = batch.data, learner.networks.q_network, learner.targets["q_network"]
    there, back = (h, h_inverse) if config.rescale_values else (float, float)
    weights = (config.batch_size * batch.info.probability) ** -config.importance_sampling_exponent
    weights /= weights.max()
    total, count, priorities = torch.zeros(()), 0, []
    for n in range(config.batch_size):
        values = unrolled(online, data, n, config.burn_in)
        rated = unrolled(target, data, n, config.burn_in).detach()
        sizes, last = [], data.mask.shape[1] - 1
        for t in range(config.burn_in, last):
            if not data.mask[n, t]:
                continue
            expected, factor, row = 0.0, 1.0, t
            while row < last and data.mask[n, row] and row - t < config.n_step:
                expected += factor * float(np.clip(data.reward[n, row], -2, 2))
                factor *= 0.9 * float(data.discount[n, row])
                row += 1
            chooser = values if config.double else rated
            expected += factor * back(float(rated[row, chooser[row].argmax()]))
            if config.targets == "watkins":
                expected = traced(config, data, n, values.detach(), rated, back)[t]
            error = there(expected) - values[t, data.action[n, t]]
            total = total + 0.5 * weights[n] * error**2
            count += 1
            sizes.append(abs(error.item()))
        priorities.append(0.9 * max(sizes) + 0.1 * float(np.mean(sizes)))
    (total / count).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in online.parameters()]
    learner.optimizer.step = lambda: None
    learner._max_gradient_norm = None
    result = learn(learner, batch)
    assert result.metrics["loss"].item() == pytest.approx((total / count).item(), rel=1e-4)
    assert result.metrics["transitions"] == count
    np.testing.assert_allclose(result.priorities, priorities, rtol=1e-4)
    for parameter, gradient in zip(online.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_what_does_not_count_may_be_anything():
    batch = unrolls(R2D2(SMALL))
    expected = learn(make_learner(R2D2(SMALL)), batch)
    data = batch.data
    beyond = data.mask == 0
    for array in (data.reward, data.discount):
        array[beyond] = np.nan
    data.action[beyond] = 0
    data.reward[:, -1] = data.discount[:, -1] = np.nan  # the row to bootstrap from
    data.reward[:, : SMALL.burn_in] = np.nan
    result = learn(make_learner(R2D2(SMALL)), batch)
    assert result.metrics["loss"] == expected.metrics["loss"]
    torch.testing.assert_close(result.priorities, expected.priorities, rtol=0, atol=0)
