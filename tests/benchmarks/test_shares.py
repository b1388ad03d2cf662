"""The sections of the benchmark of shares: each has its own time, none twice."""

import pytest

from benchmarks.programs.shares import Sections


class _Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return seconds


@pytest.fixture
def sections():
    made = Sections()
    made._clock = _Clock()
    return made


def test_a_section_is_without_those_that_it_calls_and_what_was_before_the_start(sections):
    wait = sections._clock.wait
    inner = sections.timed("inner", wait)

    def call():
        wait(1)
        inner(10)
        wait(2)
        inner(20)

    outer = sections.timed("outer", call)
    sections.start()
    outer()
    sections.start()
    wait(100)
    outer()
    wait(200)
    sections.stop()
    assert sections.seconds == {"": 300, "outer": 3, "inner": 30}
    assert sections.calls == {"outer": 1, "inner": 2}
