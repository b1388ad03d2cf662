"""Two learners of one replay learn apart, and are evaluated apart."""

import pathlib
import runpy

from framework.checkpoints import Checkpointer
from framework.loggers import read_jsonl

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "two_discounts.py"))


def test_each_learner_has_its_discount(tmp_path):
    result = EXAMPLE["main"](str(tmp_path), max_env_steps=3_000)
    rows = {row["label"]: row for row in read_jsonl(tmp_path / "metrics.jsonl")}  # the last of each
    for suffix in ("", "_short"):
        assert rows["evaluator" + suffix]["variables_version"] > 0
        assert rows["learner" + suffix]["steps"] > 50
    # The tables have the same items and the same ratio.
    assert abs(rows["learner"]["steps"] - rows["learner_short"]["steps"]) <= 2
    # The rewards are 1, so that values of discount 0.5 are at most 2.
    assert 1 < rows["learner_short"]["q_mean"] < 2.2
    assert rows["learner"]["q_mean"] > 2.7
    assert result["evaluator_short"]["episodes"] == result["episodes"] == 20
    saved = Checkpointer(tmp_path / "checkpoints").restore()
    assert {"learner", "learner_short", "best", "evaluator_short-best"} <= set(saved.names)
