"""A program in which nothing acts: a dataset, a learner, and an evaluator. It counts learner steps."""

import json

import numpy as np
import pytest

import launch
from agents.dqn import DQN, DQNConfig
from framework import adders, environments, replay
from framework.clock import Clock
from framework.commands import status
from framework.commands.curves import read_curve
from framework.programs import RunConfig, make_program
from framework.runs.run_folder import RunFolder
from framework.specs import make_environment_spec

CARTPOLE = "gymnasium:CartPole-v1"


class FromData(DQN):
    """Learns from transitions that are there before the first step."""

    def build(self, graph):
        learner = graph.add_learner(graph.add_replay())
        graph.add_evaluator(graph.add_variable_source(learner))

    def make_tables(self, spec):
        limiter = replay.rate_limiters.MinSize(1)
        selectors = replay.selectors.Uniform(), replay.selectors.Fifo()
        return [replay.Table(adders.REPLAY_TABLE, *selectors, 1_000, limiter)]

    def make_dataset(self, client):
        if not client.server_info()[adders.REPLAY_TABLE].current_size:
            environment = environments.make(CARTPOLE, num_envs=2, seed=1)
            adder, random = (
                self.make_adder(client, make_environment_spec(environment)),
                np.random.default_rng(1),
            )
            adder.add_first(environment.reset())
            for _ in range(50):
                action = random.integers(2, size=2)
                adder.add(action, environment.step(action))
            adder.close()
            environment.close()
        return super().make_dataset(client)


def run(path, engine, limit):
    periods = {"evaluate_period": 40, "checkpoint_period": 60, "publish_period": 10, "learner_log_period": 10}
    config = RunConfig(directory=str(path), max_learner_steps=limit, num_evaluation_episodes=2, **periods)
    agent = FromData(DQNConfig(hidden_sizes=(8,), learning_rate_decay=200))
    return launch.launch(make_program(agent, CARTPOLE, config), engine=engine)


def rows_of(path, label):
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["label"] == label]


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_periods_budget_and_schedules_count_learner_steps_where_nothing_acts(tmp_path, engine):
    result = run(tmp_path, engine, 100)
    assert result["reason"] == "max_learner_steps" and result["learner_steps"] == 100
    assert "env_steps" not in result
    evaluated = [row["learner_steps"] for row in rows_of(tmp_path, "evaluator")]
    assert evaluated[-1] == 100 and (engine == "processes" or evaluated == [40, 80, 100])
    assert not any("env_steps" in row for row in rows_of(tmp_path, "learner"))
    newest = RunFolder.open(tmp_path).checkpointer.restore()
    assert newest.step == 100
    assert newest.state("learner", "learner")["env_steps"] == 100  # What schedules saw.


def test_a_run_in_which_nothing_acts_continues_and_shows_its_steps(tmp_path):
    run(tmp_path, "threads", 50)
    assert run(tmp_path, "threads", 120)["learner_steps"] == 120
    folder = RunFolder.open(tmp_path)
    assert folder.checkpointer.restore().step == 120
    assert "learner steps       120 / 120" in status.text(folder)
    assert read_curve(folder, "evaluator", "episode_return").x[-1] == 120


def test_a_clock_names_its_budget():
    config = RunConfig(max_env_steps=5, max_learner_steps=7)
    counts = {"env_steps": 1, "learner_steps": 2, "critic_steps": 3}
    for clock, now, limit in ((Clock(), 1, 5), (Clock("learner_steps"), 2, 7), (Clock("critic_steps"), 3, 7)):
        assert (clock.now(counts), clock.limit(config), clock.now({})) == (now, limit, 0)
