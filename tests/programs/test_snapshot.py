"""A serial run that was interrupted continues bit for bit: the same parameters and rows as without a stop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import time

import callers
import gymnasium
import numpy as np
import pytest
import torch
from helpers.numpy_agent import Linear

import launch
from agents.a2c import A2CConfig
from agents.a3c import A3C
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.mpo import MPO, MPOConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.random_actions import RandomActions
from agents.sac import SAC, SACConfig
from examples.flows import DQNPlan
from framework.checkpoints import Checkpointer
from framework.loggers import InMemoryLogger
from framework.programs import RunConfig, make_program, snapshot
from framework.runs.run_folder import RunError

CARTPOLE, PENDULUM = "gymnasium:CartPole-v1", "gymnasium:Pendulum-v1"
SMALL = {"min_replay_size": 100, "batch_size": 16, "samples_per_insert": 4.0, "hidden_sizes": (16,)}
SEQUENCES = {"unroll_length": 6, "burn_in": 3, "period": 6, "batch_size": 4, "samples_per_insert": 2.0}
AGENTS = {
    "dqn": lambda: DQN(DQNConfig(**SMALL)),
    "prioritized": lambda: DQN(DQNConfig(**SMALL, prioritized=True)),
    "ppo": lambda: PPO(PPOConfig(unroll_length=16, hidden_sizes=(16,))),
    "impala": lambda: IMPALA(IMPALAConfig(unroll_length=8, lstm_size=8, hidden_sizes=(16,))),
    "mpo": lambda: MPO(MPOConfig(**SMALL)),
    "r2d2": lambda: R2D2(R2D2Config(**SEQUENCES)),
    "sac": lambda: SAC(SACConfig(**SMALL)),
    "random": lambda: RandomActions(),
    "a3c": lambda: A3C(A2CConfig(unroll_length=2)),
    "dqn-plan": lambda: DQNPlan(DQNConfig(**SMALL)),
    "numpy": lambda: Linear(),
}
PERIODS = {"evaluate_period": 200, "log_period": 50, "learner_log_period": 7}
BASE = RunConfig(num_actors=2, envs_per_actor=2, max_env_steps=450, num_evaluation_episodes=1, **PERIODS)


def program(agent: str, environment: str, config: RunConfig, on_write=None):
    return make_program(AGENTS[agent](), environment, config, on_write=on_write)


def run(agent: str, environment: str, config: RunConfig, passes: int | None = None):
    """Runs a program to its end, or for a number of passes of its nodes; returns its result."""
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
    if isinstance(left, torch.Tensor | np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def assert_same_run(one: str, other: str) -> None:
    assert rows(one) == rows(other)
    parts = last_checkpoint(one), last_checkpoint(other)
    assert parts[0].names == parts[1].names
    for name in set(parts[0].names) - {"replay", "replay-0", "replay-1"}:
        assert same(parts[0].state(name), parts[1].state(name)), name


CASES = [("prioritized", "local"), ("ppo", "server"), ("impala", "alternating+server")]
CASES += [("r2d2", "local"), ("sac", "server"), ("dqn-plan", "local"), ("numpy", "local")]
CASES += [pytest.param(name, "local", marks=pytest.mark.release) for name in ("mpo", "a3c")]


@pytest.mark.parametrize(("agent", "inference"), CASES)
def test_an_interrupted_run_continues_bit_for_bit(tmp_path, agent, inference):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    continuous = agent in ("mpo", "sac")  # They learn in every step.
    environment, steps = (PENDULUM, 250) if continuous else (CARTPOLE, BASE.max_env_steps)
    config = dataclasses.replace(BASE, inference=inference, directory=whole, max_env_steps=steps)
    run(agent, environment, config)
    config = dataclasses.replace(config, directory=parts)
    for passes in (7, 9) if agent == "ppo" else (23, 31):  # A pass of PPO's actors is half an unroll.
        run(agent, environment, config, passes)
        assert "program" in last_checkpoint(parts).names
    run(agent, environment, config)
    assert_same_run(whole, parts)
    assert "program" not in last_checkpoint(parts).names


@pytest.fixture(scope="module")
def whole_ppo(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    directory = str(tmp_path_factory.mktemp("whole"))
    run("ppo", CARTPOLE, dataclasses.replace(BASE, directory=directory))
    return directory


@pytest.mark.parametrize("leaves", [False, True], ids=["stop", "stop in with"])
def test_a_stop_without_a_wait_saves_the_state(tmp_path, leaves, whole_ppo):
    parts = str(tmp_path)
    config = dataclasses.replace(BASE, directory=parts)
    job = launch.start(program("ppo", CARTPOLE, config), engine="serial")
    with job if leaves else contextlib.nullcontext():
        for _ in range(20):
            with pytest.raises(TimeoutError):
                job.wait(timeout=0.0)
        job.stop()
    assert job.over
    assert "program" in last_checkpoint(parts).names
    run("ppo", CARTPOLE, config)
    assert_same_run(whole_ppo, parts)


def test_a_run_with_shards_and_a_variable_source_continues_bit_for_bit(tmp_path):
    """Also with another limit: the source, which has nothing to do, counts as finished from the beginning."""
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    config = dataclasses.replace(BASE, replay_shards=2, variable_sources=1, directory=whole)
    run("dqn", CARTPOLE, config)
    config = dataclasses.replace(config, directory=parts)
    run("dqn", CARTPOLE, dataclasses.replace(config, max_env_steps=2 * BASE.max_env_steps), 60)
    assert "program" in last_checkpoint(parts).names
    run("dqn", CARTPOLE, config)
    assert_same_run(whole, parts)


def test_a_stop_within_a_pass_continues_with_the_next_node(tmp_path, whole_ppo):
    parts, written = str(tmp_path), 0

    def stop_at_the_third_row(snapshot):
        nonlocal written
        written += 1
        if written == 3:
            launch.stop()

    config = dataclasses.replace(BASE, directory=parts)
    launch.launch(program("ppo", CARTPOLE, config, stop_at_the_third_row), engine="serial")
    assert "program" in last_checkpoint(parts).names
    run("ppo", CARTPOLE, config)
    assert_same_run(whole_ppo, parts)


class Watched(RandomActions):
    """Its graph is changed between two runs."""

    num_watchers = 1

    def build(self, graph):
        super().build(graph)
        for _ in range(self.num_watchers):
            graph.add_node("watcher", launch.CourierNode(object))


@pytest.mark.parametrize("num_watchers", [0, 2])
def test_another_graph_begins_new_episodes(tmp_path, caplog, monkeypatch, num_watchers):
    config = dataclasses.replace(BASE, directory=str(tmp_path / "run"))
    job = launch.start(make_program(Watched(), CARTPOLE, config), engine="serial")
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.0)
    job.stop()
    monkeypatch.setattr(Watched, "num_watchers", num_watchers)
    result = launch.launch(make_program(Watched(), CARTPOLE, config), engine="serial")
    assert result["env_steps"] == config.max_env_steps
    assert f"nodes of watcher: got {num_watchers or None}, expected 1" in caplog.text


def test_a_state_of_another_user_is_not_unpickled(tmp_path, caplog, monkeypatch):
    config = dataclasses.replace(BASE, directory=str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    run("ppo", CARTPOLE, config, passes=20)
    assert (tmp_path / "one" / "repertory" / "snapshot-key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    run("ppo", CARTPOLE, config)
    assert "by another user or machine" in caplog.text


BAD_KEYS = {
    # name: (contents, mode, what to do)
    "of a write that was cut off": (b"", 0o600, "got a key of 0 bytes of user .*, expected 32 .* Delete it"),
    "too long": (bytes(33), 0o600, "got a key of 33 bytes of user .*, expected 32 .* Delete it"),
    "that others read": (bytes(32), 0o640, "other users may read, expected mode 0600. Run chmod 600"),
    "that others write": (bytes(32), 0o602, "other users may read, expected mode 0600. Run chmod 600"),
}


@pytest.mark.parametrize(("content", "mode", "advice"), BAD_KEYS.values(), ids=BAD_KEYS)
def test_a_key_that_others_may_know_is_refused(tmp_path, monkeypatch, content, mode, advice):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    snapshot._signature(b"data")
    path = tmp_path / "repertory" / "snapshot-key"
    assert len(path.read_bytes()) == 32 and os.listdir(path.parent) == [path.name]
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"{path}.*{advice}"):
        snapshot._signature(b"data")


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    snapshot._signature(b"data")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ValueError, match=f"expected 32 of user {other}. Delete it: .*XDG_CACHE_HOME"):
        snapshot._signature(b"data")


def test_a_key_whose_write_fails_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space is left")))
        with pytest.raises(ValueError, match="no space is left"):
            snapshot._signature(b"data")
    assert os.listdir(tmp_path / "repertory") == []
    assert snapshot._signature(b"data") == snapshot._signature(b"da", b"ta")


class Doubled(gymnasium.Wrapper):
    """Takes a function among its options."""

    def __init__(self, double):
        super().__init__(gymnasium.make("CartPole-v1"))
        assert double(1) == 2


def twice(number: int) -> int:
    return 2 * number


def test_a_run_whose_options_are_functions_resumes_exactly(tmp_path, caplog):
    config = dataclasses.replace(BASE, directory=str(tmp_path), environment_options={"double": twice})
    run("dqn", Doubled, config, passes=20)
    assert "exact state" not in caplog.text
    assert "program" in last_checkpoint(config.directory).names
    assert run("dqn", Doubled, config)["env_steps"] == BASE.max_env_steps
    assert "new episodes" not in caplog.text


def unpicklable(num_envs: int, seed: int):
    environment = gymnasium.make("CartPole-v1")
    environment.unwrapped.generator = (i for i in range(3))
    return environment


@pytest.mark.parametrize(("environment", "folder"), [(unpicklable, "cache"), (CARTPOLE, "file/cache")])
def test_a_state_that_cannot_be_saved_is_reported(tmp_path, caplog, monkeypatch, environment, folder):
    """The environment cannot be pickled, or there is no place for the key."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
    config = dataclasses.replace(BASE, directory=str(tmp_path / "run"), envs_per_actor=1)
    run("ppo", environment, config, passes=20)
    assert "The exact state of the run was not saved" in caplog.text
    assert "program" not in last_checkpoint(config.directory).names
    assert run("ppo", environment, config)["env_steps"] == BASE.max_env_steps


