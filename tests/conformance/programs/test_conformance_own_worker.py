"""A worker of the user's own in an agent's program: on every engine it runs, is supervised, writes rows of
metrics, and is saved and restored with the run."""

from __future__ import annotations

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from framework import core
from framework.checkpoints import Checkpointer
from framework.loggers import read_jsonl
from framework.programs import RunConfig, make_program

pytestmark = pytest.mark.timeout(300)  # On Ray, three programs of seven nodes start.
PERIOD = 100  # Env steps between two rows of the worker.


class Watcher(core.Worker):
    """Writes the size of replay every `PERIOD` env steps, and ends the program after `until` rows.

    Fails once in the second row if the file `fails` exists.
    """

    def __init__(self, replay, counter, monitor, checkpointer, until, fails):
        self._replay, self._counter, self._monitor = replay, counter, monitor
        self._checkpointer, self._until, self._fails = checkpointer, until, fails
        self._rows = (checkpointer.get("watcher") or {"rows": 0})["rows"]

    def finished(self):
        return self._rows >= self._until

    def ready(self):
        return self._counter.get_counts().get("env_steps", 0) >= self._due

    def step(self):
        if not self._counter.wait_for("env_steps", self._due, timeout=0.5):
            return
        if self._rows == 1 and self._fails.exists():
            self._fails.unlink()
            raise ValueError("failed on purpose")
        self._rows += 1
        size = self._replay.server_info()["replay"].current_size
        self._monitor.write("watcher", {"rows": self._rows, "size": size})
        self._checkpointer.put("watcher", {"rows": self._rows})
        if self.finished():
            launch.stop("seen enough")

    @property
    def _due(self):
        return PERIOD * (self._rows + 1)


class Watched(DQN):
    def __init__(self, until, fails):
        super().__init__(
            DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=4.0, hidden_sizes=(8,))
        )
        self._until, self._fails = until, fails

    def build(self, graph):
        replay = graph.add_replay()
        variables = graph.add_variable_source(graph.add_learner(replay))
        graph.add_actors(replay, variables)
        services = graph.counter, graph.monitor, graph.checkpointer
        graph.add_node("watcher", launch.CourierNode(Watcher, replay, *services, self._until, self._fails))


def run(tmp_path, engine, until, **options):
    """Returns the worker's rows, all of the run."""
    agent = Watched(until, tmp_path / "fails")
    config = RunConfig(directory=str(tmp_path / "run"), envs_per_actor=2)
    program = make_program(agent, "gymnasium:CartPole-v1", config)
    # Where seven nodes of Ray import torch at a time on two cores, some show no sign of life for a minute.
    assert launch.launch(program, engine, heartbeat_timeout=None, **options) == "seen enough"
    return [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["label"] == "watcher"]


def test_it_is_made_anew_after_a_failure_and_restored_with_the_run(program_engine, tmp_path):
    (tmp_path / "fails").touch()
    for until in (3, 5):
        rows = run(tmp_path, program_engine, until, restarts={"watcher": 1})
        assert [row["rows"] for row in rows] == list(range(1, until + 1))
        saved = Checkpointer(tmp_path / "run" / "checkpoints").restore()
        assert saved.state("watcher") == {"rows": until}
    assert not (tmp_path / "fails").exists() and rows[-1]["size"] > 0
    assert [row.get("resumed", False) for row in rows] == [False] * 3 + [True, False]
