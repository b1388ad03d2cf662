"""The window of the throughput benchmark: when it opens and closes, and whose CPU time counts."""

import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import throughput_window
from throughput_window import Window, tree_cpu_seconds

_BURN = "import time\nwhile time.process_time() < 0.5: pass"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test sets; CPU seconds are twice as many."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(throughput_window.time, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(throughput_window, "tree_cpu_seconds", lambda: 2 * Clock.now)
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


def test_does_not_close_without_a_step(clock):
    window = Window(seconds=10, warm_up=0)
    assert window.at(1)
    clock.now += 20
    assert window.at(1)
    assert not window.at(2)


def test_a_program_that_ends_too_soon_has_no_result(clock):
    window = Window(seconds=10, warm_up=3)
    window.at(1)
    clock.now += 5
    window.at(2)
    with pytest.raises(RuntimeError, match="1 of 2 marks"):
        window.result()


@pytest.mark.parametrize("ended", [False, True], ids=["runs", "ended"])
def test_children_count_alive_or_not(ended):
    before = tree_cpu_seconds()
    code = _BURN if ended else f"{_BURN}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        if ended:
            child.wait(timeout=60)
        else:
            assert child.stdout is not None
            child.stdout.readline()
        spent = tree_cpu_seconds() - before
        child.communicate(b"\n", timeout=60)
    assert 0.45 <= spent <= 20
