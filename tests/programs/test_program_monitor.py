"""The monitor's rows."""

from __future__ import annotations

import time

from framework.loggers import InMemoryLogger
from framework.programs.monitor import Monitor


def test_seconds_do_not_follow_the_wall_clock_backwards(monkeypatch):
    log = InMemoryLogger()
    monitor = Monitor(log)
    monitor.write("actor-0", {"steps": 1})
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock of the machine is set
    monitor.write("actor-0", {"steps": 2})
    first, second = (row["time/wall_s"] for row in log.rows)
    assert 0 <= first <= second < 60
    assert 0 <= monitor.snapshot()["seconds"] < 60
