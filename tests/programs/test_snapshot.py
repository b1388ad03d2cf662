"""A serial run that was interrupted continues bit for bit: the same parameters and rows as without a stop."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib

import gymnasium
import pytest
import torch

import launch
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from agents.random_actions import RandomActions
from agents.sac import SAC, SACConfig
from framework.checkpoints import Checkpointer
from framework.programs import RunConfig, make_program

CARTPOLE = "gymnasium:CartPole-v1"
AGENTS = {
    "dqn": lambda: DQN(DQNConfig(min_replay_size=100, batch_size=16)),
    "prioritized": lambda: DQN(DQNConfig(min_replay_size=100, batch_size=16, prioritized=True)),
    "ppo": lambda: PPO(PPOConfig(unroll_length=16)),
    "impala": lambda: IMPALA(IMPALAConfig(unroll_length=8)),
    "impala-lstm": lambda: IMPALA(IMPALAConfig(unroll_length=8, lstm_size=8)),
    "sac": lambda: SAC(SACConfig(min_replay_size=100, batch_size=16)),
    "random": lambda: RandomActions(),
}
BASE = RunConfig(
    num_actors=2,
    envs_per_actor=2,
    max_env_steps=700,
    evaluate_period=200,
    num_evaluation_episodes=1,
    log_period=50,
    learner_log_period=7,
)


def program(agent: str, environment: str, config: RunConfig, on_write=None):
    return make_program(AGENTS[agent](), environment, config, on_write=on_write)


def run(agent: str, environment: str, config: RunConfig, passes: int | None = None):
    """Runs a program to its end, or for so many passes of its nodes; returns its result."""
    job = launch.start(program(agent, environment, config), engine="serial")
    for _ in range(passes or 0):
        with pytest.raises(TimeoutError):
            job.wait(timeout=0.0)
    if passes is not None:
        job.stop()
    return job.wait()


def rows(directory: str) -> list[dict]:
    lines = (pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def last_checkpoint(directory: str):
    return Checkpointer(pathlib.Path(directory) / "checkpoints").restore()


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def assert_same_run(one: str, other: str) -> None:
    assert rows(one) == rows(other)
    parts = last_checkpoint(one), last_checkpoint(other)
    assert parts[0].names == parts[1].names
    for name in set(parts[0].names) - {"replay"}:
        assert same(parts[0].state(name), parts[1].state(name)), name


CASES = [
    *((agent, CARTPOLE, "local") for agent in AGENTS if agent != "sac"),
    ("sac", "gymnasium:Pendulum-v1", "local"),
    *((agent, CARTPOLE, mode) for agent in ("dqn", "ppo") for mode in ("server", "alternating")),
    ("impala-lstm", CARTPOLE, "alternating+server"),
    ("sac", "gymnasium:Pendulum-v1", "server"),
]


@pytest.mark.parametrize(
    ("agent", "environment", "inference"), CASES, ids=["-".join((a, m)) for a, _, m in CASES]
)
def test_an_interrupted_run_continues_bit_for_bit(tmp_path, agent, environment, inference):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    config = dataclasses.replace(BASE, inference=inference, directory=whole)
    run(agent, environment, config)
    config = dataclasses.replace(config, directory=parts)
    for passes in (23, 61):
        run(agent, environment, config, passes)
        assert "program" in last_checkpoint(parts).names
    run(agent, environment, config)
    assert_same_run(whole, parts)
    assert "program" not in last_checkpoint(parts).names


ENVIRONMENTS = [
    ("minatar:breakout", "inline", "minatar"),
    ("atari:Pong", "inline", "ale_py"),
    ("gymnasium:HalfCheetah-v5", "inline", "mujoco"),
    ("gymnasium:HalfCheetah-v5", "processes", "mujoco"),
    (CARTPOLE, "vector", "gymnasium"),
]


@pytest.mark.parametrize(("environment", "stepping", "package"), ENVIRONMENTS)
def test_environments_continue_bit_for_bit(tmp_path, environment, stepping, package):
    pytest.importorskip(package)
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    config = dataclasses.replace(
        BASE, directory=whole, max_env_steps=300, evaluate_period=None, stepping=stepping
    )
    run("random", environment, config)
    config = dataclasses.replace(config, directory=parts)
    run("random", environment, config, passes=31)
    assert "program" in last_checkpoint(parts).names
    run("random", environment, config)
    assert_same_run(whole, parts)


def test_a_stop_within_a_pass_continues_with_the_next_node(tmp_path):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    run("dqn", CARTPOLE, dataclasses.replace(BASE, directory=whole))
    written = 0

    def stop_at_the_third_row(snapshot):
        nonlocal written
        written += 1
        if written == 3:
            launch.stop()

    config = dataclasses.replace(BASE, directory=parts)
    launch.launch(program("dqn", CARTPOLE, config, stop_at_the_third_row), engine="serial")
    assert "program" in last_checkpoint(parts).names
    run("dqn", CARTPOLE, config)
    assert_same_run(whole, parts)


def test_a_higher_limit_continues_bit_for_bit(tmp_path):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    run("ppo", CARTPOLE, dataclasses.replace(BASE, directory=whole))
    run("ppo", CARTPOLE, dataclasses.replace(BASE, directory=parts, max_env_steps=100_000), passes=40)
    run("ppo", CARTPOLE, dataclasses.replace(BASE, directory=parts))
    assert_same_run(whole, parts)


def test_other_settings_begin_new_episodes(tmp_path, caplog):
    config = dataclasses.replace(BASE, directory=str(tmp_path))
    run("ppo", CARTPOLE, config, passes=40)
    with caplog.at_level(logging.WARNING):
        result = run("ppo", CARTPOLE, dataclasses.replace(config, log_period=60))
    assert "settings or packages have changed" in caplog.text
    assert result["env_steps"] == BASE.max_env_steps


def test_a_state_of_another_user_is_not_unpickled(tmp_path, caplog, monkeypatch):
    config = dataclasses.replace(BASE, directory=str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    run("ppo", CARTPOLE, config, passes=40)
    assert (tmp_path / "one" / "repertory" / "snapshot-key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with caplog.at_level(logging.WARNING):
        run("ppo", CARTPOLE, config)
    assert "by another user or machine" in caplog.text


def unpicklable(num_envs: int, seed: int):
    environment = gymnasium.make("CartPole-v1")
    environment.unwrapped.generator = (i for i in range(3))
    return environment


def test_an_environment_that_cannot_be_pickled_is_reported(tmp_path, caplog):
    config = dataclasses.replace(BASE, directory=str(tmp_path), envs_per_actor=1)
    with caplog.at_level(logging.WARNING):
        run("ppo", unpicklable, config, passes=20)
    assert "The exact state of the run was not saved" in caplog.text
    assert "program" not in last_checkpoint(str(tmp_path)).names
    assert run("ppo", unpicklable, config)["env_steps"] == BASE.max_env_steps


def test_rows_say_that_a_run_was_resumed_with_new_episodes(tmp_path):
    config = dataclasses.replace(BASE, directory=str(tmp_path))
    run("dqn", CARTPOLE, dataclasses.replace(config, max_env_steps=300))  # ends by itself: no exact state
    before = rows(str(tmp_path))
    assert not any("resumed" in row for row in before)
    run("dqn", CARTPOLE, config)
    after = rows(str(tmp_path))[len(before) :]
    first = {row["label"]: row for row in reversed(after)}
    assert all(row["resumed"] for row in first.values())
    assert sum("resumed" in row for row in after) == len(first)
