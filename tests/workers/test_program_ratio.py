"""The replay ratio at the end of a program: all items are in replay, and all that they allow is drawn."""

import dataclasses
import json
import types
from unittest import mock

import numpy as np
import pytest
from small_programs import SMALL, small_program

import launch
from agents.dqn import DQN
from agents.r2d2 import R2D2, R2D2Config
from examples.flows import DQNPlan
from framework import replay
from framework.checkpoints import Checkpointer
from framework.workers.last_samples import LastSamples

SIZES = {"hidden_sizes": (8,), "lstm_size": 8, "head_sizes": (8,), "samples_per_insert": 4.0}
PLAN = dataclasses.replace(SMALL, insert_burst=12, n_step=3)  # A call of a worker must fit in.
AGENTS = {
    "plan": DQNPlan(PLAN),
    "dqn": DQN(dataclasses.replace(SMALL, insert_burst=8, n_step=3)),
    "r2d2": R2D2(R2D2Config(unroll_length=6, burn_in=2, period=3, batch_size=8, insert_burst=8, **SIZES)),
}


CASES = [("dqn", "serial"), ("dqn", "threads"), ("dqn", "processes"), ("r2d2", "threads")]


@pytest.mark.parametrize(("name", "engine"), [*CASES, ("plan", "serial"), ("plan", "threads")])
def test_the_learner_ends_where_the_limiter_stops_it(name, engine, tmp_path):
    """On every engine, however late it ran the learner: within the limiter's window, at its lower end."""
    agent, steps = AGENTS[name], 600
    # The last evaluation waits, too. R2D2 has none. The actors in processes are elastic.
    settings = {"directory": tmp_path, "evaluate_period": 250 if name == "dqn" else None}
    settings["min_actors"] = 1 if engine == "processes" else None
    program = small_program(agent, num_actors=2, max_env_steps=steps, **settings)
    assert launch.launch(program, engine=engine)["env_steps"] == steps
    part = Checkpointer(tmp_path / "checkpoints").restore().part("replay")
    (table,) = json.loads((part / "manifest.json").read_text())["note"]["tables"]
    (items, samples), config = table["limiter"], agent.config
    # Of episodes of seven steps. R2D2's items wait for their last row; resets are rows, too.
    expected = steps * (8 / 7 / config.period if name == "r2d2" else 9 / 7)
    assert expected - 20 <= items <= expected
    window = config.insert_burst * config.samples_per_insert + config.batch_size
    ahead = samples - config.samples_per_insert * (items - config.min_replay_size)
    # A batch that is not complete, and two that were fetched ahead, were given back.
    assert window - 3 * config.batch_size < ahead <= window


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_an_actor_waits_for_what_is_coming_only(engine, monkeypatch):
    monkeypatch.setattr(launch, "get_node_context", lambda: types.SimpleNamespace(engine=engine))
    monkeypatch.setattr("framework.workers.last_samples._STARTS_S", 0.0)
    client = replay.EmbeddedClient([replay.Table.queue("queue", 2)], concurrent=False)
    counter = types.SimpleNamespace(get_counts=dict, wait_for=lambda *_, **__: None)
    writer = client.batch_writer()
    collector = types.SimpleNamespace(adders=[writer])
    last = LastSamples("actor-0", client, counter, "learner_steps", collector)
    full = types.SimpleNamespace(adders=[mock.Mock(**{"flush.side_effect": replay.DeadlineExceededError})])
    assert not LastSamples("actor-1", client, counter, "learner_steps", full).open()  # Its items come.
    rows = writer.append("steps", {"x": np.arange(3)})
    writer.create_items("queue", {"x": writer.slice("steps", "x", rows)})
    for drawn in range(3):
        assert not last.open(), drawn  # The third item waited for room.
        client.sample_batch("queue", 1, timeout=0)
    assert last.open()
    client.insert([np.array(1)], {"queue": 1.0})
    assert [last.open() for _ in range(2)] == [False, True]  # The reader stands still.
