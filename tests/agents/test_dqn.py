"""DQN: every field of its config changes something, and the parts fit each other."""

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

from agents.dqn import DQN, DQNConfig
from framework import replay, specs
from framework.actors import PolicyActor
from framework.types import Transition
from framework.variables import VariableBlock, VariableClient

Info = collections.namedtuple("Info", "key probability table_size")
Sample = collections.namedtuple("Sample", "info data")

SPEC = specs.EnvironmentSpec(
    dm_specs.Array((4,), np.float32),
    dm_specs.DiscreteArray(3, np.int64),
    dm_specs.Array((), np.float32),
    dm_specs.BoundedArray((), np.float32, 0, 1),
)
IMAGES = SPEC._replace(observations=dm_specs.BoundedArray((4, 44, 44), np.uint8, 0, 255))
SMALL = DQNConfig(hidden_sizes=(8, 8), batch_size=16)


AGENT_OF = {DQNConfig: DQN}  # Other agents of the family add theirs, and so use the probes below.


def agent_of(config):
    return AGENT_OF[type(config)](config)


def make_batch(seed=0, size=16):
    random = np.random.default_rng(seed)
    observation, next_observation = random.normal(size=(2, size, 4)).astype(np.float32)
    data = Transition(
        observation,
        random.integers(0, 3, size),
        (3 * random.normal(size=size)).astype(np.float32),
        (random.random(size) < 0.8).astype(np.float32),
        next_observation,
    )
    probability = random.dirichlet(np.ones(size))
    return Sample(Info(np.arange(size, dtype=np.uint64), probability, np.full(size, size)), data)


def make_learner(config):
    torch.manual_seed(0)
    agent = agent_of(config)
    return agent.make_learner(agent.make_networks(SPEC), SPEC)


def learned(config):
    return agent_probes.after_three_steps(make_learner(config), make_batch)


def explored(config):
    return agent_probes.explored(agent_of(config), make_learner(config).networks, SPEC)


def evaluated(config):
    return agent_probes.evaluated(agent_of(config), agent_of(config).make_networks(SPEC), SPEC)


def table(config):
    return agent_probes.table(agent_of(config), SPEC)


def network(config):
    return agent_probes.network(agent_of(config), SPEC)


def image_network(config):
    return str(agent_of(config).make_networks(IMAGES))


def written(config):
    """Rewards of the items of one short episode with rewards of 1."""
    client = replay.EmbeddedClient(agent_of(dataclasses.replace(config, min_replay_size=1)).make_tables(SPEC))
    adder = agent_of(config).make_adder(client, SPEC)
    first = _timestep(0)
    adder.add_first(first)
    for kind in (1, 1, 1, 1, 1, 2):
        adder.add(np.zeros(1, np.int64), _timestep(kind))
    adder.flush()
    sample = client.sample_batch("replay", 64)
    return sorted({round(float(r), 6) for r in sample.data.reward})


def _timestep(kind):
    import dm_env

    one = np.ones(1, np.float32)
    return dm_env.TimeStep(np.array([kind]), one * (kind > 0), one, np.zeros((1, 4), np.float32))


PRIORITIZED = {"prioritized": True}
MUNCHAUSEN = {"munchausen": 0.9}
DECAYING = {"learning_rate_decay": 3}
# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    **config_fields.of_replay(learned, table),
    "n_step": (2, written, {}),
    "reward_clip": (0.1, written, {}),
    "prioritized": (True, table, {}),
    "priority_exponent": (0.9, table, PRIORITIZED),
    "importance_sampling_exponent": (0.9, learned, PRIORITIZED),
    "importance_sampling_annealing": (2, learned, PRIORITIZED),
    "huber_delta": (0.01, learned, {}),
    "double": (False, learned, {"learning_rate": 0.1}),
    "munchausen": (0.9, learned, {}),
    "munchausen_temperature": (1.0, learned, MUNCHAUSEN),
    "munchausen_clip": (0.01, learned, MUNCHAUSEN),
    "epsilon_start": (0.2, explored, {}),
    "epsilon_end": (0.9, explored, {"epsilon_decay": 1}),
    "epsilon_decay": (2, explored, {}),
    "epsilon_ladder": (7.0, explored, {"epsilon_start": 0.5}),
    "evaluation_epsilon": (0.5, evaluated, {}),
    "torso": ("data_efficient", image_network, {}),
    "hidden_sizes": ((8,), network, {}),
    "layer_norm": (False, network, {}),
    "dueling": (True, network, {}),
    "noisy": (True, network, {}),
    "initial_noise": (0.1, learned, {"noisy": True}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, DQNConfig)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


