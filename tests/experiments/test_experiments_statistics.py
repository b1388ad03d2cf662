"""The interquartile mean and its interval, by hand and against scipy."""

import numpy as np
import pytest

from framework.experiments.statistics import interquartile_mean, stratified_interval


def test_scores_of_several_tasks_count_together():
    # Sorted: 0 1 2 3 4 5 8 9. A quarter of eight is two: the mean of 2 3 4 5.
    middle, low, high = stratified_interval([np.array([9.0, 1, 3, 5]), np.array([0.0, 2, 4, 8])])
    assert middle == 3.5 and 0 <= low < middle < high <= 9


def test_resamples_are_drawn_in_each_task():
    # Every resample of tasks without spread is the same. A bootstrap over all runs would have an interval.
    assert stratified_interval([np.zeros(4), np.ones(4)]) == (0.5, 0.5, 0.5)
    assert stratified_interval([np.array([7.0])]) == (7.0, 7.0, 7.0)


def test_the_interval_of_two_runs_by_hand():
    # Resamples of (0, 1) are (0, 0) with 1/4, (0, 1) in either order with 1/2, and (1, 1) with 1/4.
    assert stratified_interval([np.array([0.0, 1.0])]) == (0.5, 0.0, 1.0)
    assert stratified_interval([np.array([0.0, 1.0])], confidence=0.4) == (0.5, 0.5, 0.5)


def test_as_scipy_has_them():
    stats = pytest.importorskip("scipy.stats")
    tasks = [np.random.default_rng(i).normal(i, size=size) for i, size in enumerate((7, 10, 5))]
    of = lambda *tasks, axis=-1: stats.trim_mean(np.concatenate(tasks, axis), 0.25, axis)  # noqa: E731
    middle, low, high = stratified_interval(tasks)
    assert middle == pytest.approx(of(*tasks))
    assert interquartile_mean(np.stack([tasks[0], tasks[0]], 1)).tolist() == [of(tasks[0])] * 2
    drawn = stats.bootstrap(tasks, of, method="percentile", n_resamples=5000, vectorized=True, rng=1)
    np.testing.assert_allclose([low, high], drawn.confidence_interval, atol=0.06)
