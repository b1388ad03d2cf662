"""BC, CQL, EDAC, IQL, ReBRAC and TD3+BC: their losses by hand."""

import copy
import itertools

import numpy as np
import pytest
import torch

from agents.bc import BC, BCConfig
from agents.cql import CQL, CQLConfig
from agents.edac import EDAC, EDACConfig
from agents.iql import IQL, IQLConfig
from agents.rebrac import ReBRAC, ReBRACConfig
from agents.sac import SAC
from agents.td3_bc import TD3BC, TD3BCConfig
from framework import adders, replay, specs
from framework.datasets.episodes import play, step_of
from framework.environments.testing import make_spec
from framework.learners import LossContext
from framework.networks import as_tensors
from framework.replay import ReplaySample
from framework.types import Transition

RNG = np.random.default_rng(0)
N = 6
DISCRETE = make_spec(observations=specs.Array((3,), np.float32), actions=specs.DiscreteArray(4))
BOX = specs.BoundedArray((2,), np.float32, -2.0, 2.0)
CONTINUOUS = make_spec(observations=specs.Array((3,), np.float32), actions=BOX)


def batch(spec):
    numbers = lambda *shape: torch.tensor(RNG.normal(size=shape), dtype=torch.float32)  # noqa: E731
    actions = torch.tensor(RNG.integers(4, size=N)) if spec is DISCRETE else numbers(N, 2).clamp(-2, 2)
    discounts = torch.tensor([1.0, 1, 0, 1, 1, 0])
    data = Transition(numbers(N, 3), actions, numbers(N), discounts, numbers(N, 3))
    return ReplaySample(None, data)


def context(targets=None):
    steps = torch.tensor(0)
    return LossContext(targets or {}, steps, steps, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS])
def test_iql_by_hand(spec):
    torch.manual_seed(0)
    agent = IQL(
        IQLConfig(hidden_sizes=(8,), expectile=0.8, temperature=2.0, largest_weight=1.5, discount=0.9)
    )
    networks, target = agent.make_networks(spec), agent.make_networks(spec).critics
    sample = batch(spec)
    data = sample.data
    found = agent.loss(networks, sample, context({"critics": target}))

    def q(critics, row):
        if spec is DISCRETE:
            return critics(data.observation)[:, row, data.action[row]]
        return critics(data.observation, data.action / 2.0)[:, row]

    total = 0.0
    for row in range(N):
        known, value = q(target, row).min().item(), networks.value(data.observation)[row]
        error = known - value
        total = total + (0.8 if error.item() > 0 else 0.2) * error**2
        goal = data.reward[row] + 0.9 * data.discount[row] * networks.value(data.next_observation)[row].item()
        total = total + sum(0.5 * (goal - each) ** 2 for each in q(networks.critics, row))
        weight = min(np.exp(2.0 * error.item()), 1.5)
        distribution = networks.policy(data.observation)
        taken = data.action if spec is DISCRETE else data.action / 2.0
        total = total - weight * distribution.log_prob(taken)[row]
    torch.testing.assert_close(found.loss, total / N)
    gradients = torch.autograd.grad(found.loss, list(networks.parameters()), allow_unused=True)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_td3_bc_by_hand():
    torch.manual_seed(0)
    agent = TD3BC(TD3BCConfig(hidden_sizes=(8,), value_weight=2.0, actor_delay=1, smoothing_std=0.0))
    networks, targets = agent.make_networks(CONTINUOUS), agent.make_networks(CONTINUOUS)
    sample = batch(CONTINUOUS)
    data = sample.data
    found = agent.loss(networks, sample, context({"policy": targets.policy, "critics": targets.critics}))
    following = targets.critics(data.next_observation, targets.policy(data.next_observation)).min(0).values
    goal = (data.reward + 0.99 * data.discount * following).detach()
    critic = 0.5 * (networks.critics(data.observation, data.action / 2.0) - goal).square().sum(0).mean()
    chosen = networks.policy(data.observation)
    value = networks.critics(data.observation, chosen)[0]
    actor = (chosen - data.action / 2.0).square().mean() - 2.0 * value.mean() / value.abs().mean().item()
    torch.testing.assert_close(found.loss, critic + actor)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS])
