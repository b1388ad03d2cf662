"""The folder of a run whose settings config.yaml cannot hold as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import subprocess
import threading
import time

import gymnasium
import numpy as np
import pytest
import tree

import framework
import launch
from agents.random_actions import RandomActions, RandomActionsConfig
from framework import specs
from framework.environments import testing as environment_testing
from framework.loggers import JSONLLogger
from framework.programs import RunConfig, make_program
from framework.runs import config_file, recorded_specs
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


OLD_SPEC = (  # As format 3 had it, in a program with a precision of 3.
    "observations: BoundedArray(shape=(4,), dtype=dtype('float32'), name='observation', minimum=[-4.8    "
    "-inf -0.419   -inf], maximum=[4.8    inf 0.419   inf]); actions: DiscreteArray(shape=(), dtype=int64, "
    "name=action, minimum=0, maximum=1, num_values=2)"
)


def _run(agent, environment, engine="threads", **settings):
    config = RunConfig(**{"max_env_steps": 20, "evaluate_period": None, **settings})
    launch.launch(make_program(agent, environment, config), engine=engine)
    return RunFolder.open(config.directory)


def _folder(path):
    return RunFolder("dqn", {}, None, RunConfig(directory=str(path)), "")


def test_fields_of_the_agent_with_names_of_other_settings_are_kept(tmp_path):
    for _ in range(2):  # A resumed run finds the same settings.
        run = _run(Seeded(), "gymnasium:CartPole-v1", seed=3, directory=str(tmp_path))
        assert (run.config.seed, run.restarts) == (3, 0)
        assert (run.agent_config["seed"], run.agent_config["restarts"]) == (7, 5)
        assert run.make_agent(allow=(__name__,)).config == SeededConfig()


def test_what_the_preset_of_a_registered_agent_names_need_not_be_allowed():
    given = {"demonstrations": "agents.rlpd:pendulum"}
    run = RunFolder("rlpd", given, "gymnasium:Pendulum-v1", RunConfig(directory="runs/rlpd"), "")
    run.check_names(())
    for changed in (
        {"environment": "testing:Memory"},
        {"agent_config": {"demonstrations": "agents.rlpd:pendulum(count=9)"}},
        {"agent": "agents.rlpd:RLPD"},
    ):
        with pytest.raises(RunError, match=r"add --allow agents\.rlpd"):
            dataclasses.replace(run, **changed).check_names(())


def test_a_run_of_an_earlier_version_with_settings_that_are_gone_is_read(tmp_path):
    _run(RandomActions(), "gymnasium:CartPole-v1", directory=str(tmp_path))
    file = tmp_path / "config.yaml"
    content = config_file.read(file)
    content["recorded"] |= {"format": 3, "environment_spec": OLD_SPEC}
    gone = {"inference": "alternating", "inference_messages": False, "inference_min_batch": 2}
    config_file.write(file, {**content, **gone})
    run = RunFolder.open(tmp_path)
    assert run.config.inference == "local"
    assert run.make_agent().config == RandomActionsConfig()
    _run(RandomActions(), "gymnasium:CartPole-v1", directory=str(tmp_path), max_env_steps=30)
    content["recorded"]["environment_spec"] = OLD_SPEC.replace("num_values=2", "num_values=3")
    config_file.write(file, content)
    with pytest.raises(RunError, match="is not the one that the run was trained in"):
        _run(RandomActions(), "gymnasium:CartPole-v1", directory=str(tmp_path), max_env_steps=40)


@pytest.mark.parametrize("size", [4, 2_000])
@pytest.mark.parametrize(
    ("change", "expected"),
    {
        "none": ({}, ""),
        "name": ({"name": "other"}, ""),
        "bound": ({"place": 3}, r"observations/b/0: got .*minimum.*, expected .*minimum"),
        "shape": ({"more": 1}, r"observations/b/0: got .*\[\d+1\]|\[5\].*, expected .*\[\d+\]"),
        "dtype": ({"dtype": np.float64}, r'"float64".*, expected .*"float32"'),
        "kind": ({"kind": specs.StackedBoundedArray}, r'"StackedBoundedArray".*, expected .*"BoundedArray"'),
        "actions": ({"actions": 3}, r'actions: got .*"num_values": 3\}, expected .*"num_values": 2\}'),
        "parts": ({"part": "c"}, r"observations/b/0: got no such part, .*; observations/c/0: got \{"),
    }.values(),
)
def test_specs_of_an_environment_are_compared_by_value(tmp_path, size, change, expected):
    def recorded(
        part="b", place=None, more=0, dtype=np.float32, kind=specs.BoundedArray, actions=2, name="a"
    ):
        low = np.linspace(-1.0, 0.0, size + more, dtype=dtype)
        if place is not None:
            low[place] += 1e-6
        observations = {"a": specs.Array((), int), part: (kind(low.shape, dtype, low, np.inf, name=name),)}
        spec = specs.EnvironmentSpec(observations, specs.DiscreteArray(actions, name=name), None, None)
        return recorded_specs.recorded(spec)

    config_file.write(tmp_path / "config.yaml", recorded())
    known = config_file.read(tmp_path / "config.yaml")
    with np.printoptions(precision=2, threshold=3, linewidth=20, suppress=True):
        found = recorded_specs.changed(known, recorded(**change))
    assert re.search(expected, found) if expected else not found


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


def test_a_run_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _run(RandomActions(), "gymnasium:CartPole-v1", directory="~/runs/a")
    assert RunFolder.open("~/runs/a").restore("~/runs/a/checkpoints/checkpoint-000001-step-20").step == 20
    assert (tmp_path / "runs" / "a" / "config.yaml").exists()


def test_numbers_of_numpy_reach_the_last_checkpoint_and_the_result(tmp_path):
    """As tuners give them: they are a file's from the beginning, since JSON cannot hold them at the end."""
    limits = {"max_env_steps": np.int64(20), "max_learner_steps": np.uint8(30)}
    run = _run(RandomActions(), "gymnasium:CartPole-v1", "serial", directory=tmp_path, **limits)
    assert run.checkpointer.restore().step == 20
    run.write_json("result.json", {"return": np.float32(0.5)})
    assert json.loads((tmp_path / "result.json").read_text()) == {"return": 0.5}


