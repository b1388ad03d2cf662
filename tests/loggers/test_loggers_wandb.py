"""Weights & Biases, offline: rows, settings, and a resumed run that is the same run there."""

import pickle
import sys

import pytest

from framework.commands import cli
from framework.loggers import WandbLogger
from framework.runs import config_file

wandb = pytest.importorskip("wandb")


def written(path):
    """What is in the files of wandb, as bytes."""
    return b"".join(file.read_bytes() for file in sorted(path.glob("wandb/offline-run-*/*.wandb")))


def test_a_run_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "film"
    logger = "wandb(mode='offline', project='mine')"
    flags = ["--engine=serial", "--max-env-steps=60", "--evaluate-period=30", "--num-evaluation-episodes=2"]
    flags += ["--directory", str(run), "--loggers", logger]
    assert cli.main(["train", "random_actions", *flags]) == 0
    assert config_file.read(run / "config.yaml")["loggers"] == [logger]
    content = written(run)
    for text in (b"evaluator/episode_return", b"actor-0/steps", b"env_steps", b"film", b"mine", b"seed"):
        assert text in content


def test_a_logger_that_is_saved_continues_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(tmp_path, mode="offline")
    logger.write({"label": "learner", "env_steps": 3, "loss": 0.5, "resumed": True, "note": "a"})
    state = pickle.dumps(logger)
    logger.close()
    logger.close()
    with pickle.loads(state) as again:
        again.write({"label": "learner", "steps": 4, "loss": 0.25})
    # A number follows the id of a folder that is made in the same second as another.
    ids = {path.name.split("-")[3] for path in tmp_path.glob("wandb/offline-run-*")}
    assert ids == {(tmp_path / "wandb" / "id.txt").read_text()}


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'repertory\[wandb\]'"):
        WandbLogger(tmp_path)