def test_cql_is_sac_with_a_penalty(spec, calibrated):
    """That of continuous actions is the authors', less the logarithm of the number of samples."""
    torch.manual_seed(0)
    sample, settings = batch(spec), {"hidden_sizes": (8,), "num_critics": 3, "num_samples": 2}
    agent = CQL(CQLConfig(conservative_weight=2.0, calibrated=calibrated, reward_scale=3.0, **settings))
    returns = torch.linspace(-0.3, 0.3, N)
    sample = sample._replace(data=sample.data._replace(extras={"return_to_go": returns}))

    def at_least(values):  # Of the actions that Cal-QL calibrates.
        return torch.where(values < 3 * returns, 3 * returns, values) if calibrated else values

    networks, targets = agent.make_networks(spec), agent.make_networks(spec)
    given = context({"critics": targets.critics})
    plain = SAC.loss(agent, networks, sample, given)
    state = given.generator.get_state()
    found = agent.loss(networks, sample, context({"critics": targets.critics}))
    data, observation = sample.data, sample.data.observation
    if spec is DISCRETE:
        values = networks.critics(observation)
        taken = values[:, torch.arange(N), data.action]
        penalty = (at_least(values.mT).exp().sum(1).log() - taken).sum(0).mean()
    else:
        given.generator.set_state(state)
        penalty, terms = 0.0, []
        for seen in (observation, data.next_observation):
            base = networks.policy(seen).base
            noise = torch.empty(N, 2, 2).normal_(generator=given.generator)
            raw = base.mean[:, None] + base.log_std.exp()[:, None] * noise
            normal = torch.distributions.Normal(base.mean[:, None], base.log_std.exp()[:, None])
            log_density = (normal.log_prob(raw) - torch.log(1 - torch.tanh(raw) ** 2)).sum(-1)
            terms.append((torch.tanh(raw).detach(), log_density.detach()))
        uniform = 2 * torch.empty(N, 2, 2).uniform_(generator=given.generator) - 1
        terms.append((uniform, torch.full((N, 2), 2 * np.log(0.5))))
        for critic in range(3):
            each = []
            for (a, p), change in zip(terms, (at_least, at_least, lambda value: value), strict=True):
                each += [change(networks.critics(observation, a[:, i])[critic]) - p[:, i] for i in (0, 1)]
            soft = torch.logsumexp(torch.stack(each), 0) - np.log(6)
            penalty = penalty + (soft - networks.critics(observation, data.action / 2.0)[critic]).mean()
    torch.testing.assert_close(found.loss, plain.loss + 2.0 * penalty, rtol=1e-4, atol=1e-4)
    gradients = (torch.autograd.grad(each, networks.policy.parameters()) for each in (found.loss, plain.loss))
    for one, other in zip(*gradients, strict=True):  # The policy does not learn from the penalty.
        torch.testing.assert_close(one, other)


def numbers(networks, observation, action, steps):
    """Values `[critics, steps]` of `action + steps`, in float64."""
    precise = copy.deepcopy(networks.critics).double()
    return precise(observation.double().expand(len(steps), -1), (action + steps.double()).double())


def test_edac_is_sac_with_many_critics_and_the_similarity_of_their_gradients():
    torch.manual_seed(0)
    sample, agent = (
        batch(CONTINUOUS),
        EDAC(EDACConfig(hidden_sizes=(8,), num_critics=3, diversity_weight=4.0)),
    )
    networks, targets = agent.make_networks(CONTINUOUS), agent.make_networks(CONTINUOUS)
    given = {"critics": targets.critics}
    without = EDAC(EDACConfig(hidden_sizes=(8,), num_critics=3, diversity_weight=0.0))
    plain = without.loss(networks, sample, context(given))
    torch.testing.assert_close(plain.loss, SAC.loss(agent, networks, sample, context(given)).loss)
    data, total, step = sample.data, 0.0, 1e-6 * torch.eye(2)
    for observation, action in zip(data.observation, data.action / 2.0, strict=True):
        # Slopes `[3, 2]` of the critics by differences.
        above, below = (numbers(networks, observation, action, sign * step) for sign in (1, -1))
        slopes = (above - below) / 2e-6
        for i, j in itertools.permutations(range(3), 2):
            total += torch.nn.functional.cosine_similarity(slopes[i], slopes[j], 0) / 2 / N
    found = agent.loss(networks, sample, context(given))
    assert (found.loss - plain.loss).item() == pytest.approx(0.5 * 4.0 * total.item(), rel=1e-3, abs=1e-4)
    names = [name for name, _ in networks.critics.named_parameters() if name.endswith("0.weight")]
    similarity = found.metrics["gradient_similarity"]
    slopes = torch.autograd.grad(similarity, [networks.critics.get_parameter(name) for name in names])
    assert all(slope.abs().sum() > 0 for slope in slopes)
    with pytest.raises(ValueError, match="bounded real numbers"):
        agent.make_networks(DISCRETE)


