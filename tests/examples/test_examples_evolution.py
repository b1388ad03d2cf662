"""Evolution strategies as a plan."""

import pathlib
import runpy

import numpy as np

from framework import flow

EVOLUTION = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "evolution.py"))


def test_updates_are_the_same_in_all_workers_and_raise_the_return():
    workers = []

    def make(index):
        workers.append(EVOLUTION["Worker"](index))
        return workers[-1]

    returns = flow.run(make, 2, EVOLUTION["plan"], items=2)
    first, second = workers
    assert np.array_equal(first.mean, second.mean) and first.mean.any()
    before = first.play(np.zeros(4), 0)
    assert len(returns) == 2 and before < 20 < max(returns)
