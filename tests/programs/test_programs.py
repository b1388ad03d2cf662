"""Whole programs: one agent, every engine, real nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import numpy as np
import pytest
from helpers.small_programs import SMALL, small_program

import launch
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from agents.random_actions import RandomActions
from examples.flows import DQNPlan
from framework.checkpoints import Checkpointer
from framework.environments.testing import FakeEnvironment, make_spec
from framework.loggers import read_jsonl
from framework.programs import RunConfig, make_program
from framework.runs.run_folder import RunError

ENGINES = ["serial", "threads", "processes"]

TWO_STEPS = dataclasses.replace(SMALL, n_step=2)


def program(**changes) -> launch.Program:
    settings = {"num_actors": 2, "max_env_steps": 500, "evaluate_period": 200, "log_period": 100}
    return small_program(**{"agent": DQN(TWO_STEPS), **settings, **changes})


@pytest.mark.parametrize("engine", ENGINES)
def test_makes_exactly_the_steps_and_says_why_it_ended(engine, tmp_path):
    result = launch.launch(program(directory=tmp_path), engine=engine)
    assert result["reason"] == "max_env_steps"
    assert result["env_steps"] == 500
    assert result["learner_steps"] >= 500 * 4 / 16
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    labels = {row["label"] for row in rows}
    # One actor may have made all the steps before the other was there.
    assert labels - {"actor-0", "actor-1"} == {"learner", "evaluator"} and len(labels) > 2
    learners = [row for row in rows if row["label"] == "learner"]
    learner = learners[-1]
    assert learner["steps"] > 0 and np.isfinite(learner["loss"])
    assert learner["replay/sampled"] >= learner["steps"] * TWO_STEPS.batch_size - 64
    assert 0 < learner["replay/sample_age"] < learner["replay/inserted"]
    assert learner["acting_staleness"] >= 0 and learner["times_sampled"] >= 1
    # The last row may be of the moment after the last step.
    assert max(row["time/env_steps_per_s"] for row in learners) > 0
    assert learner["time/replay/insert_blocked_s"] >= 0 and learner["time/replay/sample_blocked_s"] >= 0
    reader = Checkpointer(tmp_path / "checkpoints").restore()
    assert reader.state("counter")["counts"]["env_steps"] == 500
    returns = [row["episode_return"] for row in rows if row["label"] == "evaluator"]
    best = reader.state("best")
    assert best["row"]["episode_return"] == max(returns)
    DQN(TWO_STEPS).make_networks(make_spec()).load_state_dict(best["networks"])


@pytest.mark.parametrize(
    ("agent", "engine", "error"),
    [
        (DQN(SMALL), "threads", "learner: made no step in 20 env steps; table 'replay' holds"),
        (PPO(PPOConfig(unroll_length=32)), "serial", "learner: made no step"),
        (DQNPlan(DQNConfig(min_replay_size=50)), "serial", "learner: made no step"),
        (RandomActions(), "serial", None),  # It has nothing to learn.
    ],
)
def test_a_run_that_never_learned_fails(agent, engine, error):
    few = small_program(agent, envs_per_actor=1, max_env_steps=20)
    with contextlib.nullcontext() if error is None else pytest.raises(RunError, match=error):
        assert launch.launch(few, engine)["env_steps"] == 20


@pytest.mark.parametrize(
    ("steps", "given", "limit"),
    [(None, None, 10_000), (200, None, 1_000), (5_000, None, 5_000), (10**7, None, 10_000), (200, 7, 7)],
)
def test_an_evaluation_always_has_a_limit(steps, given, limit):
    assert RunConfig(max_env_steps=steps, max_evaluation_steps=given).evaluation_limit == limit


def test_an_evaluation_of_an_endless_environment_ends():
    endless = lambda: FakeEnvironment(episode_length=10**9)  # noqa: E731
    config = RunConfig(max_env_steps=20, num_evaluation_episodes=1)
    result = launch.launch(make_program(RandomActions(), endless, config), engine="serial")
    assert result["env_steps"] == 20 and result["episode_length"] == 1_000 and result["cut_episodes"] == 1


def test_a_stop_ends_an_evaluation():
    """Its episodes may take longer than a node has to end."""

    def environment(evaluation=False):
        return FakeEnvironment(episode_length=10**9 if evaluation else 5)

    config = RunConfig(evaluate_period=5, max_evaluation_steps=10**9, evaluation_options={"evaluation": True})
    program = make_program(RandomActions(), environment, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", launch.StopTimeoutWarning)
        with launch.start(program, "threads") as job:
            assert job.client("counter").wait_for("env_steps", 50, timeout=60.0)
            job.stop("result")
            assert job.wait(timeout=60.0) == "result"


def test_a_resumed_program_makes_no_learner_steps_above_the_limit(tmp_path):
    settings = {"max_env_steps": None, "max_learner_steps": 20, "evaluate_period": None, "publish_period": 10}
    for limit, steps, engine in ((20, 20, "serial"), (20, 20, "serial"), (30, 30, "threads")):
        settings["max_learner_steps"] = limit
        result = launch.launch(program(directory=tmp_path, **settings), engine=engine)
        assert result == {"reason": "max_learner_steps", "learner_steps": steps}
    assert Checkpointer(tmp_path / "checkpoints").restore().state("learner")["steps"] == 30
