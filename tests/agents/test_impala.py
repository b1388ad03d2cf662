"""IMPALA: every field of its config changes something; action, reward and state stay together."""

import collections
import dataclasses
import math
from unittest import mock

import agent_probes
import config_fields
import numpy as np
import pytest
import torch
from batches import learn
from dm_env import specs as dm_specs

from agents.impala import IMPALA, IMPALAConfig
from framework import environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.environments.testing import EchoEnvironment
from framework.networks import CONVOLUTIONS, as_tensors
from framework.types import Step
from framework.variables import VariableBlock, VariableClient

Info = collections.namedtuple("Info", "key")
Sample = collections.namedtuple("Sample", "info data")

SPEC = specs.EnvironmentSpec(
    dm_specs.Array((4,), np.float32),
    dm_specs.DiscreteArray(3, np.int64),
    dm_specs.Array((), np.float32),
    dm_specs.BoundedArray((), np.float32, 0, 1),
)
IMAGES = SPEC._replace(observations=dm_specs.BoundedArray((4, 44, 44), np.uint8, 0, 255))
SMALL = IMPALAConfig(hidden_sizes=(8,), batch_size=4, unroll_length=5)
LSTM = {"lstm_size": 6}


def make_batch(config=SMALL, seed=0, spec=SPEC):
    """Rows of random numbers, with the ends of episodes among them."""
    random = np.random.default_rng(seed)
    shape = (config.batch_size, config.unroll_length + 1)
    mask = np.ones(shape, np.float32)
    start = np.zeros(shape, np.bool_)
    mask[0, 2], start[0, 3] = 0, True
    start[:, 0] = True  # As the adder has it; the state says whether an episode begins there.
    mask[:, -1] = 0
    extras = {
        "log_prob": np.log(random.uniform(0.1, 0.9, shape)).astype(np.float32),
        "version": np.full(shape, -2),
    }
    if config.lstm_size:
        size = (config.batch_size, config.lstm_size)
        extras["state"] = tuple(random.normal(size=size).astype(np.float32) for _ in range(2))
    observation = random.normal(size=(*shape, *spec.observations.shape))
    if spec.observations.dtype == np.uint8:
        observation = random.integers(0, 255, observation.shape)
    data = Step(
        observation.astype(spec.observations.dtype),
        random.integers(0, 3, shape),
        (3 * random.normal(size=shape)).astype(np.float32),
        np.where(random.random(shape) < 0.9, 1, 0).astype(np.float32),
        start,
        extras,
        mask,
    )
    return Sample(Info(np.arange(config.batch_size, dtype=np.uint64)), data)


def make_learner(config=SMALL, spec=SPEC):
    torch.manual_seed(0)
    agent = IMPALA(config)
    return agent.make_learner(agent.make_networks(spec), spec)


# --- fields ---


def learned(config):
    return agent_probes.after_three_steps(make_learner(config), lambda seed: make_batch(config, seed))


def network(config):
    return agent_probes.network(IMPALA(config), SPEC)


def image_network(config):
    return str(IMPALA(config).make_networks(IMAGES))


def table(config):
    info = IMPALA(config).make_tables(SPEC)[0].info
    return str((info.max_size, info.max_times_sampled, info.rate_limiter_info))


def fetched(config):
    """What the dataset is asked to keep ready."""
    with mock.patch("framework.torch_agents.Dataset") as dataset:
        IMPALA(config).make_dataset(None)
    return str(dataset.call_args)


def ahead(config):
    """What the adder is asked to keep under way."""
    with mock.patch("framework.adders.UnrollAdder") as adder:
        IMPALA(config).make_adder(None, SPEC)
    return str(adder.call_args)


def written(config):
    """Shapes of the items."""
    return {k: v.shape for k, v in played(config, steps=40)[0].data.extras.items() if k != "state"}


def seen(config):
    """What observations look like."""
    environment = environments.make(EchoEnvironment, wrappers=IMPALA(config).environment_wrappers())
    environment.reset()
    return str(environment.step(np.array([2])).observation), str(environment.step(np.array([2])).observation)


def acted(config):
    """Log-probabilities of what is done."""
    torch.manual_seed(0)
    agent = IMPALA(config)
    policy = agent.make_policy(agent.make_networks(SPEC))
    observation = 10 * np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    return policy.step(observation, policy.initial_state(16))[1]["log_prob"]


