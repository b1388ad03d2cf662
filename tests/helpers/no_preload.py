"""For tests of `launch`: their nodes need no torch, whose import in each fork server takes two seconds."""

import pytest

import launch


@pytest.fixture(autouse=True)
def no_preload(monkeypatch):
    monkeypatch.setattr(launch.Program, "preload", ())
