"""Programs with several replay servers."""

from __future__ import annotations

import json

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO
from framework.checkpoints import Checkpointer
from framework.programs import RunConfig, make_program

CARTPOLE = "gymnasium:CartPole-v1"
CONFIG = DQNConfig(
    n_step=1, min_replay_size=100, max_replay_size=400, batch_size=16, samples_per_insert=4.0, insert_burst=32
)


def run(directory, engine, **settings):
    settings = {"max_env_steps": 1_200, "num_actors": 4, "envs_per_actor": 2, "replay_shards": 2} | settings
    config = RunConfig(
        directory=str(directory),
        evaluate_period=None,
        learner_log_period=25,
        checkpoint_period=400,
        **settings,
    )
    launch.launch(make_program(DQN(CONFIG), CARTPOLE, config), engine=engine)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["label"] == "learner"]
    return rows[-1], Checkpointer(directory / "checkpoints").restore()


def inserts(reader, part):
    """The numbers of inserts and samples of the server of this part."""
    (table,) = json.loads((reader.part(part) / "manifest.json").read_text())["note"]["tables"]
    return table["limiter"]


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_the_ratio_of_the_program_holds_and_all_shards_are_saved_and_restored(tmp_path, engine):
    _, saved = run(tmp_path, engine)
    assert {"replay-0", "replay-1"} <= set(saved.names)
    counts = [inserts(saved, f"replay-{index}") for index in range(2)]
    assert engine != "serial" or all(items > 100 for items, _ in counts)  # Processes may start late.
    row, saved = run(tmp_path, engine, max_env_steps=1_600)
    after = [inserts(saved, f"replay-{index}") for index in range(2)]
    assert all(now[0] >= before[0] for now, before in zip(after, counts, strict=True))
    items, samples = map(sum, zip(*after, strict=True))
    assert row["replay/inserted"] <= items and row["replay/size"] <= 400
    assert items > 1_200
    # The limiter of the agent's one table: 100 items without samples, and a window of 32 * 4 + 16 samples. At
    # the end the dataset gave back at most three batches.
    assert abs(4.0 * items - samples - 400) <= 144 + 3 * 16


def test_a_run_keeps_its_number_of_shards(tmp_path):
    run(tmp_path, "serial", max_env_steps=200)
    with pytest.raises(launch.NodeError, match=r"replay_shards: got 4, expected 2"):
        run(tmp_path, "serial", max_env_steps=400, replay_shards=4)
    with pytest.raises(launch.NodeError, match=r"replay_shards: got 1, expected 2"):
        run(tmp_path, "serial", max_env_steps=400, replay_shards=1)


def test_the_same_seed_gives_the_same_run(tmp_path):
    rows = [run(tmp_path / name, "serial", max_env_steps=400)[0] for name in ("a", "b")]
    first, second = [
        {name: value for name, value in row.items() if not name.startswith("time/")} for row in rows
    ]
    assert first == second and first["steps"] > 0


def test_what_shards_cannot_do():
    with pytest.raises(ValueError, match=r"replay_shards: got 2, expected a divisor of num_actors \(3\)"):
        RunConfig(num_actors=3, replay_shards=2)
    with pytest.raises(ValueError, match="replay_shards: got 2 with replay_backend 'reverb'"):
        RunConfig(num_actors=2, replay_shards=2, replay_backend="reverb")
    with pytest.raises(ValueError, match="replay_shards: got 2, expected 1: PPO"):
        make_program(PPO(), CARTPOLE, RunConfig(num_actors=2, replay_shards=2))
