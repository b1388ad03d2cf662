"""The parts of a program, joined by hand, learn from what another process writes."""

import pathlib
import runpy

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "by_hand.py"))


def test_the_example_learns_and_ends():
    assert 8 <= EXAMPLE["main"](learner_steps=60) <= 500  # Too short to learn the task.