def test_rows_say_that_a_run_was_resumed_with_new_episodes(tmp_path):
    config = dataclasses.replace(BASE, directory=str(tmp_path))
    run("dqn", CARTPOLE, dataclasses.replace(config, max_env_steps=300))  # ends by itself: no exact state
    before = rows(str(tmp_path))
    assert not any("resumed" in row for row in before)
    launch.launch(program("dqn", CARTPOLE, config), engine="threads")
    after = rows(str(tmp_path))[len(before) :]
    first = {row["label"]: row for row in reversed(after)}
    assert all(row["resumed"] for row in first.values())
    assert sum("resumed" in row for row in after) == len(first)


def start(config: RunConfig, agent=None, **kwargs):
    agent = agent or AGENTS["ppo"]()
    return launch.start(make_program(agent, CARTPOLE, config, **kwargs), engine="serial")


def objects(job) -> dict:
    return {place.label: place.object for place in job._instances}


def stop_when(job, condition) -> None:
    """Runs a pass after the other until `condition()`, and interrupts the program."""
    while True:
        with pytest.raises(TimeoutError):
            job.wait(timeout=0.0)
        if condition():
            break
    job.stop()
    job.wait()


class Drawing(gymnasium.Env):
    """Rewards are from the global generators, and end with the number of torch threads."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

    def reset(self, **_):
        self.left = 5
        return np.zeros(2, np.float32), {}

    def step(self, _):
        self.left -= 1
        drawn = random.random() + np.random.rand() + torch.rand((), dtype=torch.float64).item()
        return np.zeros(2, np.float32), 10 * torch.get_num_threads() + drawn, self.left == 0, False, {}


def test_a_run_has_generators_and_settings_of_its_own_also_when_it_is_resumed(tmp_path):
    config = dataclasses.replace(BASE, max_env_steps=120, evaluate_period=None, log_period=10)
    returns = []
    for directory, passes in (("whole", ()), ("parts", (4, 4))):
        config = dataclasses.replace(config, directory=str(tmp_path / directory))
        for count in (*passes, None):
            np.random.rand()  # The caller's generators are elsewhere at each start.
            with callers.unusual_settings() if count else contextlib.nullcontext():
                before = callers.generators(), callers.settings()
                job = launch.start(make_program(AGENTS["ppo"](), Drawing, config), engine="serial")
                for _ in range(count or 0):
                    with pytest.raises(TimeoutError):
                        job.wait(timeout=0.0)
                if count:
                    job.stop()
                job.wait()
                assert (callers.generators(), callers.settings()) == before
        returns.append([row["episode_return"] for row in rows(config.directory) if "episode_return" in row])
    assert returns[0] == returns[1] and min(returns[0]) > 50 and len(set(returns[0])) == len(returns[0])
    assert_same_run(str(tmp_path / "whole"), str(tmp_path / "parts"))


def test_a_clock_that_began_again_delays_no_checkpoint(tmp_path, monkeypatch):
    """Like the clock of a machine that was started again."""
    periods = {"checkpoint_period": None, "checkpoint_minutes": 1e-9, "keep_checkpoints": 50}
    config = dataclasses.replace(BASE, directory=str(tmp_path), **periods)
    run("ppo", CARTPOLE, config, passes=20)
    checkpoints = Checkpointer(tmp_path / "checkpoints").checkpoints
    before, now = len(checkpoints()), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() - 1e6)
    run("ppo", CARTPOLE, config)
    assert len(checkpoints()) > before + 1, "not only the last"


def test_a_lower_limit_than_the_next_evaluation_ends_the_run(tmp_path):
    config = dataclasses.replace(BASE, directory=str(tmp_path), evaluate_period=5_000, max_env_steps=100_000)
    run("ppo", CARTPOLE, config, passes=20)
    result = run("ppo", CARTPOLE, dataclasses.replace(config, max_env_steps=400))
    assert result["env_steps"] == 400


def test_no_learner_step_is_made_above_a_limit_that_is_set_at_the_resume(tmp_path):
    config = dataclasses.replace(BASE, directory=str(tmp_path))
    run("dqn", CARTPOLE, config, 60)
    steps = last_checkpoint(config.directory).state("learner")["steps"]
    result = run("dqn", CARTPOLE, dataclasses.replace(config, max_learner_steps=steps))
    assert steps > 0 and result == {"reason": "max_learner_steps", "learner_steps": steps}


@pytest.mark.parametrize("limit", [700, 733])
def test_a_lower_limit_than_the_granted_steps_is_exact(tmp_path, limit):
    config = dataclasses.replace(BASE, directory=str(tmp_path), max_env_steps=100_000)
    job = start(config, AGENTS["random"]())
    stop_when(job, lambda: sum(objects(job)[f"actor-{i}"].save()["steps"] for i in range(2)) >= limit - 9)
    result = run("random", CARTPOLE, dataclasses.replace(config, max_env_steps=limit))
    assert result["env_steps"] == limit


@pytest.mark.parametrize(
    ("interrupted", "limit"),
    [(False, {"max_env_steps": 999}), (False, {"target_return": 99.0}), (True, {"max_env_steps": 999})],
)
def test_a_run_at_its_end_is_not_extended(tmp_path, interrupted, limit):
    config = dataclasses.replace(BASE, directory=str(tmp_path), max_env_steps=340)
    job = start(config, AGENTS["random"]())
    if interrupted:
        stop_when(job, lambda: any(objects(job)[f"actor-{i}"].finished() for i in range(2)))
    job.wait()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"got .*\. A run that has ended on engine 'serial'"):
        start(dataclasses.replace(config, **limit), AGENTS["random"]()).wait()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


class Unpicklable(InMemoryLogger):
    def __init__(self):
        super().__init__()
        self.items, self.is_closed = (i for i in range(3)), False

    def close(self):
        self.is_closed = True


def test_a_resumed_run_writes_to_its_own_logger(tmp_path):
    config = dataclasses.replace(BASE, directory=str(tmp_path))
    first, second = Unpicklable(), Unpicklable()
    stop_when(start(config, logger_factory=lambda: first), lambda: first.rows)
    assert "program" in last_checkpoint(str(tmp_path)).names and first.is_closed
    start(config, logger_factory=lambda: second).wait()
    assert max(row.get("env_steps", 0) for row in second.rows) == BASE.max_env_steps


def test_a_state_that_cannot_be_loaded_begins_new_episodes(tmp_path, caplog, monkeypatch):
    config = dataclasses.replace(BASE, directory=str(tmp_path))
    run("ppo", CARTPOLE, config, passes=20)
    with monkeypatch.context() as patch:
        patch.delattr("framework.workers.evaluator.Evaluator")
        assert run("ppo", CARTPOLE, config)["env_steps"] == BASE.max_env_steps
    assert "The exact state cannot be loaded" in caplog.text
