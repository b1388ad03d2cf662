"""Random network distillation: a learner of its own in the graph, whose parameters DQN's learner uses."""

import pathlib
import runpy

import pytest
import torch

from framework.checkpoints import Checkpointer
from framework.loggers import read_jsonl

NOVELTY = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "novelty.py"))
SETTINGS = {**NOVELTY["SETTINGS"], "min_replay_size": 200}


def rnd(**changes):
    return NOVELTY["RND"](NOVELTY["RNDConfig"](**{**SETTINGS, **changes}))


@pytest.mark.cpu_budget(30)
def test_the_predictor_learns_is_used_and_is_saved_with_the_run(tmp_path):
    options = {"directory": str(tmp_path), "learner_log_period": 20, "checkpoint_period": None}
    NOVELTY["main"](rnd(), 2_000, **options)
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    errors = [row["error"] for row in rows if row["label"] == "novelty"]
    used = [row["novelty"] for row in rows if row["label"] == "learner"]
    # 4 samples of each of 2,000 items, 128 at a time, at most 9 batches early or late.
    assert 5 <= len(errors) <= 7 and errors[-1] < 0.5 * errors[0]
    assert used[-1] < 0.5 * used[0] < 1.0
    saved = Checkpointer(tmp_path / "checkpoints").restore()
    predictor, learner = saved.state("novelty"), saved.state("learner")["learner"]["networks"]
    assert predictor["steps"] // 10 == len(errors)
    # The learner's copy is that of the node, but for its last steps; the random network is the node's.
    for name, value in predictor["networks"].items():
        copy = learner[f"novelty.{name}"]
        if "target" in name:
            assert torch.equal(copy, value)
        else:
            torch.testing.assert_close(copy, value, atol=0.1, rtol=0.1)
    NOVELTY["main"](rnd(), 2_200, engine="processes", **options)
    again = Checkpointer(tmp_path / "checkpoints").restore().state("novelty")
    assert again["steps"] > predictor["steps"]


@pytest.mark.release
@pytest.mark.timeout(900)
def test_only_novelty_finds_the_end_of_the_corridor():
    config = NOVELTY["DQNConfig"](**NOVELTY["SETTINGS"])
    assert NOVELTY["main"](NOVELTY["DQN"](config), 4_000)["episode_return"] == 0.0
    assert NOVELTY["main"](rnd(min_replay_size=500), 16_000)["episode_return"] == 1.0
