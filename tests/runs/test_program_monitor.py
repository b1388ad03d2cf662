"""The monitor's rows, and errors of `on_write`."""

from __future__ import annotations

import functools
import shutil
import sys
import time
import traceback

import pytest

import launch
from agents.random_actions import RandomActions
from framework.clock import Clock
from framework.commands.curves import kept_rows
from framework.environments.testing import FakeEnvironment
from framework.loggers import InMemoryLogger
from framework.programs import RunConfig, make_program
from framework.programs.graph import _make_monitor
from framework.runs.run_folder import RunFolder
from framework.runs.services import Counter, Monitor
from launch.context import NodeContext, entered


def test_rows_since_the_checkpoint_hold_after_a_restart_of_the_monitor(tmp_path):
    config = RunConfig(directory=str(tmp_path), max_env_steps=100)
    launch.launch(make_program(RandomActions(), FakeEnvironment, config), "serial")
    counter = Counter()
    for steps, resumed_at in ((100, 100), (70, 170)):  # When the run is resumed, and later.
        counter.increment(env_steps=steps)
        with entered(None, NodeContext("test", "monitor", 0, "monitor-0", "serial")):
            monitor = _make_monitor(
                *(RunFolder.open(tmp_path), InMemoryLogger, ()), counter=counter, clock=Clock()
            )
        assert monitor._resumed_at == resumed_at


def test_rows_of_a_run_without_a_checkpoint_do_not_count_when_it_begins_again(tmp_path):
    config = RunConfig(directory=str(tmp_path), max_env_steps=100, evaluate_period=None, log_period=20)
    first, both = [], []
    for rows in (first, both):
        launch.launch(make_program(RandomActions(), FakeEnvironment, config), "serial")
        shutil.rmtree(tmp_path / "checkpoints")
        rows += RunFolder.open(tmp_path).rows()
    assert {row["resumed_at"] for row in both if "resumed_at" in row} == {0}
    assert not any("resumed_at" in row for row in first)
    assert kept_rows(RunFolder.open(tmp_path)) == both[len(first) :]


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


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize(
    ("on_write", "kind", "told"),
    [
        (prune, Pruned, "trial 7 is not promising"),
        (lambda snapshot: sys.exit(), launch.LaunchError, r"<lambda> .*got sys\.exit\(\)"),
    ],
    ids=["an error", "an exit"],
)
def test_an_error_of_on_write_reaches_the_caller_as_itself_and_silently(engine, on_write, kind, told, capfd):
    config = RunConfig(max_env_steps=1_000_000, log_period=50, evaluate_period=None)
    program = make_program(RandomActions(), functools.partial(FakeEnvironment), config, on_write=on_write)
    with pytest.raises(kind, match=told) as raised:
        launch.launch(program, engine)
    assert type(raised.value) is kind
    if kind is Pruned:
        assert raised.value.args[1] == 7
        assert "in prune" in "".join(traceback.format_exception(raised.value))
    assert not capfd.readouterr().err
