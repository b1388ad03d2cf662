"""DQfD: its loss against a loop, its fields, and how demonstrations come into a program and stay there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from agent_batches import flat, learn, make_learner
from config_fields import by, unchanged

import launch
from agents.dqfd import DQfD, DQfDConfig, mountain_car
from agents.dqn import DQNConfig
from framework import datasets, environments, replay, specs
from framework.adders import REPLAY_TABLE
from framework.datasets import DEMONSTRATIONS_TABLE
from framework.environments.testing import EchoEnvironment, FakeEnvironment
from framework.loggers import read_jsonl
from framework.programs import RunConfig, make_program

SPEC = specs.make_environment_spec(environments.make(FakeEnvironment))
# Three episodes of 5 steps: 3 * (5 + 2 - 1) items.
SIZES = {"hidden_sizes": (8,), "batch_size": 8, "min_replay_size": 4, "insert_burst": 16}
SOURCE = f"{__name__}:episodes(count=3)"
SMALL = DQfDConfig(demonstrations=SOURCE, n_step=2, samples_per_insert=4.0, pretraining_steps=5, **SIZES)
NUM_ITEMS = 18


def episodes(count=1, seed=7):
    environment = environments.make(FakeEnvironment, num_envs=1, seed=seed)
    return datasets.record(environment, lambda observation: np.array([1]), count)


def make_client(agent, items=16):
    """Replay of the agent's tables, with `items` items of an actor."""
    client = replay.EmbeddedClient(
        [table.replace(seed=0) for table in agent.make_tables(SPEC)], concurrent=False
    )
    adder, environment = (
        agent.make_adder(client, SPEC),
        environments.make(FakeEnvironment, num_envs=1, seed=0),
    )
    adder.add_first(environment.reset())
    while client.server_info()[REPLAY_TABLE].current_size < items:
        adder.add(np.array([0]), environment.step(np.array([0])))
        adder.flush()
    return client


def draw(agent, count, client=None):
    """The first batches of the agent's dataset."""
    with agent.make_dataset(client or make_client(agent)) as dataset:
        return [next(dataset) for _ in range(count)]


def numbers(batch):
    return batch.info.key >> np.uint64(61)


