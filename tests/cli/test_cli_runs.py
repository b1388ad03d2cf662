"""Whole runs from the command line: train, look, stop, resume."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from framework.loggers import read_jsonl, without_times
from framework.programs import config_file, load_policy
from framework.programs.run_folder import RunFolder

SMALL = (
    "--num-actors",
    "2",
    "--envs-per-actor",
    "2",
    "--evaluate-period",
    "500",
    "--num-evaluation-episodes",
    "4",
)
DQN = (
    "--learner-log-period",
    "20",
    "--min-replay-size",
    "100",
    "--batch-size",
    "16",
    "--samples-per-insert",
    "4",
    "--hidden-sizes",
    "16",
)


def rows(path):
    return [without_times(row) for row in read_jsonl(path / "metrics.jsonl")]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of DQN on the serial engine."""
    path = tmp_path_factory.mktemp("runs") / "dqn"
    arguments = ["train", "dqn", "--engine", "serial", "--max-env-steps", "600", "--directory", str(path)]
    command = [sys.executable, "-m", "framework.commands", *arguments, *SMALL, *DQN, "--loggers", "csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment())
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_what_a_run_leaves(trained):
    path, out = trained
    assert "The budget of 600 env steps is spent" in out
    assert "The target return of 475 was not reached." in out
    for name in ("config.yaml", "metrics.jsonl", "metrics.csv", "checkpoints", "curve.png", "result.json"):
        assert (path / name).exists(), name
    assert json.loads((path / "result.json").read_text())["env_steps"] == 600
    assert RunFolder.open(path).checkpointer.restore().step == 600
    labels = {row["label"] for row in rows(path)}
    assert {"learner", "evaluator", "actor-0", "actor-1"} <= labels


def test_eval_of_a_run(trained, repertory):
    path, _ = trained
    code, out, _ = repertory("eval", path, "--episodes", "7", "--envs", "3", "--seed", "5")
    assert code == 0 and out.startswith("7 episodes with the checkpoint of step 600: return")
    first = json.loads((path / "evaluation.json").read_text())
    assert len(first["returns"]) == first["episodes"] == 7
    repertory("eval", path, "--episodes", "7", "--envs", "3", "--seed", "5")
    assert json.loads((path / "evaluation.json").read_text()) == first


def test_eval_of_a_damaged_checkpoint(trained, repertory, tmp_path):
    path, _ = trained
    subprocess.run(["cp", "-r", str(path), str(tmp_path / "copy")], check=True, timeout=20)
    part = RunFolder.open(tmp_path / "copy").checkpointer.latest() / "learner"
    part.write_bytes(part.read_bytes()[:100])
    code, _, err = repertory("eval", tmp_path / "copy")
    assert code == 1 and "learner is truncated" in err and "--checkpoint" in err


def test_a_policy_from_python(trained):
    path, _ = trained
    policy = load_policy(path)
    assert policy.step == 600
    environment = policy.make_environment(num_envs=3, seed=1)
    try:
        timestep = environment.reset()
        for _ in range(5):
            action = policy(timestep.observation)
            assert action.shape == (3,)
            timestep = environment.step(action)
    finally:
        environment.close()


@pytest.mark.parametrize("name", ["film.mp4", "film.gif"])
def test_video_of_a_run(trained, repertory, tmp_path, name):
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("pygame")
    path, _ = trained
    code, out, err = repertory("video", path, "--output", tmp_path / name, "--max-steps", "8")
    assert code == 0, err
    with imageio.get_reader(tmp_path / name) as reader:
        pictures = [picture.shape[:2] for picture in reader]
    assert "9 pictures" in out and set(pictures) == {(400, 600)}
    assert len(pictures) == 9 if name == "film.mp4" else 5 <= len(pictures) <= 9  # gif joins equal ones


def test_unknown_video_format(trained, repertory):
    code, _, err = repertory("video", trained[0], "--output", "film.avi")
    assert code == 2 and "film.avi" in err and ".mp4 or .gif" in err


def test_resume_goes_on_to_a_new_limit(trained, repertory, tmp_path):
    path, _ = trained
    subprocess.run(["cp", "-r", str(path), str(tmp_path / "copy")], check=True, timeout=20)
    before = rows(tmp_path / "copy")
    code, out, err = repertory("train", "--resume", tmp_path / "copy", "--max-env-steps", "900")
    assert code == 0, err
    assert "The budget of 900 env steps is spent" in out
    after = rows(tmp_path / "copy")
    assert after[: len(before)] == before  # what was logged stays
    learner_steps = [row["steps"] for row in after if row["label"] == "learner"]
    assert learner_steps == sorted(learner_steps)
    assert RunFolder.open(tmp_path / "copy").checkpointer.restore().step == 900
    assert RunFolder.open(tmp_path / "copy").config.max_env_steps == 900


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_run_of_a_gpu_is_evaluated_and_resumed_without_one(trained, repertory, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(trained[0]), str(copy)], check=True, timeout=20)
    content = config_file.read(copy / "config.yaml")
    config_file.write(copy / "config.yaml", {**content, "device": "cuda"})
    code, _, err = repertory("eval", copy, "--episodes", "1")
    assert code == 0, err
    more = ("train", "--resume", copy, "--max-env-steps", "900")
    code, _, err = repertory(*more)
    assert code == 1 and "device: got 'cuda', expected a device of this process, which sees no GPU" in err
    code, _, err = repertory(*more, "--device", "cpu")
    assert code == 0, err
    assert config_file.read(copy / "config.yaml")["device"] == "cpu"


