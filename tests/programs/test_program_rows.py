"""The points of a run's curves: at which env steps actors write rows and the evaluator evaluates."""

import dataclasses

import numpy as np
import pytest
from helpers.small_programs import small_program

import launch
from agents.dqn import DQN, DQNConfig
from framework.actors.environment_loop import summarize
from framework.loggers import InMemoryLogger

LOG = InMemoryLogger()  # Both engines below keep all nodes in this process.
TINY = DQNConfig(hidden_sizes=(8,), batch_size=8, min_replay_size=20, samples_per_insert=1.0, insert_burst=16)


def rows_of(group, config=TINY, engine="serial", **settings):
    LOG.rows.clear()
    program = small_program(DQN(config), logger_factory=lambda: LOG, envs_per_actor=2, **settings)
    launch.launch(program, engine=engine)
    return [row for row in LOG.rows if row["label"].startswith(group)]


def test_rows_of_actors_lie_at_the_programs_env_steps():
    rows = rows_of("actor", num_actors=2, max_env_steps=1000, log_period=100)
    steps = {"actor-0": 0, "actor-1": 0}
    for row in rows:
        steps[row["label"]] = row["steps"]
        # Each actor writes every 100 steps of its own; the other's last row is at most so old. What an actor
        # has made of its grant is counted with the next: at most 64 steps of each of its 2 envs.
        assert sum(steps.values()) - 2 * 64 <= row["env_steps"] <= sum(steps.values()) + 102
    assert rows[-1]["env_steps"] == 1000 == sum(steps.values())


def test_a_resumed_run_evaluates_no_step_twice_and_its_actors_count_from_its_beginning(tmp_path):
    evaluated, counts = [], []
    for limit, engine in ((400, "serial"), (1000, "threads")):
        settings = {"evaluate_period": 200, "log_period": 100, "max_env_steps": limit}
        for row in rows_of("", engine=engine, directory=str(tmp_path), **settings):
            if row["label"] == "evaluator":
                evaluated.append(row["env_steps"])
            elif row["label"] == "actor-0":
                counts.append((row["steps"], row["episodes"]))
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == 1000
    assert 2 <= len(evaluated) <= 5
    assert counts == sorted(counts) and counts[-1][0] == 1000
    # Of each of the 2 envs, an episode of 7 steps may be open at the end of each start.
    assert counts[-1][1] == pytest.approx(1000 / 7, abs=4)


def test_a_run_that_was_stopped_before_its_last_evaluation_makes_it(tmp_path):
    settings = {"directory": str(tmp_path), "max_env_steps": 400}
    assert rows_of("evaluator", **settings) == []
    file = tmp_path / "config.yaml"  # It says that the run has no evaluator.
    file.write_text(file.read_text().replace("evaluate_period: null", "evaluate_period: 300"))
    rows = rows_of("evaluator", **settings, evaluate_period=300)
    assert [row["env_steps"] for row in rows] == [400]


def test_actors_of_a_serial_program_make_equal_shares():
    """Though there is room in replay for a step of one of them only, whenever the learner has made a step."""
    config = dataclasses.replace(TINY, samples_per_insert=8.0, batch_size=16)
    rows = rows_of("actor", config, num_actors=2, max_env_steps=800, log_period=100)
    steps = {row["label"]: row["steps"] for row in rows}
    assert sum(steps.values()) == 800
    assert abs(steps["actor-0"] - steps["actor-1"]) <= 2 * 64 * 2  # a grant each


def test_metrics_that_only_some_episodes_have_are_means_of_those():
    episode = {"episode_return": np.array([1.0]), "episode_length": np.array([3]), "env": np.array([0])}
    with_metric = {**episode, "distance": np.array([2.0])}
    for ended in ([with_metric, episode], [episode, with_metric]):
        assert summarize(ended)["distance"] == 2.0


def test_the_return_beside_a_cost_is_the_rewards():
    returns = {"cost": np.array([1.0, 5.0]), "reward": np.array([2.0, 4.0])}
    row = summarize([{"episode_return": returns, "episode_length": np.ones(2), "env": np.arange(2)}])
    assert (row["episode_return"], row["episode_return_max"], row["episode_return/cost"]) == (3.0, 4.0, 3.0)