_PART = specs.BoundedArray((2,), np.float32, -0.1, np.inf)
_OBSERVATIONS = {
    "a": (specs.DiscreteArray(5), specs.Array((), np.float64)),
    "b": specs.StackedBoundedArray((4, 3, 3), np.uint8, 0, 255),
    "c": {"kind": specs.StackedArray((2, 3), np.int64), "mask": specs.BoundedArray((3,), bool, False, True)},
}
RECORDED = {
    "one agent": environment_testing.make_spec(_OBSERVATIONS, {"x": _PART, "y": specs.DiscreteArray(3)}),
    "names as those of agents": environment_testing.make_spec({"x": _PART}, {"x": _PART}),
    "two rewards": environment_testing.make_spec(
        _PART, _PART, dict.fromkeys(("cost", "reward"), specs.Array((), np.float32))
    ),
    "agents": specs.EnvironmentSpec(
        *[{"x": leaf, "y": leaf} for leaf in environment_testing.make_spec(_PART, specs.DiscreteArray(2))]
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_specs_are_restored(tmp_path, name):
    spec = RECORDED[name]
    config_file.write(tmp_path / "config.yaml", recorded_specs.recorded(spec))
    known = config_file.read(tmp_path / "config.yaml")
    found = recorded_specs.restored(known)
    assert specs.agents(found) == specs.agents(spec) and not recorded_specs.changed(
        known, recorded_specs.recorded(found)
    )
    for got, want in zip(tree.flatten(found), tree.flatten(spec), strict=True):
        assert type(got) is type(want)
        assert got.replace(name=None) == want.replace(name=None)


def test_a_record_that_says_too_little_restores_nothing():
    bounds = np.linspace(0.0, 1.0, 200, dtype=np.float32)
    many = specs.BoundedArray(bounds.shape, np.float32, bounds, 2.0)
    hashed = recorded_specs.recorded(environment_testing.make_spec(many, specs.DiscreteArray(2)))
    older = {name: hashed[name] for name in ("observations", "actions")}
    for known in ("the text of format 3", older, hashed, {**older, "agents": [], "actions": {"kind": "New"}}):
        assert recorded_specs.restored(known) is None