def test_the_same_seed_gives_the_same_metrics(repertory, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        arguments = (
            "--engine",
            "serial",
            "--max-env-steps",
            "500",
            "--seed",
            seed,
            "--directory",
            tmp_path / name,
        )
        code, _, err = repertory("train", "random_actions", *arguments, *SMALL)
        assert code == 0, err
    assert rows(tmp_path / "a") == rows(tmp_path / "b") != rows(tmp_path / "c")


def start(path, engine="processes", *more):
    arguments = ["train", "random_actions", "--engine", engine, "--directory", str(path)]
    arguments += ["--max-env-steps", "100000000", *SMALL, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "framework.commands", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def wait_for_steps(process):
    """Reads the progress lines until the actors have begun."""
    for line in process.stdout:
        if line.startswith("env steps"):
            return
    raise AssertionError(f"the run ended: {process.stderr.read()}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_a_resumable_checkpoint(repertory, tmp_path, number):
    with start(tmp_path / "run") as process:
        try:
            wait_for_steps(process)
            process.send_signal(number)
            out, err = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 128 + number, err
    assert f"Stopped by {number.name}" in out and "--resume" in out
    step = RunFolder.open(tmp_path / "run").checkpointer.restore().step
    assert step > 0
    limit = step + 500
    code, out, err = repertory(
        "train", "--resume", tmp_path / "run", "--engine", "serial", "--max-env-steps", limit
    )
    assert code == 0, err
    assert f"The budget of {limit:,} env steps is spent" in out


@pytest.mark.slow
def test_a_serial_run_that_was_interrupted_is_the_same_run(tmp_path):
    command = [sys.executable, "-m", "framework.commands", "train"]
    settings = ["ppo", "--engine", "serial", "--max-env-steps", "6000", "--unroll-length", "32", *SMALL]
    settings += ["--target-return", "1000"]  # It cannot end before its last step.
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    done = subprocess.run([*command, *settings, "--directory", whole], **options, timeout=110)
    assert done.returncode == 0, done.stderr
    with subprocess.Popen([*command, *settings, "--directory", parts], **options) as process:
        try:
            wait_for_steps(process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGINT, err
    assert len(rows(parts)) < len(rows(whole))
    resume = [*command, "--resume", parts, "--engine", "serial"]
    done = subprocess.run(resume, **options, timeout=110)
    assert done.returncode == 0, done.stderr
    assert rows(parts) == rows(whole)


@pytest.mark.slow
def test_status_and_stop_of_a_running_run(repertory, tmp_path):
    with start(tmp_path / "run") as process:
        try:
            wait_for_steps(process)
            code, out, _ = repertory("status", tmp_path / "run")
            assert code == 0 and f"running as process {process.pid}" in out
            code, _, err = repertory("train", "--resume", tmp_path / "run")
            assert code == 1
            code, out, err = repertory("stop", tmp_path / "run")
            assert code == 0, err
            process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    code, out, _ = repertory("status", tmp_path / "run")
    assert "not running" in out


def test_environments_and_agents_of_the_folder_at_hand(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "from agents.random_actions import RandomActions\n"
        "gymnasium.register('Mine-v0', CartPoleEnv, max_episode_steps=20)\n"
        "class Mine(RandomActions):\n    'Nothing new.'\n"
    )
    script = shutil.which("repertory", path=os.path.dirname(sys.executable))
    command = [script, "train", "mine:Mine", "--environment", "gymnasium:mine:Mine-v0", "--engine", "serial"]
    command += ["--max-env-steps", "100", "--directory", "run", "--num-evaluation-episodes", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "mine:Mine in gymnasium:mine:Mine-v0" in done.stdout


def test_a_disk_that_fills_up(tmp_path):
    path = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "framework.commands",
        "train",
        "random_actions",
        "--engine",
        "serial",
        *SMALL,
    ]
    command += ["--log-period", "20", "--directory", str(path), "--max-env-steps", "1000000"]
    limited = ["sh", "-c", 'ulimit -f 60; exec "$@"', "sh", *command, "--max-replay-size", "100"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=100, env=environment())
    assert done.returncode == 1
    assert "size limit" in done.stderr and "--directory" in done.stderr and str(path) in done.stderr
    assert "Traceback" not in done.stderr
    assert len(rows(path)) > 10  # all whole
    assert RunFolder.open(path).checkpointer.restore().step > 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_a_program_of_processes(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").symlink_to("/dev/full")
    with start(path) as process:
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert f"could not write {path / 'metrics.jsonl'}: no space is left on the device" in err
    assert "Traceback" not in err and "--directory" in err
    assert RunFolder.open(path).checkpointer.restore().step > 0
