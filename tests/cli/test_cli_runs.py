"""Whole runs from the command line: train, look, stop, resume."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from framework.commands import cli
from framework.loggers import read_jsonl, without_times
from framework.runs import config_file
from framework.runs.run_folder import RunFolder

SMALL = ("--num-actors=2", "--envs-per-actor=2", "--evaluate-period=500", "--num-evaluation-episodes=4")
DQN = ("--learner-log-period=20", "--min-replay-size=100", "--batch-size=16", "--hidden-sizes=16")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def rows(path):
    return [without_times(row) for row in read_jsonl(path / "metrics.jsonl")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of DQN on the serial engine."""
    path = tmp_path_factory.mktemp("runs") / "dqn"
    arguments = ["train", "dqn", "--engine", "serial", "--max-env-steps", "600", "--directory", str(path)]
    assert cli.main([*arguments, *SMALL, *DQN, "--samples-per-insert", "4", "--loggers", "csv"]) == 0
    return path


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def test_what_a_run_leaves(trained):
    for name in ("config.yaml", "metrics.jsonl", "metrics.csv", "checkpoints", "curve.png", "result.json"):
        assert (trained / name).exists(), name
    assert json.loads((trained / "result.json").read_text())["env_steps"] == 600
    assert RunFolder.open(trained).checkpointer.restore().step == 600
    labels = {row["label"] for row in rows(trained)}
    assert {"learner", "evaluator", "actor-0", "actor-1"} <= labels


def test_eval_of_a_run(trained, repertory):
    results = []
    for envs in (2, 3):
        code, out, _ = repertory("eval", trained, "--episodes", "7", "--envs", envs, "--seed", "5")
        assert code == 0 and out.startswith("7 episodes with the checkpoint of step 600: return")
        results.append(json.loads((trained / "evaluation.json").read_text()))
    assert results[0] == results[1] and len(results[0]["returns"]) == results[0]["episodes"] == 7
    assert results[0]["episode_seeds"] == [10_005, 10_011]
    _, out, _ = repertory("eval", trained, "--episodes", "2", "--max-steps", "3")
    assert "length 3.0; 2 cut after 3 steps" in out
    assert json.loads((trained / "evaluation.json").read_text())["cut_episodes"] == 2


@pytest.mark.parametrize("name", ["film.mp4", "film.gif"])
def test_video_of_a_run(trained, repertory, tmp_path, name):
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("pygame")
    code, out, err = repertory("video", trained, "--output", tmp_path / name, "--max-steps", "8")
    assert code == 0, err
    with imageio.get_reader(tmp_path / name) as reader:
        pictures = [picture.shape[:2] for picture in reader]
    assert "9 pictures" in out and set(pictures) == {(400, 600)}
    assert len(pictures) == 9 if name == "film.mp4" else 5 <= len(pictures) <= 9  # gif joins equal ones


def test_unknown_video_format(trained, repertory):
    code, _, err = repertory("video", trained, "--output", "film.avi")
    assert code == 2 and "film.avi" in err and ".mp4 or .gif" in err


def test_resume_goes_on_to_a_new_limit(copied, repertory):
    before = rows(copied)
    more = ("train", "--resume", copied, "--max-env-steps", "900")
    code, out, err = repertory(*more)
    assert code == 2 and "max_env_steps: got 900, expected 600. A run that has ended on" in err
    assert (copied / "result.json").exists() and RunFolder.open(copied).config.max_env_steps == 600
    code, out, err = repertory(*more, "--engine", "threads")
    assert code == 0, err
    assert "The budget of 900 env steps is spent" in out
    assert "The target return of 475 was not reached." in out
    after = rows(copied)
    assert after[: len(before)] == before  # what was logged stays
    learner_steps = [row["steps"] for row in after if row["label"] == "learner"]
    assert learner_steps == sorted(learner_steps)
    assert RunFolder.open(copied).checkpointer.restore().step == 900
    assert RunFolder.open(copied).config.max_env_steps == 900


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_run_of_a_gpu_is_evaluated_and_resumed_without_one(copied, repertory):
    content = config_file.read(copied / "config.yaml")
    config_file.write(copied / "config.yaml", {**content, "device": "cuda"})
    code, _, err = repertory("eval", copied, "--episodes", "1")
    assert code == 0, err
    more = ("train", "--resume", copied, "--max-env-steps", "700", "--engine", "threads")
    code, _, err = repertory(*more)
    assert code == 1 and "device: got 'cuda', expected a device of this process, which sees no GPU" in err
    code, _, err = repertory(*more, "--device", "cpu")
    assert code == 0, err
    assert config_file.read(copied / "config.yaml")["device"] == "cpu"


@pytest.fixture
def endless(start, tmp_path):
    """Starts a run that does not end by itself in the folder ``run``."""

    def begin(engine="processes"):
        flags = ("--directory", tmp_path / "run", "--max-env-steps", "100000000", *SMALL)
        return start("train", "random_actions", "--engine", engine, *flags, **PIPES)

    return begin


def wait_for_steps(process):
    """Reads the progress lines until the actors have begun."""
    for line in process.stdout:
        if line.startswith("env steps"):
            return
    raise AssertionError(f"the run ended: {process.stderr.read()}")


@pytest.mark.parametrize(
    "number, engine", [(signal.SIGINT, "processes"), (signal.SIGTERM, "threads"), (signal.SIGHUP, "serial")]
)
def test_a_signal_ends_a_run_with_a_resumable_checkpoint(repertory, endless, tmp_path, number, engine):
    with endless(engine) as process:
        wait_for_steps(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=40)
    assert process.returncode == 128 + number, err
    assert f"Stopped by {number.name}" in out and "--resume" in out
    step = RunFolder.open(tmp_path / "run").checkpointer.restore().step
    assert step > 0
    if number == signal.SIGINT:
        resume = ("train", "--resume", tmp_path / "run", "--engine", "serial")
        code, out, err = repertory(*resume, "--max-env-steps", step + 500)
        assert code == 0, err
        assert f"The budget of {step + 500:,} env steps is spent" in out


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_a_program_of_processes(endless, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").symlink_to("/dev/full")
    with endless() as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"could not write {path / 'metrics.jsonl'}: no space is left on the device" in err
    assert "Traceback" not in err and "--directory" in err
    assert RunFolder.open(path).checkpointer.restore().step > 0