PREVIOUS = {"previous_action_and_reward": True}
DECAYING = {"learning_rate_decay": 3}
ADAM = {"optimizer": "adam"}
# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    "unroll_length": (3, written, {}),
    "reward_clip": (0.5, learned, {}),
    "previous_action_and_reward": (True, seen, {}),
    "batch_size": (3, table, {}),
    "queue_batches": (5, table, {}),
    "unrolls_in_flight": (2, ahead, {}),
    "prefetch_batches": (3, fetched, {}),
    "vtrace_lambda": (0.5, learned, {}),
    "clip_rho": (2.0, learned, {}),
    "clip_c": (0.1, learned, {}),
    "value_coefficient": (1.0, learned, {"max_gradient_norm": None}),
    "entropy_coefficient": (0.5, learned, {}),
    "optimizer": ("adam", learned, {}),
    "rmsprop_decay": (0.5, learned, {}),
    "rmsprop_momentum": (0.5, learned, {}),
    "adam_epsilon": (1e-1, learned, {}),
    "max_gradient_norm": (1e-3, learned, {}),
    "torso": ("deep", image_network, {}),
    "hidden_sizes": ((9,), network, {}),
    "activation": ("relu", network, {}),
    "lstm_size": (7, network, {}),
    "actor_autocast": (True, acted, {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, IMPALAConfig)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


WRONG = [
    ("hidden_sizes", 64),
    ("batch_size", 2.0),
    ("autocast", "no"),
    ("entropy_coefficient", math.inf),
    ("clip_rho", math.nan),
    ("lstm_size", "8"),
    ("device", "gpu"),
    ("unroll_length", 1),
    ("batch_size", 0),
    ("queue_batches", 0),
    ("unrolls_in_flight", 0),
    ("hidden_sizes", (0,)),
    ("lstm_size", 0),
    ("learning_rate_decay", 0),
    ("prefetch_batches", -1),
    ("clip_rho", -1.0),
    ("clip_c", -1.0),
    ("value_coefficient", -1.0),
    ("entropy_coefficient", -0.1),
    ("learning_rate", -1.0),
    ("rmsprop_momentum", -0.1),
    ("adam_epsilon", -1.0),
    ("reward_clip", 0.0),
    ("max_gradient_norm", 0.0),
    ("discount", 1.1),
    ("vtrace_lambda", 2.0),
    ("learning_rate_end", -0.1),
    ("rmsprop_decay", 1.5),
    ("optimizer", "sgd"),
    ("torso", "wide"),
    ("activation", "sine"),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(IMPALAConfig, field, value)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch(SMALL))


@pytest.mark.parametrize("clip, reward", [(None, 102.0), (0.5, 0.5)])
def test_the_clipped_reward_is_what_the_policy_sees(clip, reward):
    config = dataclasses.replace(SMALL, previous_action_and_reward=True, reward_clip=clip)
    wrappers = IMPALA(config).environment_wrappers()
    environment = environments.make(EchoEnvironment, options={"first": 1}, wrappers=wrappers)
    environment.reset()
    assert environment.step(np.array([2])).observation["reward"].tolist() == [reward]


def test_several_choices_may_count_from_anywhere_and_have_any_shape():
    low, high = np.array([[1, 5], [0, -1]]), np.array([[2, 7], [0, 1]])
    spec = SPEC._replace(actions=dm_specs.BoundedArray((2, 2), np.int32, low, high))
    learner = make_learner(dataclasses.replace(SMALL, clip_rho=1.01, clip_c=1.01), spec)
    policy = IMPALA(SMALL).make_policy(learner.networks)
    batch = make_batch()
    observation = batch.data.observation
    envs, rows = observation.shape[:2]
    action, extras, _ = policy.step(observation.reshape(-1, 4), ())
    assert action.shape == (envs * rows, 2, 2) and action.dtype == np.int32
    assert (action.min(0) == low).all() and (action.max(0) == high).all()
    action[3] = 0  # as in a closing row, though there is no such action
    data = batch.data._replace(
        action=action.reshape(envs, rows, 2, 2),
        extras={name: value.reshape(envs, rows) for name, value in extras.items()},
    )
    data.mask[0, 3] = 0
    metrics = learn(learner, batch._replace(data=data)).metrics
    assert (
        metrics["rho_clipped"] == metrics["c_clipped"] == 0
    )  # the learner sees what was done: all weights are 1
    assert metrics["policy_loss"].isfinite()


@pytest.mark.parametrize("clip_c, share", [(0.5, 1.0), (1.5, 0.0)])
def test_the_share_of_clipped_traces_is_logged(clip_c, share):
    config = dataclasses.replace(SMALL, clip_rho=1.01, clip_c=clip_c)
    learner, batch = make_learner(config), make_batch(config)
    policy = IMPALA(config).make_policy(learner.networks)
    actions, extras, _ = policy.step(batch.data.observation.reshape(-1, 4), ())
    shape = batch.data.action.shape
    data = batch.data._replace(
        action=actions.reshape(shape), extras={k: v.reshape(shape) for k, v in extras.items()}
    )
    metrics = learn(learner, batch._replace(data=data)).metrics
    assert metrics["c_clipped"] == share and metrics["rho_clipped"] == 0


def test_actions_of_real_numbers_are_learned_as_sampled():
    torch.manual_seed(0)
    agent = IMPALA(SMALL)
    spec = SPEC._replace(actions=dm_specs.BoundedArray((2,), np.float32, -0.1, 0.1))
    networks = agent.make_networks(spec)
    policy = agent.make_policy(networks)
    observation = specs.zeros(spec.observations, (6,))
    action, extras, _ = policy.step(observation, policy.initial_state(6))
    assert np.abs(action).max() <= 0.1 < np.abs(extras["action"] * 0.1).max()
    acted, _ = networks.actor_critic.step(as_tensors(observation), policy.initial_state(6))
    log_prob = acted.log_prob(torch.as_tensor(extras["action"]))
    np.testing.assert_allclose(extras["log_prob"], log_prob.detach(), rtol=1e-5)


# --- action, reward and state stay together ---


def played(config, steps=200, truncate=False, envs=3, episode_length=7, seed=0):
    """One batch of everything that an actor of three envs wrote, the networks that acted, and the table."""
    torch.manual_seed(seed)
    config = dataclasses.replace(config, queue_batches=1000)
    agent = IMPALA(config)
    environment = environments.make(
        EchoEnvironment,
        num_envs=envs,
        options={"episode_length": episode_length, "truncate": truncate},
        wrappers=agent.environment_wrappers(),
    )
    spec = specs.make_environment_spec(environment)
    networks = agent.make_networks(spec)
    tables = agent.make_tables(spec)
    client = replay.EmbeddedClient(tables, concurrent=False)
    adder = agent.make_adder(client, spec)
    actor = PolicyActor(agent.make_policy(networks), adder, num_envs=envs, seed=seed)
    loop = EnvironmentLoop(environment, actor)
    for _ in range(steps // envs):
        loop.step()
    adder.flush()
    return client.sample_batch("queue", tables[0].info.current_size), networks, spec


VARIANTS = {
    "feed-forward": {},
    "lstm": LSTM,
    "previous action and reward": PREVIOUS,
    "lstm, previous action and reward": {**LSTM, **PREVIOUS},
}


@pytest.mark.parametrize("truncate", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_rewards_tell_the_observation_and_action_of_their_row(changes, truncate):
    data = played(dataclasses.replace(SMALL, **changes), truncate=truncate)[0].data
    real = data.mask == 1
    assert not real[:, -1].any()
    with_previous = "previous_action_and_reward" in changes
    observation = data.observation["observation"] if with_previous else data.observation
    np.testing.assert_array_equal(data.reward[real], (100 * observation[..., 0] + data.action)[real])
    # The next row goes on where this one ended: observations count time steps.
    steps = np.diff(observation[..., 0], axis=1)
    assert (steps[real[:, :-1]] == 1).all()
    # A closing row that is not the item's own last row ends an episode.
    before, after, discount = real[:, :-2], real[:, 1:-1], data.discount[:, :-2]
    assert (before & ~after).any() and (discount[before & ~after] == float(truncate)).all()
    assert (discount[before & after] == 1).all()
    if with_previous:
        np.testing.assert_array_equal(data.observation["action"][:, 1:][real[:, :-1]], data.action[real])
        np.testing.assert_array_equal(data.observation["reward"][:, 1:][real[:, :-1]], data.reward[real])
        begins = data.start_of_episode.copy()
        begins[:, 0] = False  # The first rows of unrolls; their episodes began before, most of them.
        assert begins.any()
        assert not data.observation["action"][begins].any()
        assert not data.observation["reward"][begins].any()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_learner_gives_every_action_the_probability_that_the_actor_gave_it(changes):
    """Unrolled from the stored state over the ends of episodes, it is where the actor was, step by step."""
    config = dataclasses.replace(SMALL, **changes)
    sample, networks, _ = played(config)
    data = sample.data
    with torch.no_grad():
        state = tuple(torch.as_tensor(part) for part in data.extras.get("state", ()))
        observation = torch.utils._pytree.tree_map(torch.as_tensor, data.observation)
        policy, _ = networks.actor_critic.unroll(observation, state, torch.as_tensor(data.start_of_episode))
        log_probs = policy.log_prob(torch.as_tensor(data.action)).numpy()
    real = data.mask == 1
    np.testing.assert_allclose(log_probs[real], data.extras["log_prob"][real], atol=1e-5)
    if config.lstm_size:
        assert np.count_nonzero(data.extras["state"][0].any(-1) & real[:, 0]) > 10
        assert data.extras["state"][0].shape == (len(real), config.lstm_size)
        # The test can fail: without the state, or without a new start, the probabilities are others.
        for wrong in (
            (tuple(torch.zeros_like(part) for part in state), torch.as_tensor(data.start_of_episode)),
            (state, torch.zeros(real.shape, dtype=torch.bool)),
        ):
            other = networks.actor_critic.unroll(observation, *wrong)[0]
            other = other.log_prob(torch.as_tensor(data.action)).detach().numpy()
            assert np.abs(other[real] - data.extras["log_prob"][real]).max() > 1e-4


def test_on_policy_nothing_is_clipped_and_nothing_is_stale():
    config = dataclasses.replace(SMALL, **LSTM)
    sample, networks, spec = played(config)
    result = learn(IMPALA(config).make_learner(networks, spec), sample)
    assert result.metrics["staleness"] == 0
    # Rounding makes some ratios larger than 1 by a hair.
    config = dataclasses.replace(config, clip_rho=1.0 + 1e-4)
    result = learn(IMPALA(config).make_learner(played(config)[1], spec), sample)
    assert result.metrics["rho_clipped"] == 0
    assert result.metrics["transitions"] == (sample.data.mask[:, :-1] == 1).sum()


# --- the loss ---


@pytest.mark.parametrize("changes", [{}, LSTM], ids=["feed-forward", "lstm"])
def test_the_loss_against_a_loop(changes):
    config = dataclasses.replace(
        SMALL, **changes, discount=0.9, reward_clip=2.0, entropy_coefficient=0.1, clip_rho=0.8, clip_c=0.7
    )
    learner, batch = make_learner(config), make_batch(config)
    data, model = batch.data, learner.networks.actor_critic
    policy_losses, squared_errors, entropies = [], [], []
    for n in range(config.batch_size):
        state = tuple(torch.as_tensor(part[n : n + 1]) for part in data.extras.get("state", ()))
        log_probs, entropy, values = [], [], []
        with torch.no_grad():
            for t in range(config.unroll_length + 1):
                if t > 0 and data.start_of_episode[n, t]:
                    state = model.initial_state(1)
                observation = torch.as_tensor(data.observation[n : n + 1, t])
                features = model.torso(observation)
                if model.core is not None:
                    features, state = model.core.step(features, state)
                probabilities = model.policy(features).logits.softmax(-1)[0].double().numpy()
                log_probs.append(np.log(probabilities[data.action[n, t]]))
                entropy.append(-(probabilities * np.log(probabilities)).sum())
                values.append(float(model.value(features)))
        ratios = np.exp(np.array(log_probs) - data.extras["log_prob"][n])
        rewards = np.clip(data.reward[n], -2, 2)
        targets = list(values)
        for t in reversed(range(config.unroll_length)):
            if data.mask[n, t]:
                discount = 0.9 * data.discount[n, t]
                delta = min(0.8, ratios[t]) * (rewards[t] + discount * values[t + 1] - values[t])
                goes_on = data.mask[n, t + 1] and t + 1 < config.unroll_length
                ahead = targets[t + 1] - values[t + 1] if goes_on else 0.0
                targets[t] = values[t] + delta + discount * min(0.7, ratios[t]) * ahead
        for t in range(config.unroll_length):
            if data.mask[n, t]:
                discount = 0.9 * data.discount[n, t]
                advantage = min(0.8, ratios[t]) * (rewards[t] + discount * targets[t + 1] - values[t])
                policy_losses.append(-log_probs[t] * advantage)
                squared_errors.append((targets[t] - values[t]) ** 2)
                entropies.append(entropy[t])
    expected = np.mean(policy_losses) + 0.5 * 0.5 * np.mean(squared_errors) - 0.1 * np.mean(entropies)
    metrics = learn(learner, batch).metrics
    assert metrics["loss"].item() == pytest.approx(expected, rel=1e-4)
    assert metrics["transitions"] == config.batch_size * config.unroll_length - 1
    assert metrics["staleness"] == 2 and metrics["staleness_max"] == 2


def test_staleness_is_counted_in_learner_steps():
    agent, learner = IMPALA(SMALL), make_learner()
    networks = agent.make_networks(SPEC)
    policy, block = agent.make_policy(networks), VariableBlock(learner.parameters())
    client = VariableClient(block, networks, policy)
    ages = []
    for seed in range(4):
        if seed == 2:
            block.publish(seed, learner.parameters())
            client.update()
        batch = make_batch(seed=seed)
        age = policy.step(np.zeros((1, 4), np.float32), ())[1]["version"]
        batch.data.extras["version"][:] = age
        ages.append(learn(learner, batch).metrics["staleness"].item())
    assert ages == [0, 1, 0, 1]


# --- acting ---


def test_the_policys_choices_repeat_from_its_seed_and_from_its_saved_state():
    agent = IMPALA(SMALL)
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
    greedy = agent.make_policy(networks, evaluation=True)
    assert act(greedy)[0] == act(greedy)[1]


ACTIONS = {
    "discrete": dm_specs.DiscreteArray(3, np.int32),
    "several": dm_specs.BoundedArray((2,), np.int64, 0, [2, 4]),
}


@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("changes", [{}, LSTM], ids=["feed-forward", "lstm"])
def test_actions_fit_the_spec_and_can_be_learned_from(actions, changes):
    spec = SPEC._replace(actions=actions)
    config = dataclasses.replace(SMALL, **changes)
    agent = IMPALA(config)
    policy = agent.make_policy(agent.make_networks(spec))
    for _ in range(5):
        action, extras, _ = policy.step(np.zeros((5, 4), np.float32), policy.initial_state(5))
        for env in action:
            spec.actions.validate(env)
        assert extras["log_prob"].shape == (5,)
    batch = make_batch(config)
    shape = batch.data.reward.shape
    batch = batch._replace(data=batch.data._replace(action=np.zeros((*shape, *actions.shape), actions.dtype)))
    assert np.isfinite(learn(make_learner(config, spec), batch).metrics["loss"].item())


def test_values_are_float32_in_mixed_precision():
    model = make_learner(SMALL).networks.actor_critic
    torch.nn.init.zeros_(model.value.weight)
    torch.nn.init.constant_(model.value.bias, 90.1)  # bfloat16 has 90 and 90.5.
    data = as_tensors(make_batch(SMALL).data)
    with torch.autocast("cpu", torch.bfloat16):
        _, values = model.unroll(data.observation, (), data.start_of_episode)
    torch.testing.assert_close(values, torch.full_like(values, 90.1))
    assert values.dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("torso", CONVOLUTIONS)
def test_images_are_learned_from(torso, autocast):
    config = dataclasses.replace(
        SMALL, torso=torso, autocast=autocast, actor_autocast=autocast, batch_size=2, unroll_length=3, **LSTM
    )
    learner, batch = make_learner(config, IMAGES), make_batch(config, spec=IMAGES)
    before = [p.detach().clone() for p in learner.networks.actor_critic.torso.parameters()]
    assert np.isfinite(learn(learner, batch).metrics["loss"].item())
    after = list(learner.networks.actor_critic.torso.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    policy = IMPALA(config).make_policy(learner.networks)
    state = policy.initial_state(2)
    for _ in range(2):
        _, extras, state = policy.step(batch.data.observation[:, 0], state)
        assert extras["log_prob"].dtype == extras["state"][0].dtype == np.float32