def test_rebrac_by_hand():
    """Of played episodes: one is terminated, one truncated; neither has an action after its last."""
    torch.manual_seed(0)
    changes = {"critic_penalty": 0.7, "actor_penalty": 0.3, "actor_delay": 1, "reward_clip": 1.0}
    agent = ReBRAC(ReBRACConfig(hidden_sizes=(8,), smoothing_std=0.0, discount=0.9, **changes))
    networks, targets = agent.make_networks(CONTINUOUS), agent.make_networks(CONTINUOUS)
    assert "LayerNorm" in str(networks.critics) and "LayerNorm" not in str(networks.policy)
    for parameter in (*networks.parameters(), *targets.parameters()):
        torch.nn.init.uniform_(parameter, -1.0, 1.0)  # Values of both signs, and actions that are not near 0.
    episodes = []
    for length, last in ((4, 0.0), (3, 1.0)):
        rows = batch(CONTINUOUS).data
        discount = np.ones(length, np.float32)
        discount[-1] = last
        arrays = (rows.observation[: length + 1], rows.action[:length], 2 * rows.reward[:length])
        episodes.append(step_of(*(each.numpy() for each in arrays), discount))
    client = replay.EmbeddedClient([replay.Table.queue(adders.REPLAY_TABLE, 100)], concurrent=False)
    play(episodes, lambda: agent.make_adder(client, CONTINUOUS))
    items = client.sample_batch(adders.REPLAY_TABLE, 7)
    sample = items._replace(data=as_tensors(items.data))
    given = {"policy": targets.policy, "critics": targets.critics}
    found = agent.loss(networks, sample, context(given))
    critic, error, values = 0.0, 0.0, []
    for episode in map(as_tensors, episodes):
        length = len(episode.reward) - 1
        for t in range(length):
            seen, after = episode.observation[t], episode.observation[t + 1]
            action, chosen = episode.action[t] / 2.0, targets.policy(after)
            goal = episode.reward[t].clamp(-1, 1).item()
            if episode.discount[t] > 0:
                following = targets.critics(after, chosen).min().item()
                if t + 1 < length:
                    following -= 0.7 * ((chosen - episode.action[t + 1] / 2.0) ** 2).sum().item()
                goal += 0.9 * following
            critic = critic + 0.5 * ((networks.critics(seen, action) - goal) ** 2).sum() / 7
            own = networks.policy(seen)
            error = error + ((own - action) ** 2).sum() / 7
            values.append(networks.critics(seen, own).min())
    values = torch.stack(values)
    actor = 0.3 * error - values.mean() / values.abs().mean().item()
    torch.testing.assert_close(found.metrics["critic_loss"], critic)
    torch.testing.assert_close(found.metrics["actor_loss"], actor)
    torch.testing.assert_close(found.loss, critic + actor)
    for field, value in (("n_step", 2), ("prioritized", True)):
        with pytest.raises(ValueError, match=f"^{field}: got {value}, expected"):
            ReBRACConfig(**{field: value})


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS])
def test_bc_by_hand(spec):
    torch.manual_seed(0)
    networks, sample = BC().make_networks(spec), batch(spec)
    found = BC().loss(networks, sample, context()).loss
    chosen = networks.policy(sample.data.observation)
    if spec is DISCRETE:
        expected = torch.nn.functional.cross_entropy(chosen.logits, sample.data.action)
    else:
        expected = torch.nn.functional.mse_loss(chosen, sample.data.action / 2.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_bc_acts_as_it_learns(spec, kind):
    """The loss is that of the steps of acting from the first row of each part of an episode on."""
    torch.manual_seed(0)
    agent = BC(BCConfig(hidden_sizes=(8,), recurrent=kind, recurrent_size=5, unroll_length=4))
    networks, rows = agent.make_networks(spec), batch(spec).data
    policy, arrays = agent.make_policy(networks), (rows.observation, rows.action[:5], rows.reward[:5])
    episode = step_of(*(each.numpy() for each in arrays), np.ones(5, np.float32))
    client = replay.EmbeddedClient([replay.Table.queue(adders.REPLAY_TABLE, 100)], concurrent=False)
    play([episode], lambda: agent.make_adder(client, spec))
    items = client.sample_batch(adders.REPLAY_TABLE, 2)
    found = agent.loss(networks, items._replace(data=as_tensors(items.data)), context())
    expected, state = 0.0, None
    for t in range(5):  # Rows 0 to 3, and 4 with the closing row and padding.
        state = policy.initial_state(1) if t in (0, 4) else state
        chosen, state = networks.policy.step(rows.observation[t : t + 1], state)
        if spec is DISCRETE:
            expected = expected + torch.nn.functional.cross_entropy(chosen.logits, rows.action[t : t + 1]) / 5
        else:
            expected = expected + (chosen - rows.action[t] / 2.0).square().mean() / 5
    torch.testing.assert_close(found.loss, expected)
    assert found.weight == 5 and agent.env_steps_per_item() == 4
    acted, _, state = policy.act(rows.observation[:1], policy.initial_state(1))
    again, _, _ = policy.act(rows.observation[:1], state)
    assert len(acted) == 1 and (spec is DISCRETE or not torch.equal(acted, again))
