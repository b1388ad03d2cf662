"""For tests of `launch`: their fork servers start as those of users do, but without torch.

Its import in each of them takes two seconds, and their nodes do not need it.
"""

import pytest
import warm_python

import launch
from launch.engines import processes


@pytest.fixture(autouse=True)
def no_preload(monkeypatch):
    monkeypatch.setattr(launch.Program, "preload", ())
    monkeypatch.setattr(processes, "start_interpreter", warm_python.start_interpreter)
