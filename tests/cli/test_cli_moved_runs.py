"""A run's folder in another place: resumed, evaluated and filmed there."""

import os
import shutil

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from framework.loggers import read_jsonl, without_times
from framework.programs import RunConfig, make_program
from framework.runs import config_file

SMALL = DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=4.0, hidden_sizes=(16,))


def program(path, **changes):
    settings = {"max_env_steps": 600, "evaluate_period": 150, "num_evaluation_episodes": 2}
    config = RunConfig(**{**settings, "loggers": ("csv", "tensorboard"), "directory": str(path), **changes})
    return make_program(DQN(SMALL), "gymnasium:CartPole-v1", config)


def interrupt(path):
    """Runs about half of the program, and stops it with its exact state."""
    with launch.start(program(path), "serial") as job:
        while job.client("counter").get_counts().get("env_steps", 0) < 300:
            with pytest.raises(TimeoutError):
                job.wait(timeout=0.0)
        job.stop()
        job.wait()


def rows(path):
    return [without_times(row) for row in read_jsonl(path / "metrics.jsonl")]


def test_resumed_evaluated_and_filmed_in_another_place(repertory, tmp_path, caplog):
    whole, old, new = tmp_path / "whole", tmp_path / "old" / "run", tmp_path / "elsewhere" / "moved"
    launch.launch(program(whole), engine="serial")
    interrupt(old)
    assert str(tmp_path) not in str({**config_file.read(old / "config.yaml"), "recorded": None})
    new.parent.mkdir()
    shutil.move(old, new)
    code, _, err = repertory("train", "--resume", new, "--engine", "serial")
    assert code == 0, err
    assert caplog.text == ""
    assert rows(new) == rows(whole)  # to the last digit
    assert (new / "metrics.csv").read_text().count("\n") == (whole / "metrics.csv").read_text().count("\n")
    for command in (
        ("eval", new, "--episodes", "2", "--checkpoint", "best"),
        ("video", new, "--output", tmp_path / "film.gif", "--max-steps", "3"),
        ("status", new),
        ("plot", new, "--output", tmp_path / "curve.png"),
        ("train", "--resume", new, "--engine", "threads", "--max-env-steps", "700"),
    ):
        code, _, err = repertory(*command)
        assert code == 0, err
    assert os.listdir(old.parent) == []  # nothing was written in the old place
