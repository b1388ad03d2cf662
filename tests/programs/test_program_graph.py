"""Agents that draw their own graph: nodes that are added, replaced and left out."""

from __future__ import annotations

import dataclasses
import json

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from framework import core
from framework.checkpoints import Checkpointer
from framework.programs import RunConfig, load_policy, make_program
from framework.programs.run_folder import RunError
from framework.programs.services import Counter, RunCheckpointer

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
    # Windows at both ends of an episode of T steps are items too: at most 2T - 1 items.
    assert len(rows) == 10 and 0 < rows[-1]["size"] < 2 * 600
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
    class Broken(DQN):
        def build(self, graph):
            super().build(graph)
            graph.add_node("broken", launch.CourierNode(_fail))

    with pytest.raises(launch.NodeError, match="broken-0"):
        launch.launch(make_program(Broken(CONFIG), CARTPOLE, RunConfig(max_env_steps=100)), engine="threads")


def _fail():
    raise ValueError("broken on purpose")


class Two(DQN):
    """Two learners with different discounts on two replays, each with its actors and its evaluator."""

    def build(self, graph):
        short = DQN(dataclasses.replace(self.config, discount=0.5))
        for suffix, agent in (("", None), ("_short", short)):
            replay = graph.add_replay(agent=agent, name="replay" + suffix)
            learner = graph.add_learner(replay, agent=agent, name="learner" + suffix)
            variables = graph.add_variable_source(learner)
            graph.add_actors(replay, variables, name="actor" + suffix)
            graph.add_evaluator(variables, name="evaluator" + suffix)


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_two_learners_are_logged_saved_and_restored_apart(tmp_path, engine):
    directory = str(tmp_path / "run")
    settings = {"evaluate_period": 300, "num_evaluation_episodes": 2, "directory": directory}
    for limit in (600, 900):
        config = RunConfig(envs_per_actor=2, max_env_steps=limit, learner_log_period=10, **settings)
        result = launch.launch(make_program(Two(CONFIG), CARTPOLE, config), engine=engine)
        assert result["reason"] == "max_env_steps"
        assert result["env_steps"] == result["evaluator_short"]["env_steps"] == limit
        saved = Checkpointer(tmp_path / "run" / "checkpoints").restore()
        parts = ["replay", "learner", "actor-0", "evaluator", "best"]
        for part in (*parts, "replay_short", "learner_short", "actor_short-0", "evaluator_short-best"):
            assert part in saved.names
        counts = saved.state("counter")["counts"]
        for name in ("learner", "learner_short"):
            assert saved.state(name)["steps"] == counts[f"{name}_steps"]
            # In processes, the actors that start first may take all steps.
            assert engine != "serial" or counts[f"{name}_steps"] > 0
        moves = [saved.state(f"actor{suffix}-0")["steps"] for suffix in ("", "_short")]
        assert sum(moves) == limit and (engine != "serial" or min(moves) > 0)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for name in ("learner", "learner_short"):
        steps = [row["steps"] for row in rows if row["label"] == name]
        assert steps == sorted(set(steps))
        sizes = [row["replay/inserted"] for row in rows if row["label"] == name]
        assert engine != "serial" or 0 < sizes[-1] < 900  # of its own replay


def test_a_periodic_checkpoint_has_the_states_of_all_learners(tmp_path):
    checkpointer = RunCheckpointer(
        RunConfig(directory=str(tmp_path)), counter=Counter(), learners=["long", "short"]
    )
    checkpointer.put("long", {"steps": 1})
    assert checkpointer.commit("periodic", "long") is None
    checkpointer.put("short", {"steps": 1})
    assert checkpointer.commit("periodic", "short") is not None
    for steps, written in ((2, False), (3, True)):  # The other one has no data.
        checkpointer.put("long", {"steps": steps})
        assert (checkpointer.commit("periodic", "long") is not None) == written


@pytest.mark.parametrize("method", ["add_replay", "add_learner", "add_evaluator", "add_actors"])
def test_a_name_is_used_once(method):
    class Twice(DQN):
        def build(self, graph):
            super().build(graph)
            arguments = [None] * {"add_replay": 0, "add_actors": 2}.get(method, 1)
            getattr(graph, method)(*arguments)

    with pytest.raises(ValueError, match="Give another name"):
        make_program(Twice(CONFIG), CARTPOLE, RunConfig())


@pytest.mark.parametrize("name", ["learner", "counter"])
def test_a_node_of_ones_own_has_a_name_of_its_own(name):
    class Same(DQN):
        def build(self, graph):
            super().build(graph)
            graph.add_node(name, launch.CourierNode(_fail))

    with pytest.raises(ValueError, match=f"name: got '{name}'"):
        make_program(Same(CONFIG), CARTPOLE, RunConfig())


def test_a_learner_is_not_named_as_the_count_of_env_steps():
    class Env(DQN):
        def build(self, graph):
            graph.add_learner(graph.add_replay(), name="env")

    with pytest.raises(ValueError, match="name: got 'env'"):
        make_program(Env(CONFIG), CARTPOLE, RunConfig())


class Renamed(DQN):
    """DQN whose learner has another name."""

    def build(self, graph):
        replay = graph.add_replay()
        graph.add_actors(replay, graph.add_learner(replay, name="other"))


def test_a_run_without_a_learner_of_that_name_is_not_loaded_with_untrained_parameters(tmp_path):
    config = RunConfig(directory=str(tmp_path), max_env_steps=150)
    launch.launch(make_program(Renamed(CONFIG), CARTPOLE, config), engine="serial")
    assert "other" in Checkpointer(tmp_path / "checkpoints").restore().names
    with pytest.raises(RunError, match="got the learners other, expected"):
        load_policy(tmp_path)
