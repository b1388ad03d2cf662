"""Agents that draw their own graph: nodes that are added, replaced and left out."""

from __future__ import annotations

import json

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from framework import core
from framework.checkpoints import Checkpointer
from framework.programs import RunConfig, make_program

CARTPOLE = "gymnasium:CartPole-v1"
CONFIG = DQNConfig(min_replay_size=100, batch_size=16)


class Watcher(core.Worker):
    """Logs the size of replay in ten rows; continues their count when the run is resumed."""

    def __init__(self, replay, monitor, checkpointer, counter):
        self._replay, self._monitor, self._checkpointer, self._counter = (
            replay,
            monitor,
            checkpointer,
            counter,
        )
        state = None if checkpointer is None else checkpointer.get("watcher")
        self.steps = 0 if state is None else state["steps"]

    def finished(self):
        return self.steps == 10

    def ready(self):
        return self._replay.server_info()["replay"].current_size > 0

    def step(self):
        self.steps += 1
        size = self._replay.server_info()["replay"].current_size
        self._monitor.write("watcher", {"steps": self.steps, "size": size})

    def run(self):
        self._counter.wait_for("env_steps", 1, 60.0)
        while not self.finished() and not launch.stop_event().is_set():
            if self.ready():
                self.step()
        launch.wait_for_stop()

    def close(self):
        if self._checkpointer is not None:
            self._checkpointer.put("watcher", {"steps": self.steps})


class Watched(DQN):
    """DQN with a node of its own, and without an evaluator."""

    def build(self, graph):
        replay = graph.add_replay()
        learner = graph.add_learner(replay)
        graph.add_actors(replay, learner)
        services = graph.monitor, graph.checkpointer, graph.counter
        graph.add_node("watcher", launch.CourierNode(Watcher, replay, *services))


def groups(program):
    return {name: len(nodes) for name, nodes in program.groups.items()}


def test_the_default_graph():
    program = make_program(DQN(CONFIG), CARTPOLE, RunConfig(num_actors=2, inference="server"))
    assert list(groups(program).items()) == [
        ("replay", 1),
        ("counter", 1),
        ("monitor", 1),
        ("learner", 1),
        ("inference", 1),
        ("actor", 2),
        ("evaluator", 1),
    ]


def test_a_graph_with_another_node_and_without_an_evaluator():
    program = make_program(Watched(CONFIG), CARTPOLE, RunConfig())
    assert "watcher" in groups(program) and "evaluator" not in groups(program)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_node_of_ones_own_runs_logs_and_is_saved(tmp_path, engine):
    directory = str(tmp_path / "run")
    config = RunConfig(envs_per_actor=2, max_env_steps=600, directory=directory)
    result = launch.launch(make_program(Watched(CONFIG), CARTPOLE, config), engine=engine)
    assert result["env_steps"] == 600
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["label"] == "watcher"]
    assert [row["steps"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) == 10 and 0 < rows[-1]["size"] <= 600
    saved = Checkpointer(tmp_path / "run" / "checkpoints").restore()
    assert saved.state("watcher") == {"steps": len(rows)}


def test_a_node_of_ones_own_continues(tmp_path):
    directory = str(tmp_path / "run")
    job = launch.start(
        make_program(Watched(CONFIG), CARTPOLE, RunConfig(directory=directory, checkpoint_period=None)),
        engine="serial",
    )
    for _ in range(6):
        with pytest.raises(TimeoutError):
            job.wait(timeout=0.0)
    job.stop()
    job.wait()
    config = RunConfig(directory=directory, max_env_steps=300)  # another setting: no exact state
    launch.launch(make_program(Watched(CONFIG), CARTPOLE, config), engine="serial")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["label"] == "watcher"]
    assert [row["steps"] for row in rows] == list(range(1, 11))
    assert 0 < [row.get("resumed", False) for row in rows].index(True) < 10


def test_an_error_in_a_node_of_ones_own_ends_the_program():
    class Broken(Watched):
        def build(self, graph):
            super().build(graph)
            graph.add_node("broken", launch.CourierNode(_fail))

    with pytest.raises(launch.NodeError, match="broken-0"):
        launch.launch(make_program(Broken(CONFIG), CARTPOLE, RunConfig(max_env_steps=100)), engine="threads")


def _fail():
    raise ValueError("broken on purpose")
