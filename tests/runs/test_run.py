"""`framework.train`, the settings that it starts from, and `framework.runs.Run`."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading

import numpy as np
import pytest

import framework
import launch
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from agents.random_actions import RandomActions
from agents.sac import SAC
from framework.commands import train as train_command
from framework.environments.testing import FakeEnvironment
from framework.experiments.settings import settings_of
from framework.programs import Callback, Preset, RunConfig, load_policy
from framework.runs import Run
from framework.runs.presets import find_preset
from framework.runs.run_folder import RunError

CARTPOLE = "gymnasium:CartPole-v1"
SHORT = {"max_env_steps": 60, "evaluate_period": 30, "num_evaluation_episodes": 2, "progress": False}


class Patterns:
    PRESETS = {
        "atari:Pong": Preset({"n_step": 3}, {"target_return": 20.0, "num_actors": 1}),
        "minatar:[AB]*": Preset({"n_step": 5}),
        "gymnasium:HalfCheetah-v5": Preset({"n_step": 7}),
        "testing:{Cart,Mem}*": Preset({"n_step": 9}),
    }


FOUND = {
    "atari:Pong": (3, "its own"),
    "atari:Breakout": (3, "atari:Pong"),
    "gymnasium:ALE/Qbert-v5": (3, "atari:Pong"),
    "minatar:Breakout": (5, "its own"),
    "minatar:Seaquest": (5, "minatar:[AB]*"),
    "gymnasium:Ant-v4": (7, "gymnasium:HalfCheetah-v5"),
    "dm_control:cheetah/run": (7, "gymnasium:HalfCheetah-v5"),
    "gymnasium:CartPole-v1": (None, "the default settings"),
    "testing:Memory": (9, "its own"),
    "testing:Echo": (None, "the default settings"),
}


@pytest.mark.parametrize("environment", FOUND)
def test_a_preset_is_found_by_name_by_pattern_and_by_family(environment):
    step, origin = FOUND[environment]
    preset, line = find_preset(Patterns, environment)
    assert preset.agent.get("n_step") == step
    assert (not line) if origin == "its own" else (environment in line and line.endswith(f"{origin}."))
    # The return of one environment is no goal in another.
    assert ("target_return" in preset.run) is (environment == "atari:Pong")


def test_preset_is_the_config_of_the_agent_and_says_where_it_comes_from(caplog):
    assert PPO.preset(CARTPOLE) == PPOConfig(**PPO_PRESET.agent) != PPOConfig() and not caplog.text
    assert SAC.preset("gymnasium:Ant-v5") == SAC.preset("dm_control:*") and not caplog.text
    assert SAC.preset("tasks:Other") == SAC.preset("tasks:PointMaze")
    assert "SAC has no preset for tasks:Other" in caplog.text
    with pytest.raises(TypeError, match="Bare, which has no config"):
        Bare.preset(CARTPOLE)


class Bare(RandomActions):
    def __init__(self):
        super().__init__()
        del self.config


PPO_PRESET, _ = find_preset(PPO, CARTPOLE)


def test_the_command_line_and_python_start_from_the_same_settings():
    _, options, config, agent_config = train_command.parse_new("ppo", ["--max-env-steps", "20_000"])
    for agent in ("ppo", PPO):
        made, run, line = settings_of(agent, options.environment, None, {"max_env_steps": 20_000})
        assert (made.config, run, line) == (agent_config, config, "")
    assert config.evaluate_period == 2_000  # A tenth, since the run is shorter than the preset's.


def test_settings_go_to_the_run_and_to_the_agent():
    agent, run, _ = settings_of(
        "ppo", CARTPOLE, {"num_actors": 3}, {"epochs": 2, "hidden_sizes": [8], "seed": 4}
    )
    assert (agent.config.epochs, agent.config.hidden_sizes, agent.config.unroll_length) == (2, (8,), 64)
    assert (run.num_actors, run.envs_per_actor, run.seed) == (3, 8, 4)
    own = RunConfig(max_env_steps=7)  # It replaces the preset's.
    assert settings_of("ppo", CARTPOLE, own, {"seed": 4})[1] == dataclasses.replace(own, seed=4)


def test_an_agent_keeps_its_own_settings_and_its_networks():
    given = DQN(DQNConfig(n_step=4), networks_fn=make_networks)
    agent, run, _ = settings_of(given, CARTPOLE, None, {})
    assert agent is given and run.target_return == 475.0
    agent, _, _ = settings_of(given, CARTPOLE, None, {"batch_size": 7})
    assert (agent.config, agent.networks_fn) == (DQNConfig(n_step=4, batch_size=7), make_networks)
    assert given.config.batch_size == DQNConfig().batch_size


def make_networks(config, spec):
    raise AssertionError("It is not called.")


WRONG = {
    "setting": (("ppo", CARTPOLE, None, {"learning_rat": 1}), ValueError, "Did you mean 'learning_rate'"),
    "value": (("ppo", CARTPOLE, None, {"epochs": 0}), ValueError, "epochs: got 0"),
    "run": (("ppo", CARTPOLE, {"num_actor": 1}, {}), ValueError, "Did you mean 'num_actors'"),
    "kind of run": (("ppo", CARTPOLE, 3, {}), TypeError, "run: got 3, expected a RunConfig or a mapping"),
    "agent": (("pqo", CARTPOLE, None, {}), ValueError, "Unknown agent 'pqo'"),
    "kind of agent": ((3, CARTPOLE, None, {}), TypeError, "agent: got 3"),
    "no such config": ((RandomActions, CARTPOLE, None, {"epochs": 1}), ValueError, "no field 'epochs'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_name_the_right_ones(case):
    arguments, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        settings_of(*arguments)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_train_runs_in_a_folder_and_goes_on_there(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = {name: value for name, value in SHORT.items() if name != "evaluate_period"}  # A tenth of the run.
    run = framework.train(RandomActions, FakeEnvironment, engine=engine, **short)
    assert run.folder.parent == tmp_path / "runs" and run.folder.name.startswith("random_actions-FakeEnv")
    assert run.policy("latest").step == 60  # The caller's own modules may be named.
    assert run.result["env_steps"] == 60 and run.config.seed == 1 and run.config.directory == str(run.folder)
    assert "60 env steps is spent" in capsys.readouterr().out
    with pytest.raises(RunError, match="has made 60 env steps"):
        framework.train(RandomActions, FakeEnvironment, engine=engine, directory=run.folder, **short)
    if engine != "serial":
        more = {**short, "max_env_steps": 90}
        again = framework.train(RandomActions, FakeEnvironment, engine=engine, directory=run.folder, **more)
        assert again.result["env_steps"] == 90 and again.folder == run.folder
        assert again.config.evaluate_period == run.config.evaluate_period
    run = framework.train(RandomActions, FakeEnvironment, engine=engine, run={"seed": 5}, **SHORT)
    assert run.config.seed == 5


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="unknown environment"):
        framework.train("ppo", "gymnasium:CartPol-v1")
    assert not any(tmp_path.iterdir())


class Interrupt(Callback):
    def on_evaluation(self, label, row):
        threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_interrupted_run_raises_and_goes_on_with_the_same_call(tmp_path):
    call = {"engine": "serial", "directory": tmp_path / "run", **SHORT, "max_env_steps": 100_000}
    with pytest.raises(launch.ProgramInterrupted):
        framework.train(RandomActions, FakeEnvironment, callbacks=[Interrupt()], **call)
    run = Run(tmp_path / "run")
    assert run.result is None and run.folder.joinpath("checkpoints").exists()
    call["max_env_steps"] = run.metrics("evaluator")["env_steps"][-1] + 200
    assert framework.train(RandomActions, FakeEnvironment, **call).result["reason"] == "max_env_steps"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    settings = {**SHORT, "max_env_steps": 400, "evaluate_period": 150, "unroll_length": 8, "num_actors": 1}
    return framework.train(
        "ppo", CARTPOLE, engine="serial", directory=tmp_path_factory.mktemp("runs") / "ppo", **settings
    )


def test_metrics_are_columns(trained):
    rows = trained.metrics("evaluator")
    assert rows["episode_return"].dtype == np.float64 and rows["env_steps"][-1] == 400
    assert trained.metrics("actor").keys() == trained.metrics("actor-0").keys()
    everything = trained.metrics()
    assert {"evaluator", "learner", "actor-0"} == {*everything["label"]}
    assert np.isnan(everything["loss"][everything["label"] == "evaluator"]).all()
    with pytest.raises(RunError, match=r"got 'evaluatr'.*Did you mean 'evaluator'"):
        trained.metrics("evaluatr")


def test_best_latest_and_a_step_mean_the_same_to_all(trained):
    rows = trained.metrics("evaluator")
    best = int(rows["env_steps"][len(rows["episode_return"]) - 1 - rows["episode_return"][::-1].argmax()])
    policy = trained.policy()
    assert policy.is_best and policy.step == best
    assert trained.policy("latest").step == trained.policy(400).step == 400
    if best != 400:
        assert trained.policy(best).is_best and load_policy(trained.folder, str(best)).is_best
    with pytest.raises(RunError, match="no checkpoint '7'"):
        trained.policy(7)


def test_a_run_draws_its_returns(trained, tmp_path):
    assert trained.plot() == trained.folder / "curve.png" and trained.plot().stat().st_size > 1000
    with pytest.raises(RunError, match="is not a run"):
        Run(tmp_path)
    assert repr(Run(trained.folder)) == f"Run('{trained.folder}')"


def test_a_run_films_itself(trained):
    path = trained.video(trained.folder / "short.gif", max_steps=3)
    assert path.stat().st_size > 100
