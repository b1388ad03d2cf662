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
    settings |= {"evaluate_period": None, "learner_log_period": 25, "checkpoint_period": 400}
    config = RunConfig(directory=str(directory), **settings)
    launch.launch(make_program(DQN(CONFIG), CARTPOLE, config), engine=engine)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["label"] == "learner"]
    return rows[-1], Checkpointer(directory / "checkpoints").restore()


def inserts(reader, part):
    """The numbers of inserts and samples of the server of this part."""
    (table,) = json.loads((reader.part(part) / "manifest.json").read_text())["note"]["tables"]
    return table["limiter"]


def check_ratio(row, saved):
    """Returns the inserts of each server."""
    counts = [inserts(saved, f"replay-{index}") for index in range(2)]
    items, samples = map(sum, zip(*counts, strict=True))
    assert row["replay/inserted"] <= items and row["replay/size"] <= 400
    # The limiter of the agent's one table: 100 items without samples, and a window of 32 * 4 + 16 samples. At
    # the end the dataset gave back at most three batches.
    assert abs(4.0 * items - samples - 400) <= 144 + 3 * 16
    return [made for made, _ in counts]


def test_all_shards_are_saved_and_restored(tmp_path):
    before = check_ratio(*run(tmp_path, "serial", max_env_steps=600))
    after = check_ratio(*run(tmp_path, "threads", max_env_steps=800))
    assert min(before) > 100 and all(now > of_before for now, of_before in zip(after, before, strict=True))


def test_the_ratio_of_the_program_holds_in_processes(tmp_path):
    check_ratio(*run(tmp_path, "processes", max_env_steps=800))


def test_a_run_keeps_its_number_of_shards(tmp_path):
    run(tmp_path, "serial", max_env_steps=200)
    file = tmp_path / "config.yaml"  # It refuses another number, too; but an agent's graph may say one.
    recorded = file.read_text()
    for shards in (4, 1):
        file.write_text(recorded.replace("replay_shards: 2", f"replay_shards: {shards}"))
        with pytest.raises(launch.NodeError, match=rf"replay_shards: got {shards}, expected 2"):
            run(tmp_path, "threads", max_env_steps=400, replay_shards=shards)


def test_what_shards_cannot_do():
    with pytest.raises(ValueError, match=r"replay_shards: got 2, expected a divisor of num_actors \(3\)"):
        RunConfig(num_actors=3, replay_shards=2)
    with pytest.raises(ValueError, match="replay_shards: got 2 with replay_backend 'reverb'"):
        RunConfig(num_actors=2, replay_shards=2, replay_backend="reverb")
    with pytest.raises(ValueError, match="replay_shards: got 2, expected 1: PPO"):
        make_program(PPO(), CARTPOLE, RunConfig(num_actors=2, replay_shards=2))