WRONG = [
    ("hidden_sizes", 64),
    ("n_step", 1.5),
    ("double", "no"),
    ("discount", "0.9"),
    ("learning_rate", math.inf),
    ("device", None),
    ("min_replay_size", 10_000_000),
    ("device", "gpu"),
    ("n_step", 0),
    ("max_replay_size", 0),
    ("min_replay_size", 0),
    ("batch_size", 0),
    ("insert_burst", 0),
    ("importance_sampling_annealing", 0),
    ("learning_rate_decay", 0),
    ("target_update_period", 0),
    ("epsilon_decay", 0),
    ("hidden_sizes", (0,)),
    ("priority_exponent", -0.5),
    ("learning_rate", -1.0),
    ("adam_epsilon", -1.0),
    ("epsilon_ladder", -1.0),
    ("reward_clip", 0.0),
    ("samples_per_insert", 0.0),
    ("max_gradient_norm", 0.0),
    ("huber_delta", 0.0),
    ("munchausen", 1.1),
    ("munchausen_temperature", 0.0),
    ("munchausen_clip", -1.0),
    ("initial_noise", 0.0),
    ("target_update_rate", 0.0),
    ("target_update_rate", 2.0),
    ("discount", 1.01),
    ("importance_sampling_exponent", -0.1),
    ("learning_rate_end", 1.5),
    ("epsilon_start", 2.0),
    ("epsilon_end", -0.1),
    ("evaluation_epsilon", 1.1),
    ("torso", "wide"),
    ("learning_rate", float("nan")),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(DQNConfig, field, value)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch())


def test_the_loss_against_a_loop():
    config = dataclasses.replace(SMALL, prioritized=True, discount=0.9, max_gradient_norm=None)
    learner, batch = make_learner(config), make_batch()
    network, target = learner.networks.q_network, learner.targets["q_network"]
    expected, errors = 0.0, []
    weights = (16 * batch.info.probability) ** -config.importance_sampling_exponent
    weights /= weights.max()
    with torch.no_grad():
        for i in range(16):
            row = Transition(*(torch.as_tensor(np.asarray(leaf[i])) for leaf in batch.data[:5]))
            best = network(row.next_observation).argmax()
            bootstrap = 0.9 * row.discount * target(row.next_observation)[best]
            error = float(row.reward + bootstrap - network(row.observation)[row.action])
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            expected += weights[i] * huber / 16
            errors.append(abs(error) + 1e-6)
    result = learn(learner, batch)
    assert result.metrics["loss"].item() == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(result.priorities, errors, rtol=1e-4)


def test_the_munchausen_loss_is_that_of_the_target_networks_policy():
    config = dataclasses.replace(SMALL, munchausen=0.9, munchausen_temperature=0.5, discount=0.9)
    learner, batch = make_learner(config), make_batch()
    target = learner.targets["q_network"]
    with torch.no_grad():
        for parameter in target.parameters():  # Not those of the online network.
            parameter.mul_(1.5)
    data = Transition(*(torch.as_tensor(np.asarray(leaf)) for leaf in batch.data[:5]))
    with torch.no_grad():
        values = learner.networks.q_network(data.observation)[range(16), data.action]
        log_policy = (target(data.observation) / 0.5).log_softmax(-1)[range(16), data.action]
        bonus = 0.9 * (0.5 * log_policy).clamp(min=-1.0)
        soft = 0.5 * torch.logsumexp(target(data.next_observation) / 0.5, -1)
        expected = (data.reward + bonus + 0.9 * data.discount * soft - values).abs().mean()
    assert learn(learner, batch).metrics["td_error"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_epsilon_falls_with_the_env_steps_that_come_with_the_parameters():
    config = dataclasses.replace(SMALL, epsilon_start=0.8, epsilon_end=0.2, epsilon_decay=3000)
    agent, learner = DQN(config), make_learner(config)
    networks = agent.make_networks(SPEC)
    policy, block = agent.make_policy(networks), VariableBlock(learner.parameters())
    client = VariableClient(block, networks, policy)
    observation, seen = np.zeros((2000, 4), np.float32), []
    greedy = agent.make_policy(learner.networks, evaluation=True).step(observation[:1], ())[0]
    for version, env_steps in enumerate((0, 1000, 2000, 9000)):
        block.publish(version, learner.parameters(), env_steps)
        client.update()
        seen.append((policy.step(observation, ())[0] != greedy).mean() * 1.5)
    # A random action is the greedy one in a third of the cases.
    assert seen == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.06)


def test_the_ladder_spreads_epsilon_over_the_envs():
    config = dataclasses.replace(SMALL, epsilon_start=0.5, epsilon_ladder=7.0)
    rates = explored(config) * 1.5  # A random action is the greedy one in a third of the cases.
    assert rates[0] == pytest.approx(0.5, abs=0.1)
    assert rates[1] == pytest.approx(0.5**8, abs=0.03)


