"""An agent learns in a loop that is not ours."""

import pathlib
import runpy

import pytest

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"))


@pytest.mark.timeout(300)
def test_the_session_of_the_example_learns():
    # A random policy gets about 22, a policy that always pushes the same way about 9.
    assert EXAMPLE["main"](num_steps=5_000) > 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_session_of_the_example_solves_cartpole():
    assert EXAMPLE["main"]() >= 475
