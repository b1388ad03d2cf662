"""PPO and DQN trained together in a multi-agent environment, in whole programs on every engine."""

from __future__ import annotations

import os
import signal

import pytest

import launch
from agents.ppo_dqn import PPODQN, PPODQNConfig
from framework.commands.evaluate import evaluate
from framework.loggers import read_jsonl
from framework.programs import RunConfig, load_policy, make_program

OF_PPO = {"unroll_length": 8, "epochs": 2, "minibatch_size": 32, "hidden_sizes": (8,)}
OF_DQN = {"min_replay_size": 50, "batch_size": 16, "samples_per_insert": 2.0, "hidden_sizes": (8,)}
CONFIG = PPODQNConfig(ppo=OF_PPO, dqn=OF_DQN)


def program(directory, steps, **changes):
    settings = {"num_actors": 2, "envs_per_actor": 3, "max_env_steps": steps, "evaluate_period": 500}
    settings |= {"num_evaluation_episodes": 2, "log_period": 50, "learner_log_period": 1}
    config = RunConfig(directory=directory, **settings | changes)
    return make_program(PPODQN(CONFIG), "multi_agent:CartPole", config)


def rows(directory, label):
    return [row for row in read_jsonl(directory / "metrics.jsonl") if row["label"] == label]


def test_both_policies_learn_also_after_a_resume_and_the_loss_of_replay(tmp_path, program_engine):
    result = launch.launch(program(tmp_path, 500), engine=program_engine)
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", 500)
    last = rows(tmp_path, "learner")[-1]
    assert last["ppo/steps"] >= 8 and last["dqn/steps"] >= 10
    assert last["steps"] == last["ppo/steps"] + last["dqn/steps"]
    assert {row["ppo/staleness"] for row in rows(tmp_path, "learner") if "ppo/staleness" in row} == {0.0}
    evaluated = rows(tmp_path, "evaluator")[-1]
    agents = [evaluated[f"episode_return/agent_{index}"] for index in range(4)]
    assert evaluated["episode_return"] == pytest.approx(sum(agents) / 4)
    played = evaluate(load_policy(tmp_path), episodes=3, envs=2, seed=0)
    assert len(played["agents"]) == 4
    assert played["mean"] == pytest.approx(sum(played["agents"].values()) / 4)

    kills = program_engine == "processes"
    steps = 1_500 if kills else 1_000
    resumed = program(tmp_path, steps)
    engine = "threads" if program_engine == "serial" else program_engine  # Which refuses another limit.
    with launch.start(resumed, engine, restarts={"replay": 1} if kills else {}) as job:
        if kills:
            assert job.client("counter").wait_for("env_steps", 700, timeout=60.0)
            (killed,) = [node for node in job.nodes() if node["label"] == "replay-0"]
            os.kill(killed["pid"], signal.SIGKILL)
        assert job.wait(timeout=120.0)["env_steps"] == steps
        restarted = {node["label"] for node in job.nodes() if node["restarts"]}
    assert restarted == ({"replay-0"} if kills else set())
    before, last = last, rows(tmp_path, "learner")[-1]
    assert last["ppo/steps"] >= before["ppo/steps"] + 8 and last["dqn/steps"] >= before["dqn/steps"] + 10
