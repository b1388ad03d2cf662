"""Rate limiters: their numbers, what they refuse, and how many calls they allow at once.

Tables with limiters are compared with a model in test_replay_core_deliveries.py.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import replay
from framework.replay import rate_limiters as rl
from framework.replay import selectors

# Wrong arguments that dm-reverb refuses too are in tests/conformance/replay.
CASES = {
    "ratio not a number": lambda: rl.SampleToInsertRatio(float("nan"), 1, 10.0),
    "window too narrow": lambda: rl.SampleToInsertRatio(4.0, 10, (36.0, 43.9)),
    "window empty": lambda: rl.RateLimiter(1.0, 1, 3.0, 3.0),
    "queue of nothing": lambda: rl.Queue(0),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_wrong_arguments_are_refused(make):
    with pytest.raises(ValueError):
        make()


NUMBERS = {  # samples_per_insert, min_size_to_sample, min_diff, max_diff
    "a number is a window around the minimum": (rl.SampleToInsertRatio(2.0, 5, 4), (2, 5, 6, 14)),
    "a number of numpy's": (rl.SampleToInsertRatio(2.0, 5, np.float32(4)), (2, 5, 6, 14)),
    "a window": (rl.SampleToInsertRatio(2.0, 5, (4, 20)), (2, 5, 4, 20)),
    "a queue": (rl.Queue(4), (1, 1, 0, 4)),
    "a stack": (rl.Stack(3), (1, 1, 0, 3)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_a_limiter_is_made_of(name):
    limiter, expected = NUMBERS[name]
    assert tuple(limiter.options().values()) == expected


def test_minimum_above_max_size_is_refused():
    with pytest.raises(ValueError, match="never be sampled"):
        replay.Table("t", selectors.Uniform(), selectors.Fifo(), 3, rl.MinSize(4))


def test_one_limiter_serves_one_table():
    limiter = rl.MinSize(1)
    replay.Table("a", selectors.Uniform(), selectors.Fifo(), 3, limiter)
    with pytest.raises(ValueError, match="belongs to table 'a'"):
        replay.Table("b", selectors.Uniform(), selectors.Fifo(), 3, limiter)


@settings(max_examples=300, deadline=None)
@given(
    ratio=st.floats(0.01, 50) | st.integers(1, 20).map(lambda quarters: quarters / 4),
    minimum=st.integers(1, 40),
    low=st.integers(-40, 40),
    width=st.integers(1, 100),
    counts=st.tuples(st.integers(0, 60), st.integers(0, 200), st.integers(0, 60)),
    n=st.integers(0, 100),
)
def test_as_many_are_allowed_as_go_through_one_by_one(ratio, minimum, low, width, counts, n):
    inserts, samples, size = counts
    limiter = rl.RateLimiter(ratio, minimum, low, low + width)
    limiter.inserts, limiter.samples, limiter.size = inserts, samples, size

    allowed = 0
    while allowed < n and size >= minimum and inserts * ratio - samples - (allowed + 1) >= low:
        allowed += 1
    assert limiter.allowed_samples(n) == allowed

    allowed = 0
    while allowed < n and (
        size + allowed + 1 <= minimum or (inserts + allowed + 1) * ratio - samples <= limiter.max_diff
    ):
        allowed += 1
    assert limiter.allowed_inserts(n) == allowed
