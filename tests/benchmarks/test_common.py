"""The window of the throughput benchmark: when it opens and closes, and whose CPU time counts."""

import pytest

from benchmarks import common
from benchmarks.common import Window


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test sets; CPU seconds are twice as many."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(common.time, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(common, "tree_cpu_seconds", lambda: 2 * Clock.now)
    return Clock


def test_counts_from_the_warm_up_to_the_end(clock):
    window = Window(seconds=10, warm_up=3)
    looks = [
        (100, 0, True),  # started up: nothing counts before the first steps
        (150, 50, True),  # the first steps
        (152, 60, True),
        (154, 80, True),  # the window opens
        (160, 500, True),
        (163.5, 600, True),
        (164.5, 700, False),  # it closes
        (165, 800, False),
    ]
    for now, steps, going_on in looks:
        clock.now = now
        assert window.at(steps) is going_on, (now, steps)
    assert window.result() == {"steps": 620, "seconds": 10.5, "cpu": 21.0}
