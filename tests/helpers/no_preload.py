"""For tests of `launch`: the processes of their programs have not imported torch, and import little else."""

import functools

import pytest
import warm_fork_server

import launch
from launch.engines import processes


@pytest.fixture(autouse=True)
def no_preload(monkeypatch):
    start = functools.partial(warm_fork_server.start, preload=warm_fork_server.LAUNCH)
    monkeypatch.setattr(launch.Program, "preload", ())
    monkeypatch.setattr(processes, "start_interpreter", start)