def test_a_noisy_network_explores_without_epsilon_and_evaluates_with_the_means():
    agent = DQN(dataclasses.replace(SMALL, noisy=True))
    networks = agent.make_networks(SPEC)
    acting, evaluating = agent.make_policy(networks), agent.make_policy(networks, evaluation=True)
    observation = np.zeros((64, 4), np.float32)
    assert len(set(acting.step(observation, ())[0])) > 1  # Each env has noise of its own.
    first, second = (evaluating.step(observation, ())[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(set(first)) == 1
    for size in (p for name, p in networks.named_parameters() if name.endswith("_noise")):
        size.data.zero_()
    np.testing.assert_array_equal(acting.step(observation, ())[0], first)


def test_a_noisy_learner_draws_new_noise_at_each_step_and_continues_from_its_state():
    config = dataclasses.replace(SMALL, noisy=True, learning_rate=0.0)
    learner, batch = make_learner(config), make_batch()
    seen = [float(learn(learner, batch).metrics["loss"]) for _ in range(3)]
    assert len(set(seen)) == 3
    state = learner.save()
    expected = [float(learn(learner, batch).metrics["loss"]) for _ in range(2)]
    other = make_learner(config)
    other.restore(state)
    assert [float(learn(other, batch).metrics["loss"]) for _ in range(2)] == expected


def test_the_policys_choices_repeat_from_its_seed_and_from_its_saved_state():
    agent = DQN(SMALL)
    networks = agent.make_networks(SPEC)
    observation = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def act(policy, times=3):
        return [policy.step(observation, ())[0].tolist() for _ in range(times)]

    first, second = agent.make_policy(networks), agent.make_policy(networks)
    first.seed(3)
    second.seed(3)
    assert act(first) == act(second)
    second.restore(first.save())
    assert act(first) == act(second)
    second.seed(4)
    assert act(first) != act(second)


def test_actions_fit_the_spec():
    agent = DQN(SMALL)
    actor = PolicyActor(agent.make_policy(agent.make_networks(SPEC)), num_envs=5, seed=0)
    actor.observe_first(_timestep(0))
    actions = actor.select_action(np.zeros((5, 4), np.float32))
    assert actions.shape == (5, *SPEC.actions.shape) and actions.dtype == SPEC.actions.dtype
    for action in actions:
        SPEC.actions.validate(action)


def test_an_environment_with_other_actions_is_an_error_that_names_them():
    spec = SPEC._replace(actions=dm_specs.BoundedArray((2,), np.float32, -1, 1))
    with pytest.raises(ValueError, match=r"got BoundedArray.*expected one discrete action"):
        DQN(SMALL).make_networks(spec)


@pytest.mark.parametrize("outputs", [2, 4])
def test_a_network_that_does_not_fit_the_actions_is_an_error_in_actor_and_learner(outputs):
    agent = DQN(SMALL)
    networks = agent.make_networks(SPEC)
    networks.q_network = torch.nn.Linear(4, outputs)
    message = rf"shape \(\d+, {outputs}\), expected \(envs, 3\)"
    with pytest.raises(ValueError, match=message):
        agent.make_policy(networks).step(np.zeros((5, 4), np.float32), ())
    with pytest.raises(ValueError, match=message):
        learn(agent.make_learner(networks, SPEC), make_batch())


@pytest.mark.parametrize("shape, dtype", [((4, 84, 84), np.uint8), ((10, 10, 4), np.float32)])
def test_images_are_learned_from(shape, dtype):
    spec = SPEC._replace(observations=dm_specs.BoundedArray(shape, dtype, 0, 255))
    agent = DQN(dataclasses.replace(SMALL, hidden_sizes=(), batch_size=2, dueling=True))
    learner = agent.make_learner(agent.make_networks(spec), spec)
    batch = make_batch(size=2)
    images = np.random.default_rng(0).integers(0, 255, (2, *shape)).astype(dtype)
    data = batch.data._replace(observation=images, next_observation=images)
    before = learner.parameters()["q_network"]["encoder.images.0.layers.0.weight"].clone()
    learn(learner, batch._replace(data=data))
    after = learner.parameters()["q_network"]["encoder.images.0.layers.0.weight"]
    assert not np.array_equal(before, after)


def test_the_rate_limiter_leaves_room_for_a_burst_and_a_batch():
    config = dataclasses.replace(SMALL, samples_per_insert=16.0, insert_burst=64, min_replay_size=100)
    limiter = DQN(config).make_tables(SPEC)[0].info.rate_limiter_info
    assert limiter.samples_per_insert == 16.0
    assert limiter.min_size_to_sample == 100
    assert limiter.max_diff - 100 * 16 >= 64 * 16 + config.batch_size
    assert 100 * 16 - limiter.min_diff >= config.batch_size
