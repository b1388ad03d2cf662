"""What the commands print and write, on run folders made by hand."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import warm_python

import framework
from framework import environments, specs
from framework.commands import cli, listing, serve_environment, train, video
from framework.commands.options import CommandError, TrainOptions
from framework.experiments import running
from framework.programs import Preset, RunConfig, make_agent
from framework.runs import config_file, registry
from framework.runs.presets import presets_of
from framework.runs.registry import agent_names, find_agent
from framework.runs.run_folder import RunError, RunFolder


def test_help(repertory):
    code, out, _ = repertory("--help")
    assert code == 0
    for command in cli.COMMANDS:
        assert command in out
        code, of_command, _ = repertory(command, "--help")
        assert code == 0 and "usage: repertory" in of_command


@pytest.mark.parametrize("name", agent_names())
def test_flags_of_every_agent_have_help(repertory, name):
    config = type(find_agent(name).make_config())
    code, out, _ = repertory("train", name, "--help")
    assert code == 0
    names = {field.name for field in dataclasses.fields(config)}
    for cls in (RunConfig, TrainOptions):  # They would hide these.
        assert not names & {field.name for field in dataclasses.fields(cls)}
    for field in dataclasses.fields(config):
        assert f"--{field.name.replace('_', '-').rstrip('-')}" in out
    text = re.sub(r"[│\s]+", " ", out)
    without_help = re.findall(r"--[\w-]+(?: \{[^}]*\}\S*)?[^a-z({]*\(default", text)
    assert without_help == []


@pytest.mark.parametrize("name", agent_names())
def test_presets_name_real_fields(name):
    for preset in presets_of(find_agent(name).load()).values():
        config, run = find_agent(name).make_config(**preset.agent), RunConfig(**preset.run)
        assert {field: getattr(config, field) for field in preset.agent} == preset.agent
        assert {field: getattr(run, field) for field in preset.run} == preset.run


def test_a_run_may_begin_with_another_preset():
    of_suite = presets_of(find_agent("rainbow").load())["atari:*"]
    flags = ["--environment", "atari:Pong", "--preset", "atari:*", "--n-step", "7"]
    _, options, run, config = train.parse_new("rainbow", flags)
    assert options.environment == "atari:Pong" and run.max_env_steps == of_suite.run["max_env_steps"]
    assert config.torso_size == of_suite.agent["torso_size"] == 0 and config.n_step == 7
    flags = ["--environment=gymnasium:HalfCheetah-v5", "--preset=gymnasium:Ant-v5"]
    _, _, run, _ = train.parse_new("sac", flags)
    assert run.max_env_steps == 1_000_000
    flags = ["--environment=minatar:Breakout", "--preset=beyond_the_rainbow"]
    _, options, run, config = train.parse_new("iqn", flags)
    assert (options.environment, run.envs_per_actor, config.torso) == ("minatar:Breakout", 64, "spectral")
    assert "train iqn --environment SUITE:NAME --preset beyond_the_rainbow" in listing.text()
    with pytest.raises(CommandError, match="--preset: got 'atari', expected one of gymnasium:CartPole-v1, "):
        train.parse_new("rainbow", ["--preset", "atari"])


def test_an_agent_without_presets_has_none():
    assert presets_of(Preset) == {}


def test_flags_override_the_preset_which_overrides_the_default():
    preset = presets_of(find_agent("dqn").load())["gymnasium:CartPole-v1"]
    _, options, run, config = train.parse_new(
        "dqn", ["--envs-per-actor", "3", "--n-step", "7", "--seed", "5"]
    )
    assert run.target_return == preset.run["target_return"] == 475.0
    assert run.envs_per_actor == 3 and config.n_step == 7
    assert run.seed == 5 and options.environment == "gymnasium:CartPole-v1"
    _, options, other, _ = train.parse_new("dqn", ["--environment=gymnasium:Acrobot-v1"])
    assert other.target_return is None and options.environment == "gymnasium:Acrobot-v1"


@pytest.mark.parametrize(
    ("agent", "flags", "expected"),
    [
        ("ppo", "--environment gymnasium:LunarLander-v3", 50_000),  # The preset's, in its own length or more.
        ("ppo", "--environment gymnasium:LunarLander-v3 --max-env-steps 900_000", 50_000),
        ("ppo", "--environment gymnasium:LunarLander-v3 --max-env-steps 100_000", 10_000),
        (
            "ppo",
            "--environment gymnasium:LunarLander-v3 --max-env-steps 100_000 --evaluate-period=50000",
            50_000,
        ),
        ("ppo", "--environment gymnasium:LunarLander-v3 --max-env-steps 100_000 --config {file}", 50_000),
        ("dqn", "--max-env-steps 49_999", 2_000),
        ("dqn", "--max-env-steps 5 --evaluate_period None --target-return None", None),
        ("random_actions", "", "auto"),
    ],
)
def test_a_run_shorter_than_its_preset_has_ten_evaluations_if_no_period_is_given(
    tmp_path, agent, flags, expected
):
    file = tmp_path / "settings.yaml"
    file.write_text("evaluate-period: 50_000\n")
    _, _, run, _ = train.parse_new(agent, flags.format(file=file).split())
    assert run.evaluate_period == expected


def test_the_environment_if_none_is_given_is_cartpole_or_that_of_the_first_preset():
    for agent, environment in (("dqn", "gymnasium:CartPole-v1"), ("sac", "gymnasium:Pendulum-v1")):
        assert train.parse_new(agent, [])[1].environment == environment


def test_fields_of_an_agent_by_name():
    assert make_agent("dqn", n_step=2).config.n_step == 2
    assert find_agent("random-actions") == find_agent("random_actions")
    assert find_agent("agents.dqn:DQN").load() is find_agent("dqn").load()
    with pytest.raises(ValueError, match=r"no field 'n_steps'.*Did you mean 'n_step'"):
        make_agent("dqn", n_steps=2)
    with pytest.raises(ValueError, match=r"Unknown agent 'ddqn'.*Did you mean 'dqn'"):
        make_agent("ddqn")


@pytest.mark.parametrize("declared", ["soft-q", "soft_q"])
def test_hyphens_in_the_name_of_an_agent(declared, monkeypatch):
    monkeypatch.setattr(registry, "_entry_points", lambda: {declared: "agents.dqn:DQN"})
    assert find_agent("soft-q") == find_agent("soft_q") == registry.AgentEntry(declared, "agents.dqn:DQN")


HOLDER = """
import os, signal, sys
from framework.runs.run_folder import RunFolder

