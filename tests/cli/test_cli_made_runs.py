"""The folder of a program made in Python is a run for every command."""

import dataclasses
import os
import runpy
import subprocess
import time
from collections.abc import Callable

import numpy as np
import pytest
import warm_python

import launch
from agents.dqn import DQN, DQNConfig
from agents.random_actions import RandomActions, RandomActionsConfig
from framework.environments.testing import FakeEnvironment
from framework.programs import RunConfig, make_program
from framework.runs import config_file
from framework.runs.run_folder import RunError, RunFolder

SMALL = DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=4.0, hidden_sizes=(16,))


class Own(DQN):
    """An agent that no package declares."""


def config_of(path, **changes):
    settings = {"max_env_steps": 300, "evaluate_period": 150, "num_evaluation_episodes": 2}
    settings["loggers"] = ("csv",)
    return RunConfig(**{**settings, "directory": str(path), **changes})


def run(path, agent=None, environment="gymnasium:CartPole-v1", **changes):
    program = make_program(agent or DQN(SMALL), environment, config_of(path, **changes))
    assert not (path / "config.yaml").exists()  # written when it runs
    launch.launch(program, engine="serial")


def test_every_command_takes_it(repertory, tmp_path):
    path = tmp_path / "run"
    run(path)
    assert (path / "metrics.csv").exists()
    assert RunFolder.open(path).engine == "serial"
    code, out, err = repertory("eval", path, "--episodes", "2")
    assert code == 0, err
    assert "dqn in gymnasium:CartPole-v1, not running" in repertory("status", path)[1]
    assert repertory("stop", path)[0] == 1
    code, out, err = repertory("train", "--resume", path, "--engine", "threads", "--max-env-steps", "400")
    assert code == 0 and "400 env steps is spent" in out, err
    content = config_file.read(path / "config.yaml")
    assert content["engine"] == "threads" and content["max_env_steps"] == 400


SCRIPT = """
import sys, launch
from agents.random_actions import RandomActions
from framework.programs import RunConfig, make_program
def train(path, engine="processes"):
    config = RunConfig(max_env_steps=None, evaluate_period=None, directory=path)
    launch.launch(make_program(RandomActions(), "gymnasium:CartPole-v1", config), engine=engine)
if __name__ == "__main__":
    train(sys.argv[1])
"""


def test_status_and_stop_find_a_program_that_runs(repertory, tmp_path):
    path, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT)
    with warm_python.Popen([script, path], stderr=subprocess.PIPE, text=True) as other:
        try:
            deadline = time.monotonic() + 100
            while not (path / "metrics.jsonl").exists():  # The first rows of the actor.
                assert other.poll() is None and time.monotonic() < deadline, other.stderr.read()
                time.sleep(0.05)
            assert f"running as process {other.pid}" in repertory("status", path)[1]
            with pytest.raises(RunError, match=f"being trained by process {other.pid}"):
                runpy.run_path(script)["train"](str(path), engine="serial")
            code, _, err = repertory("train", "--resume", path)
            assert code == 1 and f"being trained by process {other.pid}" in err
            code, out, _ = repertory("stop", path)
            assert code == 0 and f"--resume {path}" in out
            assert other.wait(60) != 0  # `ProgramInterrupted`
        finally:
            other.kill()
    assert RunFolder.open(path).checkpointer.latest() is not None
    assert "not running" in repertory("status", path)[1]


def run_in(path):
    launch.launch(program_in(path), engine="serial")


def program_in(path):
    return make_program(RandomActions(), "gymnasium:CartPole-v1", config_of(path))


def test_two_programs_of_a_process_cannot_train_in_one_folder(tmp_path):
    with (
        launch.start(program_in(tmp_path), "serial"),
        pytest.raises(RunError, match=f"being trained by process {os.getpid()}"),
    ):
        run_in(tmp_path)
    run_in(tmp_path)  # The folder is free again.


@pytest.mark.parametrize(
    "agent, environment, name",
    [
        (Own(SMALL), "gymnasium:CartPole-v1", "gymnasium:CartPole-v1"),
        (DQN(SMALL), FakeEnvironment, "framework.environments.testing:FakeEnvironment"),
    ],
)
def test_what_it_was_made_of_is_found_again(tmp_path, agent, environment, name):
    run(tmp_path / "run", agent, environment)
    folder = RunFolder.open(tmp_path / "run")
    made = folder.make_agent([__name__, FakeEnvironment.__module__])
    assert type(made) is type(agent) and made.config == SMALL
    assert folder.environment_factory() == name


@dataclasses.dataclass(frozen=True)
class OddConfig(RandomActionsConfig):
    act: Callable[[float], float] = abs


class Odd(RandomActions):
    """Its config holds a function."""

    def __init__(self, config=None):
        super().__init__(config or OddConfig())


def test_what_no_file_can_hold_is_one_clear_error_later(repertory, tmp_path):
    run(tmp_path / "odd", Odd(OddConfig(max_replay_size=np.int64(100))))
    assert RunFolder.open(tmp_path / "odd").agent_config["max_replay_size"] == 100
    run(tmp_path / "nameless", environment=lambda: FakeEnvironment())
    for name, texts in (("odd", ("act was", "built-in function abs")), ("nameless", ("a function of a",))):
        code, _, err = repertory("eval", tmp_path / name, "--allow", __name__)
        assert code == 1 and all(text in err for text in texts)


def test_the_folder_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run"
    run(path)
    with pytest.raises(RunError, match=r"is a run of 'dqn', not of '.*:Own'"):
        make_program(Own(SMALL), "gymnasium:CartPole-v1", config_of(path))
    with pytest.raises(RunError, match="is not the one that the run was trained"):
        make_program(DQN(SMALL), "gymnasium:Acrobot-v1", config_of(path))
    with pytest.raises(RunError, match="in 'gymnasium:CartPole-v1', not in 'gymnasium:CartPole-v0'"):
        make_program(DQN(SMALL), "gymnasium:CartPole-v0", config_of(path))  # Its specs are equal.
    before = (path / "config.yaml").read_bytes()
    launch.launch(make_program(DQN(SMALL), "gymnasium:CartPole-v1", config_of(path)), engine="serial")
    assert (path / "config.yaml").read_bytes() == before
    changed = dataclasses.replace(config_of(path), max_env_steps=350)
    launch.launch(make_program(DQN(SMALL), "gymnasium:CartPole-v1", changed), engine="threads")
    assert RunFolder.open(path).config.max_env_steps == 350
    (path / "config.yaml").unlink()
    with pytest.raises(RunError, match="checkpoints without the config"):
        make_program(Own(SMALL), "gymnasium:CartPole-v1", config_of(path))
