"""For tests of `launch`: the processes of their programs have not imported torch, and import little else."""

import functools

import pytest
import warm_python

import launch
from launch.engines import processes


@pytest.fixture(autouse=True)
def no_preload(monkeypatch):
    start = functools.partial(warm_python.start_fork_server, preload=warm_python.LAUNCH)
    monkeypatch.setattr(launch.Program, "preload", ())
    monkeypatch.setattr(processes, "start_interpreter", start)