def stop(*_):
    os.write(1, b"asked\\n")  # `print` may be interrupted in `print`
    sys.exit(3)

signal.signal(signal.SIGTERM, stop if sys.argv[2] == "stops" else signal.SIG_IGN)
with RunFolder.open(sys.argv[1]).lock.held():
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(folder, at_sigterm="goes on"):
    """Another process that holds the lock of a run."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with warm_python.Popen(["-c", HOLDER, folder.path, at_sigterm], **pipes) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            yield other
        finally:
            other.kill()


class TestRunFolder:
    def test_what_is_recorded(self, make_run):
        content = config_file.read(make_run().path / "config.yaml")
        assert content["agent"] == "random_actions" and content["max_env_steps"] == 1000
        recorded = content["recorded"]
        assert {"numpy", "torch", "gymnasium", "python"} <= set(recorded["versions"])
        assert "started_at" in recorded and "command" in recorded and "git_commit" in recorded

    def test_the_first_command_stays(self, make_run, monkeypatch):
        folder = make_run()
        first = config_file.read(folder.path / "config.yaml")["recorded"]
        for command in (["repertory", "train", "--resume"], ["repertory", "again", "Flatten()"]):
            monkeypatch.setattr(sys, "argv", command)
            folder.save()
        content = config_file.read(folder.path / "config.yaml")["recorded"]
        assert content["command"] == first["command"] and content["started_at"] == first["started_at"]
        assert [start["command"] for start in content["resumed"]] == [
            "repertory train --resume",
            "repertory again 'Flatten()'",
        ]
        assert RunFolder.open(folder.path) == folder

    def test_one_process_at_a_time(self, make_run):
        folder = make_run()
        assert folder.lock.pid() is None
        with folder.lock.held():
            pass
        with held(folder) as other:
            assert folder.lock.pid() == other.pid
            assert not folder.lock.wait_until_free(0.05)
            refused = pytest.raises(RunError, match=f"process {other.pid}.*repertory stop")
            with refused, folder.lock.held():
                pass
            other.stdin.close()
            assert folder.lock.wait_until_free(float("inf"))
        assert folder.lock.pid() is None


class TestStatusAndStop:
    def test_status_of_a_run_that_is_over(self, repertory, make_run):
        folder = make_run(steps=[10], returns=[20.0, 30.0])
        (folder.path / "status.json").write_text(
            json.dumps({"nodes": [{"label": "actor-0", "state": "closed", "restarts": 0, "pid": 77}]})
        )
        code, out, _ = repertory("status", folder.path)
        assert code == 0
        for text in ("not running", "actor-0: closed (pid 77)", "30.0 at step 200", "step-10"):
            assert text in out

    def test_status_is_a_screen_however_many_metrics_there_are(self, repertory, make_run):
        folder = make_run(steps=[10], returns=[30.0])
        with folder.metrics.open("a") as file:
            row = {"label": "learner", "steps": 50, "env_steps": 250, "loss": 0.5}
            file.write(json.dumps({**row, **{f"metric_{i}": i for i in range(100)}}) + "\n")
        out = repertory("status", folder.path)[1]
        assert len(out.splitlines()) < 20
        for damaged in ("[", "[1]", '{"nodes": [3]}', "\udcff"):
            (folder.path / "status.json").write_text(damaged, errors="surrogateescape")
            assert repertory("status", folder.path)[:2] == (0, out)
        for name, value in (("env steps", "250 / 1,000"), ("learner steps", "50"), ("loss", "0.500")):
            assert re.search(rf"{name} +{value}\n", out), out

    def test_status_of_a_resumed_run_leaves_out_lost_work(self, repertory, make_run):
        folder = make_run(steps=[200])
        rows = [
            {"label": "evaluator", "env_steps": 200, "episode_return": 20.0, "time/wall_s": 2},
            {"label": "evaluator", "env_steps": 400, "episode_return": 40.0, "time/wall_s": 4},
            {"label": "actor-0", "env_steps": None, "time/wall_s": 4},
            {"label": "learner", "env_steps": 450, "steps": 45, "time/wall_s": 5},
            {"label": "learner", "env_steps": 250, "steps": 25, "time/wall_s": 1, "resumed_at": 200},
            {"label": "actor-0", "env_steps": 260, "steps": 260, "time/wall_s": 2, "resumed_at": 200},
            {"label": "actor-0", "env_steps": None, "episode_return": None, "time/wall_s": 3},
        ]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = repertory("status", folder.path)[1]
        expected = {"env steps": "260 / 1,000", "learner steps": "25", "return, greedy": "20.0 .*"}
        for name, value in expected.items():
            assert re.search(rf"{name} +{value}\n", out), out

    def test_nodes_of_a_run_that_was_killed_are_not_called_running(self, repertory, make_run):
        folder = make_run(steps=[10])
        nodes = [{"label": "actor-0", "state": "running"}, {"label": "learner", "state": "returned"}]
        (folder.path / "status.json").write_text(json.dumps({"state": "running", "nodes": nodes}))
        code, out, _ = repertory("status", folder.path)
        assert code == 0 and "actor-0: killed" in out and "learner: returned" in out
        _, watched, _ = repertory("status", folder.path, "--watch")  # Once, as the run has ended.
        assert "killed" in watched and "actor-0" in watched
        with folder.lock.held():
            assert "actor-0: running" in repertory("status", folder.path)[1]

    def test_stop_of_a_run_that_is_over(self, repertory, make_run):
        code, _, err = repertory("stop", make_run().path)
        assert code == 1 and "is not running" in err

    @pytest.mark.parametrize("steps", [[], [10]])
    def test_stop_asks_in_good_order_and_waits(self, repertory, make_run, steps):
        folder = make_run(steps=steps)
        with held(folder, "stops") as other:
            code, out, _ = repertory("stop", folder.path)
            assert code == 0 and (f"--resume {folder.path}" in out) == bool(steps)
            assert other.stdout.readline() == "asked\n"
            assert other.wait(20) == 3

    def test_stop_says_when_it_takes_too_long(self, repertory, make_run):
        folder = make_run()
        with held(folder):
            code, _, err = repertory("stop", folder.path, "--timeout", "0.1")
            assert code == 1 and "has not ended after 0.1 seconds" in err and "kill -9" in err


class TestCheckpointChoice:
    @pytest.mark.parametrize(
        "place", ["{run}/checkpoints/{name}", "runs/../{run}/checkpoints/{name}/", "{name}"]
    )
    def test_by_path_or_name(self, make_run, monkeypatch, place):
        folder = make_run(steps=[10, 20])
        (folder.path.parent / "runs").mkdir()
        monkeypatch.chdir(folder.path.parent)
        which = place.format(run=folder.path.name, name="checkpoint-000001-step-10")
        with train.chosen_checkpoint(folder, which):
            assert folder.checkpointer.latest().name == "checkpoint-000001-step-10"

    def test_one_of_another_run_is_refused(self, make_run):
        folder, other = make_run(steps=[10, 20]), make_run("other", steps=[10])
        which = str(other.checkpointer.latest())
        refused = pytest.raises(CommandError, match=r"not one of .*expected latest")
        with refused, train.chosen_checkpoint(folder, which):
            pass
        assert len(folder.checkpointer.checkpoints()) == 2

    def test_the_same_one_again_and_again(self, make_run):
        folder = make_run(steps=[10, 20])
        for _ in range(3):
            with train.chosen_checkpoint(folder, "10"):
                folder.checkpointer.save(20, {})
        aside = sorted(path.name for path in folder.checkpointer.directory.glob("set-aside-*"))
        name = "set-aside-checkpoint-000002-step-20"
        assert aside == [name, f"{name}-2", f"{name}-3"]
        assert len(folder.checkpointer.checkpoints()) == 2

    def test_one_that_cannot_be_set_aside_changes_nothing(self, make_run, monkeypatch):
        folder = make_run(steps=[10, 20, 30])
        before = folder.checkpointer.checkpoints()
        rename = pathlib.Path.rename

        def fail(path, target):
            if path == before[-1]:
                raise PermissionError
            return rename(path, target)

        monkeypatch.setattr(pathlib.Path, "rename", fail)
        with pytest.raises(PermissionError), train.chosen_checkpoint(folder, "10"):
            pass
        assert folder.checkpointer.checkpoints() == before

    @pytest.mark.parametrize("which, left", [("previous", 2), ("latest", 3)])
    def test_a_failed_attempt_keeps_checkpoints_settings_and_result(self, make_run, which, left):
        folder = make_run(steps=[10, 20, 30])
        before = folder.checkpointer.checkpoints()
        (folder.path / "result.json").write_text("{}")
        settings = (folder.path / "config.yaml").read_text()
        with pytest.raises(RuntimeError), train.chosen_checkpoint(folder, which):
            assert len(folder.checkpointer.checkpoints()) == left
            dataclasses.replace(folder, engine="ray").save()
            (folder.path / "result.json").unlink()
            raise RuntimeError("no cluster")
        assert folder.checkpointer.checkpoints() == before
        assert (folder.path / "config.yaml").read_text() == settings
        assert (folder.path / "result.json").read_text() == "{}"

    def test_an_attempt_that_saved_something_keeps_the_newer_ones_aside(self, make_run):
        folder = make_run(steps=[10, 20])
        with pytest.raises(RuntimeError), train.chosen_checkpoint(folder, "10"):
            folder.checkpointer.save(15, {})
            raise RuntimeError
        assert [path.name[-7:] for path in folder.checkpointer.checkpoints()] == ["step-10", "step-15"]


def test_a_path_after_an_equals_sign_may_be_in_the_home_folder(repertory, make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = make_run().path / "config.yaml"
    (tmp_path / "settings.yaml").write_bytes(file.read_bytes())
    code, _, err = repertory("graph", "random_actions", "--config=~/settings.yaml", "--svg=~/graph.svg")
    assert code == 0, err
    assert (tmp_path / "graph.svg").exists()


def test_frames_of_several_agents_end_with_the_episode(capsys):
    environment = environments.make("multi_agent:CartPole", seed=1)
    environment.render = lambda: np.zeros((2, 2, 3), np.uint8)
    actor = SimpleNamespace(
        observe_first=lambda timestep: None,
        select_action=lambda observation: specs.zeros(environment.action_spec(), (1,)),
        observe=lambda action, timestep: None,
    )
    policy = SimpleNamespace(make_environment=lambda *_, **__: environment, make_actor=lambda *_: actor)
    one, two = (len([*video.frames(policy, episodes, 100, 1)]) for episodes in (1, 2))
    assert 5 < one < two < 50
    # Each agent has a reward of 1 a step until its own end. A frame more is of the reset.
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("episode 1 of 2: return ") and first.endswith(f" after {one - 1} steps")
    assert second.startswith("episode 2 of 2: ") and second.endswith(f" after {two - one - 1} steps")
    assert 4 < float(first.split()[5]) <= one - 1
    assert len([*video.frames(policy, 1, 3, 1)]) == 4
    assert capsys.readouterr().out == "episode 1 of 1: return 3.0 after 3 steps so far\n"


def test_what_cannot_be_filmed_says_why():
    class Unseen(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            return np.zeros(2, np.float32), {}

    actor = SimpleNamespace(observe_first=lambda timestep: None)
    policy = SimpleNamespace(
        make_environment=lambda *_, **__: environments.make(Unseen), make_actor=lambda *_: actor
    )
    with pytest.raises(CommandError, match="cannot be filmed: it has no render"):
        next(video.frames(policy, 1, 100, 1))


SPENT = "The budget of 50,000 env steps is spent; greedy mean return over 20 episodes"
# By how a run ended: the greedy return and other numbers of its result, and what the run says.
RESULTS = {
    "target_return": (
        {"env_steps": 38000, "episode_return": 487.25, "episodes": 20},
        "Reached the target return of 475 after 38,000 env steps; "
        "greedy mean return over 20 episodes: 487.2.",
    ),
    "max_env_steps": (
        {"env_steps": 50000, "episode_return": 200.0, "episodes": 20},
        f"{SPENT}: 200.0. The target return of 475 was not reached.",
    ),
    "max_env_steps, not the last parameters": (
        {"env_steps": 50000, "episode_return": 500.0, "episodes": 20, "variables_version": 9870},
        f"{SPENT} (parameters of learner step 9,870): 500.0.",
    ),
    "max_learner_steps": ({}, "The budget of 70 learner steps is spent."),
    "plan_ended": ({"learner_steps": 1200}, "The plan has ended after 1,200 learner steps."),
    "": ({}, "The program ended."),
}


@pytest.mark.parametrize("case", RESULTS)
def test_what_a_run_says_at_its_end(case):
    config = RunConfig(max_env_steps=50_000, max_learner_steps=70, target_return=475.0)
    (numbers, text), reason = RESULTS[case], case.partition(",")[0]
    assert running.describe_result({**numbers, "reason": reason} if reason else {}, config) == text


def test_the_display_ends_with_the_numbers_of_the_result_where_they_are_newer():
    shown = {"counts": {"env_steps": 300, "learner_steps": 20}, "labels": {}}
    result = {"env_steps": 400, "learner_steps": 10, "episode_return": 9.0}
    ended = running.at_the_end(shown, result)
    assert ended == {"counts": {"env_steps": 400, "learner_steps": 20}, "labels": {"evaluator": result}}
    assert shown["counts"]["env_steps"] == 300


def test_the_end_is_told_before_the_curve_is_drawn(repertory, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "draw_run", lambda folder: print("drawn"))
    flags = ["--engine", "serial", "--max-env-steps", "20", "--directory", tmp_path / "run"]
    _, out, _ = repertory("train", "random_actions", *flags)
    assert 0 < out.find("Results are in") < out.find("drawn")


def test_options_of_served_environments_are_those_of_train(repertory, monkeypatch):
    made = {}
    monkeypatch.setattr(serve_environment, "_Environments", lambda name, options, _: made.update(options))
    monkeypatch.setattr(serve_environment.environment_server, "run", lambda make, _: make() or 0)
    arguments = ("serve-environment", "testing:Memory", "--connect=localhost:1", "--key=key", "--options")
    assert repertory(*arguments, "lr=1e-3", "frame-skip=4", "a.b=[x]")[0] == 0
    assert made == {"lr": 1e-3, "frame_skip": 4, "a": {"b": ["x"]}}
    for wrong in ("flag", "a=["):
        code, _, err = repertory(*arguments, wrong)
        assert code == 2 and err.startswith("error: --options: ")


WAIT = """
import os, sys, time

