"""An agent learns in a loop that is not ours."""

import pathlib
import runpy

import pytest

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"))


# After all of its 50,000 steps it is at 500. A random policy gets about 22; seeds 1 to 3 got 165 to 306.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps, low", [(1_200, 8), pytest.param(5_000, 80, marks=pytest.mark.release)])
def test_the_session_of_the_example_learns(steps, low):
    assert EXAMPLE["main"](num_steps=steps) > low
