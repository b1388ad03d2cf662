"""Data sets that agents of this repository make."""

import dataclasses
import json

import pytest

from framework.commands import cli
from framework.datasets import read_episodes
from results import data


def test_medium_is_42_of_100_points():
    assert [round(data.TASKS[name].medium) for name in ("halfcheetah", "hopper")] == [4934, 1347]
    assert [round(data.TASKS[name].medium) for name in ("cartpole", "pendulum")] == [223, -776]


@pytest.fixture
def commands(monkeypatch):
    """The names of the commands that are run, which are run in this process."""
    names = []

    def repertory(*arguments):
        names.append(arguments[0])
        assert cli.main([str(argument) for argument in arguments]) == 0

    monkeypatch.setattr(data, "repertory", repertory)
    return names


def test_data_sets_of_a_task_are_made_of_one_run(tmp_path, monkeypatch, commands):
    easy = dataclasses.replace(data.TASKS["cartpole"], random=0, expert=20)
    monkeypatch.setitem(data.TASKS, "cartpole", easy)
    played = read_episodes(data.make("cartpole-medium", tmp_path))
    replayed = read_episodes(data.make("cartpole-medium-replay", tmp_path))
    assert data.make("cartpole-medium", tmp_path) == tmp_path / "cartpole-medium"
    assert commands == ["train", "record", "record"]
    assert len(played) == 100 and played.about["noise"] == 0.1
    result = json.loads((tmp_path / "runs/cartpole-medium/result.json").read_text())
    assert 0 <= replayed.num_steps - result["env_steps"] < 64  # Actors went on to the evaluation's end.


def test_a_run_that_misses_its_goal_is_no_data_set(tmp_path, monkeypatch, commands):
    short = dataclasses.replace(data.TASKS["cartpole"], steps=1_200, period=600)
    monkeypatch.setitem(data.TASKS, "cartpole", short)
    with pytest.raises(SystemExit, match=r"cartpole-expert ended with .*, expected 500.0: give another"):
        data.make("cartpole-mixed", tmp_path)
    assert commands == ["train"]