def wait():
    try:
        os.write(1, b"begun\\n")
        time.sleep(60)
    except BaseException as error:  # As modules in C do.
        os.write(1, b"cleaned\\n")
        raise ImportError("it failed") from error
"""
SLOW = f"""{WAIT}
phase = sys.argv[2]
if phase == "import":
    wait()

def main(arguments):
    from framework import interrupts
    if phase == "work":
        interrupts.clean_up_first()
        wait()
    if phase == "end":
        import atexit
        atexit.register(wait)
    return 0
"""


def check_ctrl_c(start, arguments, out="", **options):
    """Interrupts a process once it waits."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(arguments, **pipes, **options) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (out, "Interrupted.\n")
    assert process.returncode == 130


@pytest.mark.parametrize(("phase", "out"), [("import", ""), ("work", "cleaned\n"), ("end", "")])
def test_ctrl_c_prints_one_line(tmp_path, phase, out):
    (tmp_path / "slow.py").write_text(SLOW)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import framework.commands as commands; "
        "from framework.commands import cli; commands.__path__.append(sys.path[0]); "
        f"cli.COMMANDS['slow'] = 'slow', ''; sys.argv = ['', 'slow', {phase!r}]; sys.exit(cli.main())"
    )
    check_ctrl_c(warm_python.Popen, ["-c", code], out)


SERVER = "framework.environments.remote.environment_server"


@pytest.mark.parametrize(
    "command", ["-m framework.commands list", "-m framework.replay", f"-m {SERVER}", f"{SERVER}.py"]
)
def test_ctrl_c_prints_one_line_before_the_command_begins(tmp_path, command):
    (tmp_path / "numpy.py").write_text(f"{WAIT}wait()")  # Which all of them import.
    root = pathlib.Path(framework.__file__).parents[1]
    script = root / SERVER.replace(".", "/")
    arguments = [sys.executable, *command.replace(f"{SERVER}.py", f"{script}.py").split()]
    path = os.pathsep.join(map(str, (tmp_path, root)))
    check_ctrl_c(subprocess.Popen, arguments, env={**os.environ, "PYTHONPATH": path})
