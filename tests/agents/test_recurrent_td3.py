"""Recurrent TD3: every field changes something, the losses are those of a loop, and the memory's part."""

import dataclasses

import agent_probes
import config_fields
import numpy as np
import pytest
import test_r2d2
import torch
from batches import learn
from test_td3 import FIELDS as TD3_FIELDS
from test_td3 import NOISY

import launch
from agents.recurrent_td3 import RecurrentTD3, RecurrentTD3Config, RecurrentTD3Networks
from framework import environments, replay
from framework.environments.testing import EchoEnvironment, FakeEnvironment
from framework.programs import RunConfig, make_program
from framework.specs import BoundedArray

SPEC = test_r2d2.SPEC._replace(actions=BoundedArray((2,), np.float32, [-2, 0], [2, 1]))
SMALL = RecurrentTD3Config(
    unroll_length=6,
    burn_in=3,
    period=3,
    batch_size=4,
    encoder_sizes=(8,),
    lstm_size=6,
    hidden_sizes=(8, 8),
)


def make_batch(config=SMALL, seed=0):
    """Rows of random numbers, with the ends of truncated and of terminated episodes among them."""
    batch = test_r2d2.make_batch(config, seed)
    unit = np.random.default_rng(seed).random((*batch.data.mask.shape, 2))
    action = (unit * [4, 1] - [2, 0]).astype(np.float32)
    return batch._replace(data=batch.data._replace(action=action))


def make_learner(config=SMALL):
    torch.manual_seed(0)
    agent = RecurrentTD3(config)
    return agent.make_learner(agent.make_networks(SPEC), SPEC)


def learned(config):
    return agent_probes.after_three_steps(make_learner(config), lambda seed: make_batch(config, seed))


def table(config):
    return agent_probes.table(RecurrentTD3(config), SPEC)


def network(config):
    return agent_probes.network(RecurrentTD3(config), SPEC)


def acted(config):
    """The second actions of 50 envs, before learning begins."""
    agent = RecurrentTD3(config)
    torch.manual_seed(0)
    policy = agent.make_policy(agent.make_networks(SPEC))
    state = policy.initial_state(50)
    for _ in range(2):
        action, _, state = policy.step(np.zeros((50, 4), np.float32), state)
    return action


def written(config):
    """How many rows items have, and how many items 60 steps give."""
    tables = [replay.Table.queue("replay", 100)]
    client = replay.EmbeddedClient(tables, concurrent=False)
    adder = RecurrentTD3(config).make_adder(client, SPEC)
    environment = environments.make(FakeEnvironment, options={"spec": SPEC})
    extras = {"state": (np.zeros((1, 6), np.float32),) * 2}
    adder.add_first(environment.reset())
    for _ in range(60):
        action = np.zeros((1, 2), np.float32)
        adder.add(action, environment.step(action), extras)
    adder.flush()
    return client.sample_batch("replay", 1).data.reward.shape[1], tables[0].info.current_size


def seen(config):
    """What observations look like."""
    environment = environments.make(EchoEnvironment, wrappers=RecurrentTD3(config).environment_wrappers())
    environment.reset()
    return str(environment.step(np.array([2])).observation)


