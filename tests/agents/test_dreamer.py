"""DreamerV3: the losses are those of a loop, and each row learns what led to it."""

import dataclasses
import math

import dm_env
import numpy as np
import pytest
import torch
from agent_batches import CONTINUOUS, DISCRETE, apart, make_learner, played, unrolls
from agent_cases import SMALL as AGENTS
from dm_env import specs as dm_specs

from agents.dreamer import Dreamer
from framework import losses
from framework.learners import LossContext
from framework.networks import Categorical, as_tensors

SMALL = AGENTS["dreamer"].config


def noise(generator, *shape):
    return losses.race_noise(torch.empty(shape).uniform_(generator=generator))


def lambda_return(last, terminal, rewards, boot, discount, lambda_):
    """The authors' `lambda_return` of one trajectory; each entry has what came *with* its state."""
    returns = [boot[-1]]
    for t in reversed(range(len(rewards) - 1)):
        live, goes_on = (1 - terminal[t + 1]) * discount, (1 - last[t + 1]) * lambda_
        returns.append(rewards[t + 1] + (1 - goes_on) * live * boot[t + 1] + live * goes_on * returns[-1])
    return returns[::-1][:-1]


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS], ids=["choices", "numbers"])
def test_the_losses_against_a_loop(spec):
    changes = {"free_nats": 0.5, "return_range_rate": 0.5, "entropy_coefficient": 0.1, "num_bins": 41}
    config = dataclasses.replace(SMALL, **changes)
    agent = Dreamer(config)
    torch.manual_seed(1)
    learner = make_learner(agent, spec)
    with torch.no_grad():
        for parameter in learner.networks.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        for head in (learner.networks.reward, learner.networks.value):  # Of predictions of a few units.
            head.body.last.bias -= (losses.symlog(head.bins) - 2.0).square()
    learner, batch = apart(learner), unrolls(agent, spec)
    data = as_tensors(batch.data)
    one = torch.tensor(1)
    generator = torch.Generator().manual_seed(5)
    context = LossContext(learner.targets, one, one, generator)
    output = agent.loss(learner.networks, batch._replace(data=data), context)

    nets, slow, g = learner.networks, learner.targets["value"], torch.Generator().manual_seed(5)
    dynamics, size, first = nets.dynamics, config.batch_size, 1 + config.burn_in
    rows, kept, length = data.mask.shape[1], config.imagination_rows, config.imagination_length
    of_rows = noise(g, size, rows - 1, config.stoch_size, config.classes)
    of_states = noise(g, size * kept, length, config.stoch_size, config.classes)
    shape = size * kept, length, nets.actions.vector_size
    if nets.actions.continuous:
        of_actions = torch.empty(shape).normal_(generator=g)
        taken = data.extras["action"]
    else:
        of_actions = noise(g, *shape).log()
        taken = torch.eye(3)[data.action]
    found = {
        name: []
        for name in ("reconstruction", "reward", "continuation", "kl", "actor", "value", "replay_value")
    }
    imagined, features_of = [], {}
    with torch.no_grad():
        for n in range(size):
            deter, stoch = (part[n : n + 1] for part in data.extras["state"])
            for t in range(1, rows):
                action, reward, goes_on = (
                    taken[n, t - 1],
                    float(data.reward[n, t - 1]),
                    float(data.discount[n, t - 1]),
                )
                if data.start_of_episode[n, t]:
                    (deter, stoch), action, reward, goes_on = dynamics.initial_state(1), 0 * action, 0.0, 1.0
                deter = dynamics.advance(deter, stoch, dynamics.action_vectors(action[None]))
                targets = nets.targets(data.observation[n : n + 1, t])
                posterior = dynamics.posterior(deter, dynamics.posterior_embedding(nets.encoder(*targets)))
                stoch = dynamics.sample(posterior, of_rows[n : n + 1, t - 1])
                if t < first:
                    continue
                features = features_of[n, t] = torch.cat([deter, stoch], -1)
                error = nets.decoder(features)[0] - losses.symlog(data.observation[n, t])
                found["reconstruction"].append(float((error**2).sum()))
                logits = nets.reward(features)
                found["reward"].append(float(nets.reward.loss(logits, torch.tensor([reward]))))
                share = float(nets.continuation(features).sigmoid())
                target = config.discount * goes_on
                found["continuation"].append(-target * math.log(share) - (1 - target) * math.log(1 - share))
                prior = dynamics.prior(deter)
                found["kl"].append(
                    max(float((posterior * (posterior / prior).log()).sum()), config.free_nats)
                )
        for n in range(size):
            for t in range(rows - kept, rows):
                features = features_of[n, t]
                path, chosen, m = [features], [], len(imagined)
                for h in range(length):
                    chosen.append(nets.policy(features).sample(noise=of_actions[m : m + 1, h]))
                    vector = dynamics.action_vectors(nets.actions.vectors(chosen[-1]))
                    deter, stoch = features.split(dynamics.sizes, -1)
                    deter = dynamics.advance(deter, stoch, vector)
                    features = torch.cat(
                        [deter, dynamics.sample(dynamics.prior(deter), of_states[m : m + 1, h])], -1
                    )
                    path.append(features)
                rewards, values = (
                    [float(head.mean(each)) for each in path] for head in (nets.reward, nets.value)
                )
                terminal = [1 - float(nets.continuation(each).sigmoid()) for each in path]
                never = [0.0] * len(path)
                returns = lambda_return(never, terminal, rewards, values, 1.0, config.trace_lambda)
                imagined.append((path, chosen, terminal, values, returns))
        low, high = 0.5 * np.percentile([each for *_, own in imagined for each in own], [5, 95])

        def value_loss(features, target):
            logits = nets.value(features)
            to_slow = nets.value.loss(logits, slow.mean(features))
            return float(nets.value.loss(logits, torch.tensor([target])) + to_slow)

        for path, chosen, terminal, values, returns in imagined:
            weight = 1.0
            for h in range(length):
                weight *= 1 - terminal[h]
                policy = nets.policy(path[h])
                gain = float(policy.log_prob(chosen[h])) * (returns[h] - values[h]) / max(1.0, high - low)
                found["actor"].append(-weight * (gain + 0.1 * float(policy.entropy())))
                found["value"].append(weight * value_loss(path[h], returns[h]))
        for n in range(size):
            last = [1.0 - float(data.mask[n, t]) for t in range(rows - kept, rows)]
            led = [float(data.reward[n, t - 1]) for t in range(rows - kept, rows)]
            terminal = [1.0 - float(data.discount[n, t - 1]) for t in range(rows - kept, rows)]
            boot = [imagined[n * kept + k][-1][0] for k in range(kept)]
            returns = lambda_return(last, terminal, led, boot, config.discount, config.trace_lambda)
            for k, target in enumerate(returns):
                loss = value_loss(features_of[n, rows - kept + k], target)
                found["replay_value"].append((1 - last[k]) * loss)
    means = {name: float(np.mean(each)) for name, each in found.items()}
    for name, mean in means.items():
        metric = output.metrics["kl" if name == "kl" else f"{name}_loss"].item()
        assert metric == pytest.approx(mean, rel=2e-4, abs=1e-5), name
    weights = {"kl": config.dynamics_coefficient + config.representation_coefficient}
    weights["replay_value"] = config.replay_value_coefficient
    total = sum(weights.get(name, 1.0) * mean for name, mean in means.items())
    assert output.loss.item() == pytest.approx(total, rel=2e-4)
    assert high - low > 1 and np.ptp([each for *_, own in imagined for each in own]) > 0.1


