"""Plans with several learners: each has its parameters, steps, rows, checkpoint, workers and evaluator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import launch
from agents.a2c import A2C, A2CConfig
from framework.checkpoints import Checkpointer
from framework.flow import Par, alternate
from framework.loggers import read_jsonl
from framework.programs import RolloutWorker, RunConfig, concatenate, make_program
from framework.programs.groups import LearnerClient, LearnerHandle

CONFIG = A2CConfig(hidden_sizes=(8,), unroll_length=10)
RATES = {"slow": 0.0, "fast": 1e-2}
CARTPOLE = "gymnasium:CartPole-v1"


class Two(A2C):
    """A learner that does not move, and one that does, each with every second worker."""

    def build(self, graph):
        agents = {n: A2C(dataclasses.replace(self.config, learning_rate=r)) for n, r in RATES.items()}
        learners = graph.add_plan(learners=agents)
        graph.add_evaluator(learners["fast"])
        graph.add_evaluator(learners["slow"], name="evaluator_slow")

    def plan(self, workers, learners):
        flows = []
        for index, (name, learner) in enumerate(learners.items()):
            assert learner.learner.optimizer.param_groups[0]["lr"] == RATES[name]
            rounds = Par(workers[index::2], RolloutWorker.sample).sync()
            flows.append(rounds.map(concatenate).map(learner.step))
        return alternate(*flows)


def make(tmp_path, max_env_steps, agent=None, **settings):
    config = RunConfig(
        num_actors=4,
        max_env_steps=max_env_steps,
        evaluate_period=400,
        num_evaluation_episodes=2,
        learner_log_period=2,
        directory=str(tmp_path / "run"),
        **settings,
    )
    return make_program(agent or Two(CONFIG), CARTPOLE, config)


def run(tmp_path, engine, limit):
    """The states of the learners after `limit` env steps, by name."""
    result = launch.launch(make(tmp_path, limit), engine)
    assert result["env_steps"] == result["evaluator_slow"]["env_steps"] == limit
    saved = Checkpointer(tmp_path / "run" / "checkpoints").restore()
    counts = saved.state("counter")["counts"]
    states = {name: saved.state(name) for name in RATES}
    for name, state in states.items():
        assert state["steps"] == counts[f"{name}_steps"] > 0
    assert sum(saved.state(f"actor-{index}")["steps"] for index in range(4)) == limit
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    for name in RATES:
        steps = [row["steps"] for row in rows if row["label"] == name]
        assert steps == sorted({*steps}) and len(steps) >= limit // 200
    for index in range(4):  # Each acts with the parameters of its learner.
        versions = [row["variables_version"] for row in rows if row["label"] == f"actor-{index}"]
        assert versions == sorted(versions) and versions[-1] > limit // 200
    return {name: state["learner"]["networks"] for name, state in states.items()}


def test_two_learners_of_a_plan_learn_apart_and_go_on(tmp_path):
    before, after = run(tmp_path, "serial", 400), run(tmp_path, "threads", 800)
    for name in RATES:
        weights = [key for key in before[name] if key.endswith("weight")]
        assert weights
        for key in weights:
            assert np.array_equal(before[name][key], after[name][key]) == (name == "slow")


def test_two_learners_of_a_plan_in_processes(tmp_path):
    run(tmp_path, "processes", 400)


def test_the_first_learner_with_all_its_steps_ends_the_program(tmp_path):
    result = launch.launch(make(tmp_path, None, max_learner_steps=3), "serial")
    assert result["reason"] == "max_learner_steps" and result["slow_steps"] == 3


def test_a_worker_of_a_plan_belongs_to_one_learner(tmp_path):
    config = RunConfig(num_actors=3, max_env_steps=100)
    with pytest.raises(ValueError, match="num_actors: got 3, expected a multiple of 2"):
        make_program(Two(CONFIG), CARTPOLE, config)


class Env(Two):
    def build(self, graph):
        graph.add_plan(learners={"env": self})


def test_the_name_of_a_learner_is_checked():
    with pytest.raises(ValueError, match="name: got 'env'"):
        make_program(Env(CONFIG), CARTPOLE, RunConfig())


class Methods:
    def get_state(self, **options):
        return options


def test_a_handle_is_of_one_learner():
    node = launch.CourierNode(object).create_handle()
    one, other = LearnerHandle(node, "one"), LearnerHandle(node, "other")
    assert len({node, one, other, LearnerHandle(node, "one")}) == 3 and node != one
    client = LearnerClient(Methods(), "one")
    assert client.get_state() == {"learner": "one"}