# See helpers/config_fields.py.
FIELDS = {
    **TD3_FIELDS,
    **config_fields.of_gradients(learned, make_learner),
    **config_fields.of_replay(learned, table),
    "n_step": (3, learned, {}),
    "reward_clip": (0.1, learned, {}),
    "prioritized": (True, table, {}),
    "priority_exponent": (0.3, table, {"prioritized": True}),
    "importance_sampling_exponent": (0.9, learned, {"prioritized": True}),
    "priority_eta": (0.5, learned, {"prioritized": True}),
    "critic_learning_rate": (1e-2, learned, {}),
    "num_critics": (3, network, {}),
    "actor_delay": (3, learned, {}),
    "target_update_period": (3, learned, {}),
    "smoothing_std": (0.1, learned, {}),
    "smoothing_clip": (0.1, learned, {"smoothing_std": 1.0}),
    "random_start": (False, acted, {}),
    "exploration_std": (0.3, acted, NOISY),
    "exploration_correlation": (0.85, acted, NOISY),
    "exploration_ladder": (2.0, acted, NOISY),
    "hidden_sizes": ((8,), network, {}),
    "layer_norm": (True, network, {}),
    "unroll_length": (5, written, {}),
    "burn_in": (2, written, {}),
    "period": (2, written, {}),
    "previous_action_and_reward": (True, seen, {}),
    "encoder_sizes": ((9,), network, {}),
    "lstm_size": (7, network, {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, RecurrentTD3Config)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unroll_length", 0),
        ("burn_in", -1),
        ("period", 21),
        ("encoder_sizes", (0,)),
        ("lstm_size", 0),
        ("priority_eta", 1.1),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(RecurrentTD3Config, field, value)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch())


@pytest.mark.parametrize("lstm_size", [6, None], ids=["memory", "no memory"])
def test_the_losses_against_a_loop(lstm_size):
    """With the ends of truncated and of terminated episodes, and n steps from some rows only."""
    config = dataclasses.replace(
        SMALL, lstm_size=lstm_size, prioritized=True, n_step=2, smoothing_std=0.0, actor_delay=1,
        discount=0.9, reward_clip=2.0,
    )  # fmt: skip
    learner, batch = make_learner(config), make_batch(config)
    with torch.no_grad():
        for parameter in learner.targets.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    nets, targets, data = learner.networks, learner.targets, batch.data
    scale, centre = torch.tensor([2.0, 0.5]), torch.tensor([0.0, 0.5])
    weights = (config.batch_size * batch.info.probability) ** -config.importance_sampling_exponent
    weights /= weights.max()
    last = data.mask.shape[1] - 1
    critic, actor, count, priorities = 0.0, 0.0, 0, []
    for n in range(config.batch_size):
        with torch.no_grad():
            features, rated = (
                test_r2d2.unrolled(memory, data, n, config.burn_in)
                for memory in (nets.memory, targets["memory"])
            )
            next_values = targets["critics"](rated, targets["policy"](rated)).amin(0)
            values = nets.critics(features, (torch.as_tensor(data.action[n]) - centre) / scale)
            own = nets.critics(features, nets.policy(features))[0]
        sizes = []
        for t in range(config.burn_in, last):
            if not data.mask[n, t]:
                continue
            target, factor, row = 0.0, 1.0, t
            while row < min(t + 2, last) and data.mask[n, row]:
                target += factor * float(np.clip(data.reward[n, row], -2, 2))
                factor *= 0.9 * float(data.discount[n, row])
                row += 1
            target += factor * float(next_values[row]) if factor else 0.0
            errors = [target - float(value) for value in values[:, t]]
            critic += weights[n] * 0.5 * sum(error**2 for error in errors)
            actor -= float(own[t])
            sizes.append(np.mean(np.abs(errors)))
            count += 1
        priorities.append(0.9 * max(sizes) + 0.1 * np.mean(sizes) + 1e-6)
    result = learn(learner, batch)
    assert result.metrics["transitions"] == count
    assert result.metrics["critic_loss"].item() == pytest.approx(critic / count, rel=1e-4)
    assert result.metrics["actor_loss"].item() == pytest.approx(actor / count, rel=1e-4, abs=1e-5)
    assert result.priorities.tolist() == pytest.approx(priorities, rel=1e-4)


@pytest.mark.parametrize("frozen", ["learning_rate", "critic_learning_rate"])
def test_the_memory_learns_from_the_critics(frozen):
    learner = make_learner(dataclasses.replace(SMALL, actor_delay=1, **{frozen: 0.0}))
    before = {name: p.detach().clone() for name, p in learner.networks.named_parameters()}
    learn(learner, make_batch())
    moved = {n.split(".")[0] for n, p in learner.networks.named_parameters() if not p.equal(before[n])}
    assert moved == ({"memory", "critics"} if frozen == "learning_rate" else {"policy"})


def test_the_policy_stores_the_state_before_each_step():
    networks = RecurrentTD3Networks(SMALL, SPEC)
    policy = RecurrentTD3(SMALL).make_policy(networks)
    observation = np.ones((3, 4), np.float32)
    state = policy.initial_state(3)
    _, extras, state = policy.step(observation, state)
    assert not any(part.any() for part in extras["state"])
    after = networks.memory.step(torch.ones(3, 4), networks.memory.initial_state(3))[1]
    _, extras, _ = policy.step(observation, state)
    for part, expected in zip(extras["state"], after, strict=True):
        np.testing.assert_allclose(part, expected.detach().numpy(), rtol=1e-6)
    assert policy.variables == ("memory", "policy")


def test_networks_without_a_memory_are_refused():
    agent = RecurrentTD3(SMALL, lambda c, s: RecurrentTD3Networks(dataclasses.replace(c, lstm_size=None), s))
    with pytest.raises(ValueError, match="networks without a memory and lstm_size 6"):
        agent.make_networks(SPEC)


@pytest.mark.parametrize(
    "engine, settings",
    [("serial", {"inference": "alternating"}), ("threads", {"inference": "server"}), ("processes", {})],
    ids=["serial", "threads", "processes"],
)
def test_recurrent_td3_in_a_program(engine, settings):
    config = dataclasses.replace(
        SMALL,
        min_replay_size=8,
        insert_burst=8,
        samples_per_insert=2.0,
        prioritized=True,
        previous_action_and_reward=True,
    )
    run = RunConfig(num_actors=2, envs_per_actor=2, max_env_steps=400, evaluate_period=None, **settings)
    program = make_program(RecurrentTD3(config), "testing:PendulumWithoutVelocity", run)
    result = launch.launch(program, engine=engine)
    assert result["env_steps"] == 400 and result["learner_steps"] > 0
