"""SAC: every field of its config changes something, and the losses are those of the papers."""

import collections
import dataclasses
import math

import agent_probes
import config_fields
import numpy as np
import pytest
import torch
from batches import learn
from dm_env import specs as dm_specs

from agents.sac import SAC, SACConfig
from framework import replay, specs
from framework.core import Progress
from framework.types import Transition
from framework.variables import VariableBlock, VariableClient

Info = collections.namedtuple("Info", "key probability table_size")
Sample = collections.namedtuple("Sample", "info data")

CONTINUOUS = dm_specs.BoundedArray((2,), np.float32, [-2, 0], [2, 1])
DISCRETE = dm_specs.DiscreteArray(3, np.int64)


def make_spec(actions):
    return specs.EnvironmentSpec(
        dm_specs.Array((4,), np.float32),
        actions,
        dm_specs.Array((), np.float32),
        dm_specs.BoundedArray((), np.float32, 0, 1),
    )


SPEC = make_spec(CONTINUOUS)
SMALL = SACConfig(hidden_sizes=(8, 8), batch_size=16)

AGENT_OF = {SACConfig: SAC}  # Other agents for continuous control add theirs, and so use the probes below.


def agent_of(config):
    return AGENT_OF[type(config)](config)


def make_batch(seed=0, size=16, actions=CONTINUOUS):
    random = np.random.default_rng(seed)
    observation, next_observation = random.normal(size=(2, size, 4)).astype(np.float32)
    if actions is DISCRETE:
        action = random.integers(0, 3, size)
    else:
        action = random.uniform(actions.minimum, actions.maximum, (size, *actions.shape)).astype(np.float32)
    data = Transition(
        observation,
        action,
        (3 * random.normal(size=size)).astype(np.float32),
        (random.random(size) < 0.8).astype(np.float32),
        next_observation,
    )
    return Sample(Info(np.arange(size, dtype=np.uint64), np.ones(size) / size, np.full(size, size)), data)


def make_learner(config, actions=CONTINUOUS):
    torch.manual_seed(0)
    agent, spec = agent_of(config), make_spec(actions)
    return agent.make_learner(agent.make_networks(spec), spec)


def learned(config):
    return agent_probes.after_three_steps(make_learner(config), make_batch)


def table(config):
    return agent_probes.table(agent_of(config), SPEC)


def network(config):
    return str(agent_of(config).make_networks(SPEC))


def acted(config):
    """The second actions of 50 envs, before learning begins."""
    agent = agent_of(config)
    torch.manual_seed(0)
    policy = agent.make_policy(agent.make_networks(SPEC))
    observation, state = np.zeros((50, 4), np.float32), policy.initial_state(50)
    for _ in range(2):
        action, _, state = policy.step(observation, state)
    return action


def written(config):
    """How many items an episode of five steps gives, and the reward of one of them."""
    import dm_env

    agent = agent_of(dataclasses.replace(config, min_replay_size=1))
    tables = agent.make_tables(SPEC)
    client = replay.EmbeddedClient(tables)
    adder = agent.make_adder(client, SPEC)
    one = np.ones(1, np.float32)
    for kind in (0, 1, 1, 1, 1, 2):
        timestep = dm_env.TimeStep(np.array([kind]), one, one, np.zeros((1, 4), np.float32))
        adder.add(np.zeros((1, 2), np.float32), timestep) if kind else adder.add_first(timestep)
    adder.flush()
    return tables[0].info.current_size, float(client.sample_batch("replay", 1).data.reward[0])


# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    **config_fields.of_replay(learned, table),
    "n_step": (3, written, {}),
    "reward_clip": (0.1, written, {}),
    "reward_scale": (0.1, learned, {}),
    "critic_learning_rate": (1e-2, learned, {}),
    "num_critics": (3, network, {}),
    "actor_delay": (2, learned, {}),
    "temperature": (0.3, learned, {}),
    "initial_temperature": (0.3, learned, {}),
    "temperature_learning_rate": (1e-2, learned, {}),
    "target_entropy": (5.0, learned, {"temperature_learning_rate": 1.0}),
    "random_start": (False, acted, {}),
    "hidden_sizes": ((8,), network, {}),
    "layer_norm": (True, network, {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, SACConfig)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


WRONG = [
    ("hidden_sizes", 64),
    ("hidden_sizes", (8.5,)),
    ("target_entropy", math.nan),
    ("num_critics", True),
    ("layer_norm", 1),
    ("temperature", math.inf),
    ("min_replay_size", 10_000_000),
    ("device", "gpu"),
    ("n_step", 0),
    ("max_replay_size", 0),
    ("min_replay_size", 0),
    ("batch_size", 0),
    ("insert_burst", 0),
    ("learning_rate_decay", 0),
    ("num_critics", 0),
    ("actor_delay", 0),
    ("hidden_sizes", (8, -1)),
    ("learning_rate", -1.0),
    ("critic_learning_rate", -1.0),
    ("temperature_learning_rate", -1.0),
    ("reward_scale", 0.0),
    ("samples_per_insert", 0.0),
    ("max_gradient_norm", 0.0),
    ("temperature", 0.0),
    ("initial_temperature", -1.0),
    ("target_update_rate", 0.0),
    ("target_update_rate", 1.5),
    ("discount", -0.1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(SACConfig, field, value)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch())


def test_the_continuous_losses_against_a_second_formulation():
    config = dataclasses.replace(SMALL, discount=0.9, initial_temperature=0.5)
    learner, batch = make_learner(config), make_batch()
    nets, data = learner.networks, Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    state = learner._generator.get_state()
    scale, centre = torch.tensor([2.0, 0.5]), torch.tensor([0.0, 0.5])

    def draw(observation):
        base = nets.policy(observation).base
        normal = torch.distributions.Normal(base.mean, base.log_std.exp())
        raw = base.mean + base.log_std.exp() * torch.empty(16, 2).normal_(generator=learner._generator)
        squashed = torch.tanh(raw)
        log_prob = (normal.log_prob(raw) - torch.log(1 - squashed**2)).sum(-1)
        return squashed, log_prob

    with torch.no_grad():
        next_action, next_log_prob = draw(data.next_observation)
        both = learner.targets["critics"](data.next_observation, next_action)
        soft = torch.minimum(both[0], both[1]) - 0.5 * next_log_prob
        target = data.reward + 0.9 * data.discount * soft
        values = nets.critics(data.observation, (data.action - centre) / scale)
        critic = sum(0.5 * ((value - target) ** 2).mean() for value in values)
        action, log_prob = draw(data.observation)
        own = nets.critics(data.observation, action).amin(0)
        actor = (0.5 * log_prob - own).mean()
        temperature = 0.5 * (-log_prob + 2.0).mean()
    learner._generator.set_state(state)
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic.item(), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor.item(), rel=1e-4)
    assert metrics["loss"].item() == pytest.approx((critic + actor + temperature).item(), rel=1e-4)
    assert metrics["entropy"].item() == pytest.approx(-log_prob.mean().item(), rel=1e-4)


def test_the_discrete_losses_against_a_loop():
    config = dataclasses.replace(SMALL, discount=0.9, initial_temperature=0.5)
    learner, batch = make_learner(config, DISCRETE), make_batch(actions=DISCRETE)
    nets, data = learner.networks, Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    critic = actor = temperature = 0.0
    with torch.no_grad():
        for i in range(16):
            chances = nets.policy(data.next_observation[i]).logits.softmax(-1)
            rated = learner.targets["critics"](data.next_observation[i])
            soft = sum(chances[a] * (rated[:, a].min() - 0.5 * chances[a].log()) for a in range(3))
            target = data.reward[i] + 0.9 * data.discount[i] * soft
            values = nets.critics(data.observation[i])
            critic += sum(0.5 * (values[c, data.action[i]] - target) ** 2 for c in range(2)) / 16
            chances = nets.policy(data.observation[i]).logits.softmax(-1)
            actor += sum(chances[a] * (0.5 * chances[a].log() - values[:, a].min()) for a in range(3)) / 16
            entropy = -(chances * chances.log()).sum()
            temperature += 0.5 * (entropy - 0.5 * math.log(3)) / 16
    metrics = learn(learner, batch).metrics
    assert metrics["critic_loss"].item() == pytest.approx(critic.item(), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(actor.item(), rel=1e-4)
    assert metrics["loss"].item() == pytest.approx((critic + actor + temperature).item(), rel=1e-4)


@pytest.mark.parametrize("actions", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_each_loss_moves_its_own_parameters_only(actions):
    still = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "temperature_learning_rate": 0.0}
    for field, child in zip(still, ("policy", "critics", "temperature"), strict=True):
        rates = {**still, field: 1e-2}
        learner = make_learner(dataclasses.replace(SMALL, **rates), actions)
        before = {n: p.detach().clone() for n, p in learner.networks.named_parameters()}
        learn(learner, make_batch(actions=actions))
        moved = {n.split(".")[0] for n, p in learner.networks.named_parameters() if not p.equal(before[n])}
        assert moved == {child}
        assert all(p.requires_grad for p in learner.networks.parameters())


def test_the_critics_gradient_is_that_of_their_own_loss():
    """The actor's loss goes through the critics, and leaves nothing there."""
    gradients = []
    for delay in (1, 2):
        learner = make_learner(dataclasses.replace(SMALL, actor_delay=delay))
        # The first step is not due with a delay of 2.
        learn(learner, make_batch())
        gradients.append([p.grad for p in learner.networks.critics.parameters()])
        due = [p.grad is not None for p in learner.networks.policy.parameters()]
        assert all(due) if delay == 1 else not any(due)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_a_delayed_actor_stays_between_its_steps():
    learner = make_learner(dataclasses.replace(SMALL, actor_delay=3))
    moved = []
    for seed in range(6):
        before = [p.detach().clone() for p in learner.networks.policy.parameters()]
        learn(learner, make_batch(seed))
        pairs = zip(before, learner.networks.policy.parameters(), strict=True)
        moved.append(any(not old.equal(new) for old, new in pairs))
    assert moved == [False, False, True, False, False, True]


@pytest.mark.parametrize("wanted", [-10.0, 10.0])
def test_the_temperature_grows_when_the_entropy_is_too_small(wanted):
    learner = make_learner(dataclasses.replace(SMALL, target_entropy=wanted))
    before = learner.networks.temperature.log.item()
    learn(learner, make_batch())
    after = learner.networks.temperature.log.item()
    assert after > before if wanted > 0 else after < before


@pytest.mark.parametrize(
    ("actions", "chosen", "expected"),
    [
        (CONTINUOUS, None, -2.0),
        (CONTINUOUS, 1.0, 1.0),
        (dm_specs.BoundedArray((), np.float32, 0, 4), None, -1.0),
        (dm_specs.BoundedArray((2, 3), np.float32, -1, 1), None, -6.0),
        (dm_specs.BoundedArray((3,), np.float32, [-2, 5, 0], [2, 5, 1]), None, -2.0),
        (dm_specs.BoundedArray((3,), np.float32, -1, 1), None, -3.0),
        (DISCRETE, None, 0.5 * math.log(3)),
        (DISCRETE, 0.7, 0.7),
    ],
)
def test_the_target_entropy_is_that_of_actions_from_minus_one_to_one(actions, chosen, expected):
    config = dataclasses.replace(SMALL, target_entropy=chosen)
    nets = SAC(config).make_networks(make_spec(actions))
    assert nets.target_entropy == pytest.approx(expected)


@pytest.mark.parametrize("actions", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_actions_fit_the_spec_and_repeat_from_seed_and_state(actions):
    agent = SAC(SMALL)
    nets = agent.make_networks(make_spec(actions))
    observation = 100 * np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def act(policy, times=3):
        return [policy.step(observation, ())[0].tolist() for _ in range(times)]

    for uniform in (True, False):
        first, second = agent.make_policy(nets), agent.make_policy(nets)
        first.progress = second.progress = Progress(version=1 - uniform)
        first.seed(3)
        second.seed(3)
        assert act(first) == act(second)
        second.restore(first.save())
        assert act(first) == act(second)
        second.seed(4)
        assert act(first) != act(second)
        for policy in (first, agent.make_policy(nets, evaluation=True)):
            taken, extras, _ = policy.step(observation, ())
            assert extras == () and taken.dtype == actions.dtype
            for action in taken:
                actions.validate(action)


def test_actions_are_uniform_until_the_first_learner_step():
    agent, learner = SAC(SMALL), make_learner(SMALL)
    nets = agent.make_networks(SPEC)
    block = VariableBlock(learner.parameters())
    policy, greedy = agent.make_policy(nets), agent.make_policy(nets, evaluation=True)
    client = VariableClient(block, nets, policy)
    block.publish(0, learner.parameters())
    observation = np.zeros((2000, 4), np.float32)
    client.update()
    random = policy.step(observation, ())[0]
    np.testing.assert_allclose(random.mean(0), [0.0, 0.5], atol=0.15)
    np.testing.assert_allclose(random.std(0), [2 / 3**0.5, 0.5 / 3**0.5], rtol=0.1)
    assert greedy.step(observation, ())[0].std() == pytest.approx(
        greedy.step(observation[:1], ())[0].std(), abs=1e-5
    )
    learn(learner, make_batch())
    block.publish(1, learner.parameters())
    client.update()
    assert policy.step(observation, ())[0].std(0)[0] < 0.8 * 2 / 3**0.5


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (dm_specs.Array((2,), np.float32), r"bounded real numbers"),
        (dm_specs.BoundedArray((2,), np.float32, 1, 1), r"some of them not equal"),
        (dm_specs.BoundedArray((2,), np.int64, 0, 4), r"one discrete action"),
        (dm_specs.BoundedArray((2,), np.float32, -np.inf, 1), r"finite"),
    ],
)
def test_actions_that_do_not_fit_are_refused(actions, message):
    with pytest.raises(ValueError, match=message):
        SAC(SMALL).make_networks(make_spec(actions))


SHAPES = {
    "scalar": dm_specs.BoundedArray((), np.float32, -2, 1),
    "matrix": dm_specs.BoundedArray((2, 3), np.float32, -1, [1, 2, 3]),
    "float64": dm_specs.BoundedArray((2,), np.float64, -1, 1),
    "a constant": dm_specs.BoundedArray((3,), np.float32, [-2, 5, 0], [2, 5, 1]),
    "constants in a matrix": dm_specs.BoundedArray((2, 2), np.float32, [[-1, 0], [3, -1]], [[1, 0], [3, 1]]),
}


@pytest.mark.parametrize("actions", SHAPES.values(), ids=SHAPES)
def test_learns_and_acts_with_every_shape_of_bounded_action(actions):
    agent, learner = SAC(SMALL), make_learner(SMALL, actions)
    for seed in range(3):
        metrics = learn(learner, make_batch(seed, actions=actions)).metrics
        assert all(np.isfinite(float(value)) for value in metrics.values())
    assert all(p.isfinite().all() for p in learner.networks.parameters())
    nets = learner.networks
    observation = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    for uniform in (True, False):
        for evaluation in (True, False):
            policy = agent.make_policy(nets, evaluation)
            policy.progress = Progress(version=1 - uniform)
            taken, _, _ = policy.step(observation, ())
            assert taken.shape == (64, *actions.shape) and taken.dtype == actions.dtype
            for action in taken:
                actions.validate(action)
    moves = np.broadcast_to(actions.minimum < actions.maximum, actions.shape)
    np.testing.assert_array_equal(taken.std(0) > 0, moves)


def test_a_constant_among_the_actions_changes_nothing():
    """The same as without it, to the last bit."""
    learners = make_learner(SMALL), make_learner(SMALL, SHAPES["a constant"])
    for seed in range(3):
        batch = make_batch(seed)
        action = np.insert(batch.data.action, 1, 5.0, axis=1)
        wider = batch._replace(data=batch.data._replace(action=action))
        results = [
            learn(learner, each).metrics for learner, each in zip(learners, (batch, wider), strict=True)
        ]
        assert {name: float(value) for name, value in results[0].items()} == {
            name: float(value) for name, value in results[1].items()
        }


def test_a_fixed_temperature_is_that_of_the_config_after_a_resume():
    saved = make_learner(dataclasses.replace(SMALL, temperature=0.3)).save()
    learner = make_learner(dataclasses.replace(SMALL, temperature=0.1))
    learner.restore(saved)
    assert learn(learner, make_batch()).metrics["temperature"].item() == pytest.approx(0.1)


def test_a_fixed_temperature_stays():
    learner = make_learner(dataclasses.replace(SMALL, temperature=0.3))
    for seed in range(3):
        metrics = learn(learner, make_batch(seed)).metrics
    assert metrics["temperature"].item() == pytest.approx(0.3)
