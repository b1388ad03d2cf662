"""Data sets that agents of this repository make."""

import dataclasses

from framework.commands import cli
from framework.datasets import read_episodes
from results import data


def test_medium_is_42_of_100_points():
    assert [round(data.TASKS[name].medium) for name in ("halfcheetah", "hopper")] == [4934, 1347]
    assert [round(data.TASKS[name].medium) for name in ("cartpole", "pendulum")] == [223, -776]


def test_data_sets_of_a_task_are_made_of_one_run(tmp_path, monkeypatch):
    commands = []

    def repertory(*arguments):
        commands.append(arguments[0])
        assert cli.main([str(argument) for argument in arguments]) == 0

    monkeypatch.setattr(data, "repertory", repertory)
    monkeypatch.setitem(data.TASKS, "cartpole", dataclasses.replace(data.TASKS["cartpole"], steps=1200))
    played = read_episodes(data.make("cartpole-medium", tmp_path))
    replayed = read_episodes(data.make("cartpole-medium-replay", tmp_path))
    assert data.make("cartpole-medium", tmp_path) == tmp_path / "cartpole-medium"
    assert commands == ["train", "record", "record"]
    assert len(played) == 100 and played.about["noise"] == 0.1
    assert replayed.num_steps == 1200