class Echo(dm_env.Environment):
    """Shows the time, the last action and the last reward, which is 10 * action + time."""

    def __init__(self, seed=None):
        self._episode, self._time = -1, 0

    def observation_spec(self):
        return dm_specs.Array((3,), np.float32)

    def action_spec(self):
        return dm_specs.DiscreteArray(3, np.int64)

    def reset(self):
        self._episode, self._time = self._episode + 1, 0
        return dm_env.restart(np.zeros(3, np.float32))

    def step(self, action):
        self._time += 1
        reward = 10.0 * action + self._time
        observation = np.array([self._time, action, reward], np.float32)
        if self._time < 4:
            return dm_env.transition(reward, observation, 1.0)
        return (dm_env.termination if self._episode % 2 else dm_env.truncation)(reward, observation)


class Greedy(Dreamer):
    """Takes the most likely states, as in evaluations, so that they repeat."""

    def make_policy(self, networks, evaluation=False):
        return super().make_policy(networks, True)


def test_each_row_learns_what_led_to_it(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(Categorical, "mode", lambda self: self.sample(generator))  # All actions are taken.
    agent = Greedy(dataclasses.replace(SMALL, period=1, burn_in=0, discount=0.5))
    batch, nets, _ = played(agent, Echo, steps=40, envs=1)
    data, seen = as_tensors(batch.data), {}
    state = data.extras["state"]
    observe, two_hot = nets.dynamics.observe, nets.reward.loss
    entropy = torch.nn.functional.binary_cross_entropy_with_logits

    def observed(embedding, actions, starts, state, noise, burn_in):
        seen.update(
            actions=actions, starts=starts, states=observe(embedding, actions, starts, state, 0 * noise + 1)
        )
        return seen["states"]

    monkeypatch.setattr(nets.dynamics, "observe", observed)
    monkeypatch.setattr(nets.reward, "loss", lambda out, t: (seen.update(rewards=t), two_hot(out, t))[1])
    name = "binary_cross_entropy_with_logits"
    monkeypatch.setattr(
        torch.nn.functional, name, lambda out, t: (seen.update(going_on=t), entropy(out, t))[1]
    )
    one = torch.tensor(1)
    agent.world_model_loss(nets, data, LossContext(torch.nn.ModuleDict(), one, one, torch.Generator()))
    time, action, reward = data.observation[:, 1:].unbind(-1)
    starts = time == 0
    assert starts.any() and not starts.all() and seen["starts"].equal(starts)
    assert seen["rewards"].equal(reward) and reward.max() > 10
    assert seen["actions"].argmax(-1)[~starts].equal(action[~starts].long())
    terminal = (time == 4) & (seen["going_on"] == 0.0)  # Every second end is a truncation.
    assert ((seen["going_on"] == 0.5) | terminal).all() and 0 < terminal.sum() < (time == 4).sum()
    # The state that is stored with an item is the one that the item before it comes to in its second row.
    for own, stored, width in zip(seen["states"][:2], state, nets.dynamics.sizes, strict=True):
        assert own.shape[-1] == width
        used = data.mask[1:, 0] > 0  # A closing row has no state, and the next row begins an episode.
        torch.testing.assert_close(own[:-1, 0][used], stored[1:][used])


def test_the_policy_learns_by_its_own_loss_and_the_value_moves_the_model():
    agent = AGENTS["dreamer"]
    learner, batch, g = make_learner(agent), unrolls(agent), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in learner.networks.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    nets, one = learner.networks, torch.tensor(1)
    features = torch.randn(6, nets.dynamics.output_size, requires_grad=True)
    context = LossContext(learner.targets, one, one, g)
    _, loss, _ = agent.behavior_losses(nets, features, context)
    loss.backward()
    moved = {name.split(".")[0] for name, p in nets.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"policy", "value"} and not (features.grad is not None and features.grad.any())
    features = torch.randn(4, 3, nets.dynamics.output_size, requires_grad=True)
    data = as_tensors(batch.data)
    agent.replay_value_loss(nets, data, features, torch.zeros(4, 3), context).backward()
    assert features.grad[:, :-1].any() and not features.grad[:, -1].any()
