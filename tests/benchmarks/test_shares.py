"""The sections of the benchmark of shares: each has its own time, none twice."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

from shares import Sections


class _Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def sections():
    made = Sections()
    made._clock = _Clock()
    return made


def test_a_section_is_without_those_that_it_calls(sections):
    clock = sections._clock

    def wait(seconds):
        clock.now += seconds

    inner = sections.timed("inner", wait)

    def call():
        wait(1)
        inner(10)
        wait(2)
        inner(20)

    outer = sections.timed("outer", call)
    sections.start()
    wait(100)
    outer()
    wait(200)
    sections.stop()
    assert sections.seconds == {"": 300, "outer": 3, "inner": 30}
    assert sections.calls == {"outer": 1, "inner": 2}


def test_a_call_that_fails_ends_its_section(sections):
    def fail():
        sections._clock.now += 1
        raise KeyError("x")

    sections.start()
    with pytest.raises(KeyError):
        sections.timed("failing", fail)()
    sections._clock.now += 5
    sections.stop()
    assert sections.seconds == {"": 5, "failing": 1}


def test_start_forgets_what_was_before(sections):
    sections.start()
    sections.timed("early", lambda: None)()
    sections.start()
    sections.stop()
    assert "early" not in sections.calls


def test_methods_of_a_class_are_timed_for_all_objects(sections):
    class Worker:
        def step(self, seconds):
            sections._clock.now += seconds
            return seconds

    sections.method(Worker, "step", "work")
    sections.start()
    assert [Worker().step(2), Worker().step(3)] == [2, 3]
    assert sections.seconds["work"] == 5


def test_inside_counts_only_calls_of_that_section(sections):
    def forward():
        sections._clock.now += 1

    timed = sections.timed("inference", forward, inside="policy")
    sections.start()
    for caller in ("policy", "learner"):
        sections.timed(caller, timed)()
    timed()
    sections.stop()
    assert sections.seconds == {"": 1, "policy": 0, "inference": 1, "learner": 1}
