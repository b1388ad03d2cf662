"""The monitor's rows, and errors of `on_write`."""

from __future__ import annotations

import functools
import time

import pytest

import launch
from agents.random_actions import RandomActions
from framework.environments.testing import FakeEnvironment
from framework.loggers import InMemoryLogger
from framework.programs import RunConfig, make_program
from framework.programs.services import Monitor


def test_seconds_do_not_follow_the_wall_clock_backwards(monkeypatch):
    log = InMemoryLogger()
    monitor = Monitor(log)
    monitor.write("actor-0", {"steps": 1})
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock of the machine is set
    monitor.write("actor-0", {"steps": 2})
    first, second = (row["time/wall_s"] for row in log.rows)
    assert 0 <= first <= second < 60
    assert 0 <= monitor.snapshot()["seconds"] < 60


class Pruned(Exception):
    """What Optuna raises to end a trial."""


def prune(snapshot):
    if snapshot["counts"].get("env_steps", 0) >= 100:
        raise Pruned("trial 7 is not promising", 7)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_an_error_of_on_write_reaches_the_caller_as_itself(engine):
    config = RunConfig(max_env_steps=1_000_000, log_period=50, evaluate_period=None)
    program = make_program(RandomActions(), functools.partial(FakeEnvironment), config, on_write=prune)
    with pytest.raises(Pruned, match="trial 7") as raised:
        launch.launch(program, engine)
    assert type(raised.value) is Pruned and raised.value.args[1] == 7
