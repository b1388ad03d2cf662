"""Statistics of the runs of an experiment.

Agarwal et al., 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice": the
interquartile mean, and its confidence interval by a percentile bootstrap that is stratified by task.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2_000  # samples of the bootstrap, as in rliable's examples


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half of `values` along the first axis; cuts a quarter, rounded down, at each end."""
    cut = len(values) // 4
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(0)


def stratified_interval(tasks: Sequence[np.ndarray], confidence: float = 0.95) -> tuple[float, float, float]:
    """Interquartile mean of the scores of all tasks together, and the ends of its confidence interval.

    Each resample draws, with replacement, as many runs of a task as there are.

    Args:
      tasks: for each task, the scores `[R]` of its R runs; at least one of each. Scores of different tasks
        have to be comparable.
      confidence: of the interval.
    """
    generator = np.random.default_rng(0)
    drawn = [scores[generator.integers(len(scores), size=(len(scores), RESAMPLES))] for scores in tasks]
    ends = np.percentile(
        interquartile_mean(np.concatenate(drawn)), (50 * (1 - confidence), 50 * (1 + confidence))
    )
    return float(interquartile_mean(np.concatenate(tasks))), float(ends[0]), float(ends[1])