def test_the_loss_against_a_loop():
    config = dataclasses.replace(
        SMALL, pretraining_steps=0, demonstration_fraction=0.5, max_gradient_norm=None, discount=0.9,
        margin=0.5, margin_coefficient=2.0, n_step_coefficient=0.7, l2_coefficient=0.01,
        demonstration_priority=3.0,
    )  # fmt: skip
    learner = make_learner(DQfD(config), SPEC)
    network, target = learner.networks.q_network, learner.targets["q_network"]
    (batch,) = draw(DQfD(config), 1)
    assert sorted(numbers(batch).tolist()) == [0] * 4 + [1] * 4
    data, expected, priorities = batch.data, 0.0, []
    weights = (batch.info.probability * batch.info.table_size) ** -config.importance_sampling_exponent
    with torch.no_grad():
        for i, weight in enumerate(weights / weights.max()):
            values, action = network(data.observation[i]), int(data.action[i])
            each = 0.0
            for source, coefficient in ((data.extras, 1.0), (data, 0.7)):
                following = source.next_observation[i]
                best = network(following).argmax()
                bootstrap = 0.9 * source.discount[i] * target(following)[best]
                error = abs(float(source.reward[i] + bootstrap - values[action]))
                each += coefficient * (0.5 * error**2 if error <= 1 else error - 0.5)
            if numbers(batch)[i] == 0:
                margins = values + 0.5
                margins[action] -= 0.5
                each += 2.0 * float(margins.max() - values[action])
            priorities.append(error + (3.0 if numbers(batch)[i] == 0 else 0.001))
            expected += weight * each / 8
    expected += 0.01 * sum(float(p.detach().square().sum()) for p in learner.networks.parameters())
    result = learn(learner, batch)
    assert float(result.metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(result.priorities, priorities, rtol=1e-4)


# --- fields that DQN's config does not have ---


def learned(agent, spec):
    learner = make_learner(agent, spec)
    seen = [np.asarray(learn(learner, batch).priorities) for batch in draw(agent, 3)]
    return np.concatenate([*seen, flat(learner.networks).numpy()])


def shares(agent, spec=SPEC):
    return [int((numbers(batch) == 0).sum()) for batch in draw(agent, 8)]


FIELDS = {
    **by(shares, pretraining_steps=2),
    **by(learned, demonstration_priority=0.1, margin=0.2, margin_coefficient=0.3),
    **by(learned, n_step_coefficient=0.3, l2_coefficient=0.1),
}


def test_every_field_is_in_the_table():
    own = {field.name for field in dataclasses.fields(DQfDConfig)}
    assert {*FIELDS} == own - {field.name for field in dataclasses.fields(DQNConfig)}


def test_every_field_changes_something():
    assert unchanged(DQfD(SMALL), SPEC, FIELDS) == []


def test_demonstrations_are_needed_and_fit_the_environment():
    with pytest.raises(ValueError, match=r"demonstrations: got None, expected a folder"):
        make_program(DQfD(), FakeEnvironment)
    with pytest.raises(ValueError, match="got the observation"):
        make_program(DQfD(SMALL), EchoEnvironment)
    with pytest.raises(ValueError, match=r"^demonstrations: got 3, expected "):
        DQfDConfig(demonstrations=3)


# --- demonstrations in replay ---


def test_batches_hold_the_fraction_exactly_after_pretraining():
    config = dataclasses.replace(SMALL, demonstration_fraction=0.3)
    counts = shares(DQfD(config))
    assert counts[:5] == [8] * 5
    assert sum(counts[5:]) == pytest.approx(0.3 * 8 * 3, abs=1)


def test_demonstrations_are_written_once_and_whole():
    agent = DQfD(SMALL)
    client = make_client(agent)
    draw(agent, 7, client)
    info = client.server_info()[DEMONSTRATIONS_TABLE]
    assert info.current_size == info.rate_limiter_info.insert_stats.completed == NUM_ITEMS
    # What pre-training is left follows from what was drawn before.
    again = draw(agent, 1, client)
    assert client.server_info()[DEMONSTRATIONS_TABLE].rate_limiter_info.insert_stats.completed == NUM_ITEMS
    assert (numbers(again[0]) == 1).sum() == 6


def test_a_table_that_was_cut_short_is_written_again():
    """Nothing was drawn from it then."""
    agent = DQfD(SMALL)
    client = make_client(agent)
    DQfD(dataclasses.replace(SMALL, demonstrations=f"{__name__}:episodes(count=1)")).make_dataset(client)
    assert 0 < client.server_info()[DEMONSTRATIONS_TABLE].current_size < NUM_ITEMS
    draw(agent, 1, client)
    assert client.server_info()[DEMONSTRATIONS_TABLE].current_size == NUM_ITEMS


def test_demonstrations_are_written_again_for_a_server_that_has_lost_them(monkeypatch):
    monkeypatch.setattr(datasets.Dataset, "look_s", 0.1)
    agent = DQfD(SMALL)
    client = replay.EmbeddedClient(agent.make_tables(SPEC))
    with agent.make_dataset(client) as dataset:
        next(dataset)
        client.reset(DEMONSTRATIONS_TABLE)  # As a restart does.
        for _ in range(4):  # More batches than are fetched ahead.
            assert set(numbers(next(dataset))) == {0}
    assert client.server_info()[DEMONSTRATIONS_TABLE].current_size == NUM_ITEMS


def run(agent, directory, engine, environment=FakeEnvironment, **changes):
    settings = {"num_actors": 2, "envs_per_actor": 2, "learner_log_period": 1, "directory": directory}
    settings |= {"max_env_steps": 200, "evaluate_period": 200, "num_evaluation_episodes": 2}
    return launch.launch(make_program(agent, environment, RunConfig(**settings | changes)), engine=engine)


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("serial", {}),
        pytest.param(
            "processes", {"replay_shards": 2, "inference": "alternating+server"}, marks=pytest.mark.release
        ),
    ],
    ids=["serial", "processes"],
)
def test_a_program_pretrains_and_keeps_its_demonstrations(tmp_path, engine, changes):
    result = run(DQfD(SMALL), tmp_path, engine, **changes)
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", 200)
    # The run is resumed: no demonstration is written again, and no step is pre-training.
    run(DQfD(SMALL), tmp_path, "threads", max_env_steps=400, **changes)
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if row["label"] == "learner"]
    fractions = [row["demonstration_fraction"] for row in rows]
    assert fractions[:5] == [1.0] * 5 and set(fractions[5:]) == {0.25}
    assert rows[-1]["replay/demonstrations/size"] == NUM_ITEMS
    assert rows[-1]["replay/demonstrations/inserted"] == NUM_ITEMS


def test_pretraining_learns_what_the_demonstrator_does():
    config = DQfDConfig(
        demonstrations="agents.dqfd:mountain_car(count=2)", hidden_sizes=(64,), learning_rate=3e-3
    )
    spec = specs.make_environment_spec(environments.make("gymnasium:MountainCar-v0"))
    torch.manual_seed(0)
    agent = DQfD(config)
    networks = agent.make_networks(spec)
    learner = agent.make_learner(networks, spec)
    client = replay.EmbeddedClient([t.replace(seed=0) for t in agent.make_tables(spec)], concurrent=False)
    with agent.make_dataset(client) as dataset:
        for _ in range(400):
            batch = next(dataset)
            learn(learner, batch)
    policy, agreed = agent.make_policy(networks, evaluation=True), []
    for episode in mountain_car(count=2, seed=1):
        actions, _, _ = policy.step(episode.observation[:-1], policy.initial_state(len(episode.reward) - 1))
        agreed += (actions == episode.action[:-1]).tolist()
    assert np.mean(agreed) > 0.85
