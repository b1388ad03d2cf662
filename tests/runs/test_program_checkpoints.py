"""The checkpoints of a run: one thing with all its parts, replay's among them."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.small_programs import SMALL, small_program

import launch
from agents.dqn import DQN, DQNConfig
from framework import replay
from framework.checkpoints import Checkpointer, CheckpointError
from framework.environments.testing import make_spec
from framework.loggers import read_jsonl, without_times
from framework.programs import RunConfig, make_program
from framework.runs import config_file
from framework.runs.checkpoints import (
    RunCheckpointer,
    newest_checkpoint,
    replay_checkpointer,
    run_checkpoints,
)
from framework.runs.run_folder import RunError
from framework.runs.services import Counter
from framework.runs.stopwatch import Stopwatch


def run(directory, **changes):
    settings = {"max_env_steps": 300, "checkpoint_period": 60, "directory": str(directory), **changes}
    launch.launch(small_program(envs_per_actor=1, **settings), "serial")
    return RunConfig(**settings)


def saved_part(config, part):
    """The state of `part` in the newest intact checkpoint of the run, or None."""
    reader = run_checkpoints(config).newest_intact()
    return None if reader is None else reader.state(part)


def inserted(checkpointer):
    """How many items had been inserted when what `checkpointer` restores was saved."""
    client = replay.EmbeddedClient(DQN(SMALL).make_tables(make_spec()), checkpointer=checkpointer)
    (info,) = client.server_info().values()
    return info.rate_limiter_info.insert_stats.completed


def test_another_agent_is_refused_and_the_run_can_go_on(tmp_path):
    config = RunConfig(directory=str(tmp_path), max_env_steps=60)
    small = DQNConfig(min_replay_size=20, batch_size=8, samples_per_insert=4.0, hidden_sizes=(8,))
    launch.launch(make_program(DQN(small), "gymnasium:CartPole-v1", config), engine="serial")
    before = (tmp_path / "config.yaml").read_bytes()
    config = dataclasses.replace(config, max_env_steps=90)
    other = DQN(dataclasses.replace(small, hidden_sizes=(16,), learning_rate=0.1))
    with pytest.raises(RunError, match=r"0.1, expected .*hidden_sizes: got \[16\], expected \[8\]"):
        make_program(other, "gymnasium:CartPole-v1", config)
    assert (tmp_path / "config.yaml").read_bytes() == before
    launch.launch(make_program(DQN(small), "gymnasium:CartPole-v1", config), engine="threads")
    assert run_checkpoints(config).latest().name.endswith("-step-90")
    assert config_file.read(tmp_path / "config.yaml")["max_env_steps"] == 90


def test_an_older_checkpoint_is_older_in_every_part(tmp_path):
    config = run(tmp_path)
    checkpoints = Checkpointer(tmp_path / "checkpoints").checkpoints()
    assert len(checkpoints) == 3
    seen = []
    for path in reversed(checkpoints):
        learner, counter = saved_part(config, "learner"), saved_part(config, "counter")
        seen.append((counter["counts"]["env_steps"], learner["steps"], inserted(replay_checkpointer(config))))
        path.rename(path.with_name(f"set-aside-{path.name}"))
    assert seen == sorted(seen, reverse=True)
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True))
    assert saved_part(config, "learner") is None
    assert replay_checkpointer(config).fallback_checkpoint_path is None


@pytest.mark.parametrize("part", ["replay", "learner"])
def test_a_damaged_part_makes_all_parts_go_back(tmp_path, part):
    config = run(tmp_path)
    newest, previous = reversed(Checkpointer(tmp_path / "checkpoints").checkpoints()[-2:])
    file = newest / part
    if file.is_dir():
        file = max(file.iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match=f"altered.*Continuing from the older {previous.name}"):
        step = saved_part(config, "counter")["counts"]["env_steps"]
    with pytest.warns(UserWarning, match="Continuing from"):
        assert replay_checkpointer(config).fallback_checkpoint_path == previous / "replay"
    with pytest.warns(UserWarning, match="Continuing from"):
        keeper = RunCheckpointer(config, counter=None)
    assert previous.name.endswith(f"-step-{step}") and newest.exists()
    assert keeper.get("learner")["steps"] < int(newest.name.rpartition("-")[2])
    with pytest.warns(UserWarning, match="Continuing from"):
        run(tmp_path, max_env_steps=400)
    assert Checkpointer(tmp_path / "checkpoints").restore().step == 400


def test_a_checkpoint_that_replay_cannot_write_says_which_file_and_what_is_intact(tmp_path):
    config = run(tmp_path)
    before = sorted((tmp_path / "checkpoints").iterdir())

    class FullReplay:
        def checkpoint(self):
            raise CheckpointError("could not write stream-0-0")

    tables = DQN(SMALL).make_tables(make_spec())
    client = replay.EmbeddedClient(tables, checkpointer=replay_checkpointer(config, "other"))
    counter = Counter()
    counter.increment(env_steps=500)
    replays = {"other": client, "replay": FullReplay()}
    checkpointer = RunCheckpointer(config, counter=counter, replays=replays)
    assert checkpointer.commit("nothing is new") is None
    checkpointer.put("learner", {"steps": 1})
    with pytest.raises(CheckpointError, match="could not write stream-0-0"):
        checkpointer.commit("periodic")
    assert not [*(tmp_path / "checkpoints" / ".other").iterdir()]
    (tmp_path / "checkpoints" / ".other").rmdir()
    assert sorted((tmp_path / "checkpoints").iterdir()) == before
    with pytest.raises(TypeError, match=r"watcher\['x'\]: got a object"):
        checkpointer.put("watcher", {"x": object()})
    checkpointer._replays = {}  # there is room again: what could not be written before is still new
    assert checkpointer.commit("periodic") is not None


def test_the_step_of_a_checkpoint_is_that_of_its_counter(tmp_path):
    """Though actors and the learner go on while replay is written: what they put is in the next one."""
    counter = Counter()
    counter.increment(env_steps=500)

    class SlowReplay:
        def checkpoint(self):
            counter.increment(env_steps=300)
            if counter.get_counts()["env_steps"] == 800:
                checkpointer.put("learner", {"steps": 2})
            path = tmp_path / "written"
            path.mkdir()
            return path

    config = RunConfig(directory=str(tmp_path / "run"))
    checkpointer = RunCheckpointer(config, counter=counter, replays={"replay": SlowReplay()})
    checkpointer.put("learner", {"steps": 1})
    for learner_steps, env_steps in ((1, 500), (2, 800)):
        assert checkpointer.commit("periodic") is not None
        reader = newest_checkpoint(config)
        assert reader.state("learner")["steps"] == learner_steps
        assert reader.step == reader.state("counter")["counts"]["env_steps"] == env_steps
    assert checkpointer.commit("periodic") is None


def test_a_checkpoint_every_few_minutes_changes_nothing_else(tmp_path, monkeypatch):
    rows = []
    for name, minutes, seconds in (("often", 10.0, 601.0), ("never", 10.0, 599.0)):
        monkeypatch.setattr(Stopwatch, "seconds", lambda self, now=seconds: now)
        run(
            tmp_path / name,
            max_env_steps=150,
            checkpoint_period=None,
            checkpoint_minutes=minutes,
            keep_checkpoints=50,
        )
        rows.append([without_times(row) for row in read_jsonl(tmp_path / name / "metrics.jsonl")])
    assert rows[0] == rows[1]
    assert len(Checkpointer(tmp_path / "often" / "checkpoints").checkpoints()) > 5
    assert len(Checkpointer(tmp_path / "never" / "checkpoints").checkpoints()) == 1
