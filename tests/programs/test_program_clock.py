"""A program in which nothing acts: a dataset, a learner, and an evaluator. It counts learner steps."""

import json

import numpy as np
import pytest

import launch
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO
from agents.td3_bc import TD3BC
from framework import environments
from framework.clock import Clock
from framework.commands import status
from framework.commands.curves import read_curve
from framework.datasets import read_episodes, record, write_episodes
from framework.programs import RunConfig, make_program
from framework.runs.run_folder import RunError, RunFolder

CARTPOLE = "gymnasium:CartPole-v1"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten episodes of random actions."""
    environment, random = environments.make(CARTPOLE, num_envs=1, seed=1), np.random.default_rng(1)
    episodes = record(environment, lambda observation: random.integers(2, size=1), 10)
    return write_episodes(tmp_path_factory.mktemp("data") / "cartpole", episodes, spec=environment.spec)


def run(path, engine, limit, data, environment=CARTPOLE, agent=None):
    periods = {"evaluate_period": 40, "checkpoint_period": 60, "publish_period": 10, "learner_log_period": 10}
    limits = {"dataset": str(data), "max_learner_steps": limit, "num_evaluation_episodes": 2}
    config = RunConfig(directory=str(path), **limits, **periods)
    agent = agent or DQN(DQNConfig(hidden_sizes=(8,), n_step=1, learning_rate_decay=200))
    return launch.launch(make_program(agent, environment, config), engine=engine)


def rows_of(path, label):
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["label"] == label]


def test_periods_budget_and_schedules_count_learner_steps_where_nothing_acts(tmp_path, data):
    result = run(tmp_path, "serial", 100, data)
    assert result["reason"] == "max_learner_steps" and result["learner_steps"] == 100
    assert "env_steps" not in result
    assert [row["learner_steps"] for row in rows_of(tmp_path, "evaluator")] == [40, 80, 100]
    assert not any("env_steps" in row for row in rows_of(tmp_path, "learner"))
    newest = RunFolder.open(tmp_path).checkpointer.restore()
    assert newest.step == 100
    assert newest.state("learner", "learner")["env_steps"] == 100  # What schedules saw.


def test_a_run_in_which_nothing_acts_continues_and_shows_its_steps(tmp_path, data):
    run(tmp_path, "threads", 50, data)
    assert run(tmp_path, "threads", 120, data)["learner_steps"] == 120
    folder = RunFolder.open(tmp_path)
    assert folder.checkpointer.restore().step == 120
    assert "learner steps       120 / 120" in status.text(folder)
    assert read_curve(folder, "evaluator", "episode_return").x[-1] == 120


def test_a_clock_names_its_budget():
    config = RunConfig(max_env_steps=5, max_learner_steps=7)
    counts = {"env_steps": 1, "learner_steps": 2, "critic_steps": 3}
    for clock, now, limit in ((Clock(), 1, 5), (Clock("learner_steps"), 2, 7), (Clock("critic_steps"), 3, 7)):
        assert (clock.now(counts), clock.limit(config), clock.now({})) == (now, limit, 0)


def test_all_episodes_are_learned_from_and_a_resumed_run_has_them_once(tmp_path, data):
    run(tmp_path, "serial", 20, data)
    assert run(tmp_path, "threads", 40, data)["learner_steps"] == 40
    with np.load(RunFolder.open(tmp_path).checkpointer.restore().path / "replay" / "table-0.npz") as table:
        assert len(table["index"]) == read_episodes(data).num_steps


def test_two_learners_share_the_data(tmp_path, data):
    agent = DQN(DQNConfig(hidden_sizes=(8,), batch_size=32))
    config = RunConfig(dataset=str(data), max_learner_steps=20, num_learners=2, num_evaluation_episodes=1)
    result = launch.launch(make_program(agent, CARTPOLE, config), engine="processes")
    assert (result["reason"], result["learner_steps"]) == ("max_learner_steps", 20)


def test_a_program_needs_no_environment_to_learn_from_data(tmp_path, data):
    result = run(tmp_path, "serial", 20, data, environment=None)
    assert result["learner_steps"] == 20 and "episode_return" not in result
    with pytest.raises(RunError, match="learned from a dataset without an environment"):
        RunFolder.open(tmp_path).environment_factory()


def test_what_cannot_learn_from_data_says_so(data):
    with pytest.raises(ValueError, match=r"dataset: got .* expected None: PPO learns from what its own"):
        make_program(PPO(), CARTPOLE, RunConfig(dataset=str(data)))
    with pytest.raises(ValueError, match="max_env_steps: got 5 with a dataset, expected None"):
        RunConfig(dataset=str(data), max_env_steps=5)
    with pytest.raises(ValueError, match="environment: got None"):
        make_program(DQN(), None, RunConfig())
    with pytest.raises(ValueError, match=r"got the observation float32\[.*4\], expected float32\[.*3\]"):
        make_program(TD3BC(), "gymnasium:Pendulum-v1", RunConfig(dataset=str(data)))
