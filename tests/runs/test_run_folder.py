"""The folder of a run whose settings config.yaml cannot hold as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
import threading
import time

import gymnasium
import pytest

import framework
import launch
from agents.random_actions import RandomActions, RandomActionsConfig
from framework.loggers import JSONLLogger
from framework.programs import RunConfig, make_program
from framework.runs import config_file
from framework.runs.run_folder import RunError, RunFolder, git_commits


@dataclasses.dataclass(frozen=True)
class SeededConfig(RandomActionsConfig):
    seed: int = 7  # Also a field of RunConfig.
    restarts: int = 5  # Also an entry of config.yaml.


class Seeded(RandomActions):
    def __init__(self, config: SeededConfig | None = None):
        super().__init__(config or SeededConfig())


def cart_pole(reward_fn=None):
    assert callable(reward_fn)
    return gymnasium.make("CartPole-v1")


def _run(agent, environment, **settings):
    config = RunConfig(**{"max_env_steps": 20, "evaluate_period": None, **settings})
    launch.launch(make_program(agent, environment, config), engine="threads")
    return RunFolder.open(config.directory)


def _folder(path):
    return RunFolder("dqn", {}, None, RunConfig(directory=str(path)), "")


def test_fields_of_the_agent_with_names_of_other_settings_are_kept(tmp_path):
    for _ in range(2):  # A resumed run finds the same settings.
        run = _run(Seeded(), "gymnasium:CartPole-v1", seed=3, directory=str(tmp_path))
        assert (run.config.seed, run.restarts) == (3, 0)
        assert (run.agent_config["seed"], run.agent_config["restarts"]) == (7, 5)
        assert run.make_agent(allow=(__name__,)).config == SeededConfig()


def test_a_run_of_an_earlier_version_with_settings_that_are_gone_is_read(tmp_path):
    _run(RandomActions(), "gymnasium:CartPole-v1", directory=str(tmp_path))
    file = tmp_path / "config.yaml"
    gone = "inference: alternating\ninference_messages: false\ninference_min_batch: 2"
    old = file.read_text().replace("inference: local", gone)
    file.write_text(old)
    run = RunFolder.open(tmp_path)
    assert "alternating" in old and run.config.inference == "local"
    assert run.make_agent().config == RandomActionsConfig()


def test_options_that_the_file_cannot_hold_are_named(tmp_path):
    options = {"reward_fn": len}
    for _ in range(2):
        run = _run(RandomActions(), cart_pole, environment_options=options, directory=str(tmp_path))
    with pytest.raises(RunError, match="environment_options: reward_fn was <built-in function len>"):
        run.environment_factory()


@pytest.mark.parametrize(
    ("agent", "settings", "error"),
    [
        (SeededConfig(batch_size=16), {}, "batch_size: got 16, expected 32. A run that continues keeps"),
        (SeededConfig(), {"num_actors": 2}, "num_actors: got 2, expected 1. A run"),
        (SeededConfig(), {"seed": 4}, "seed: got 4, expected 0. A run"),
        (SeededConfig(seed=8), {}, "seed: got 8, expected 7. A run"),
        (SeededConfig(), {"max_env_steps": 10}, "has made 20 env steps, and its limit is 10. Give it more"),
        (SeededConfig(), {"max_env_steps": 20}, "has made 20 env steps, and its limit is 20. Give it more"),
        (SeededConfig(), {"max_env_steps": 30, "target_return": None}, None),
    ],
)
def test_a_run_continues_with_its_settings_and_more_steps_only(tmp_path, agent, settings, error):
    run = _run(Seeded(), "gymnasium:CartPole-v1", directory=str(tmp_path))
    run.write_json("result.json", {})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with contextlib.nullcontext() if error is None else pytest.raises(RunError, match=error):
        run = _run(Seeded(agent), "gymnasium:CartPole-v1", directory=str(tmp_path), **settings)
    if error is None:
        assert run.config.max_env_steps == run.checkpointer.restore().step == 30
    else:
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_with_graphs_of_a_gpu_continues_without_one(tmp_path):
    ran = dataclasses.replace(_folder(tmp_path), agent_config={"device": "cuda", "step_mode": "cuda_graph"})
    assert not ran.changes(dataclasses.replace(ran, agent_config={"device": "cpu", "step_mode": "eager"}))


def test_a_request_to_stop_is_for_the_program_that_runs_in_the_folder(tmp_path, monkeypatch):
    mine, other = (_folder(tmp_path / name) for name in "ab")
    asked = threading.Event()
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: asked.set())
    for folder in (mine, other):
        folder.path.mkdir()
    mine.lock.ask_to_stop()  # It comes too late, for a program that has ended.
    with mine.lock.held():
        other.lock.ask_to_stop()
        assert not asked.wait(1.0)
        mine.lock.ask_to_stop()
        assert asked.wait(20)
    (mine.path / "run.stop").symlink_to(tmp_path / "file")
    with pytest.raises(RunError, match=r"run\.stop"):
        mine.lock.ask_to_stop()
    assert not (tmp_path / "file").exists()


def test_no_link_in_a_folder_is_followed(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for name in ("run.lock", ".config.yaml.new", "metrics.jsonl"):
        (tmp_path / name).symlink_to(file)
    config_file.write(tmp_path / "config.yaml", {})
    with pytest.raises(OSError):
        JSONLLogger(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match="got a link"), _folder(tmp_path).lock.held():
        pass
    assert file.read_text() == "mine"


def test_a_start_waits_for_a_query_of_the_status(tmp_path):
    """`RunLock.pid` in another process locks the file for a moment; the process that trained was killed."""
    run = _run(RandomActions(), "gymnasium:CartPole-v1", directory=str(tmp_path))
    (tmp_path / "run.lock").write_text("123456\n")
    with open(tmp_path / "run.lock", encoding="utf-8") as query:
        fcntl.flock(query, fcntl.LOCK_SH)
        end = threading.Timer(0.2, fcntl.flock, (query, fcntl.LOCK_UN))
        end.start()
        with run.lock.held():
            assert run.lock.pid() == os.getpid()
        end.join()
    assert run.lock.pid() is None


def test_a_start_during_a_run_is_refused(tmp_path):
    run = _run(RandomActions(), "gymnasium:CartPole-v1", directory=str(tmp_path))
    with run.lock.held():
        began = time.monotonic()
        with pytest.raises(RunError, match=f"by process {os.getpid()}. Stop it first"), run.lock.held():
            pass
        assert run.lock.pid() == os.getpid()
        (tmp_path / "run.lock").write_text("")  # as when it ends
        assert run.lock.pid() is None
        assert time.monotonic() - began < 30
    with run.lock.held() as file:
        forked = os.dup(file.fileno())  # As of a process that was forked meanwhile and is still there.
    assert run.lock.wait_until_free(30)
    os.close(forked)


def test_the_commit_of_another_repository_is_not_that_of_an_installed_package(tmp_path, monkeypatch):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    (tmp_path / ".gitignore").write_text(".venv")
    installed = tmp_path / ".venv" / "framework"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    for command in (["init"], ["add", "."], [*identity, "commit", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(framework, "__path__", [str(installed)])
    monkeypatch.chdir(tmp_path)
    assert git_commits().keys() == {"working_folder"}


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="directory: got ''"):
        RunConfig(directory="")
    assert RunConfig(directory=".").directory == str(tmp_path)
