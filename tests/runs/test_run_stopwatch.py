"""Seconds of a run that is stopped and resumed."""

import pickle
import time
from types import SimpleNamespace

from framework.clock import Clock
from framework.runs.stopwatch import Stopwatch
from framework.workers.learner import LearnerReport


def test_the_first_rates_after_a_resume_are_those_of_the_run(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    published = SimpleNamespace(steps=0, block=SimpleNamespace(version=0), clock=Clock())
    before = LearnerReport("learner", SimpleNamespace(env_steps=0), published, None, None)
    now += 2
    state = pickle.dumps(before)
    now = 5.0  # After a reboot of the machine.
    rows, report = [], pickle.loads(state)
    report._monitor = SimpleNamespace(write=lambda _, row: rows.append(row))
    report._published.steps, report.metrics, report.waited_s = 40, {}, 1.0
    now += 2
    report.log()
    assert rows[0]["time/learner_steps_per_s"] == 10.0
    assert rows[0]["time/waited_for_data_fraction"] == 0.25


def test_a_stopwatch_that_has_just_begun_is_pickled_too(monkeypatch):
    now = 1.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = pickle.loads(pickle.dumps(Stopwatch()))
    now += 3
    assert watch.seconds() == 3.0
