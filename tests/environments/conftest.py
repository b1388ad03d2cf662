"""What tests of environments share: children without interpreters of their own, and a port for servers."""

import socket
import subprocess
import types

import pytest
import warm_python

from framework.environments import processes

PRELOAD = ("framework.environments.processes", "framework.environments.testing", "gymnasium")


@pytest.fixture(autouse=True)
def warm_children(monkeypatch):
    """Environments in processes are forks of one that has imported what they need."""

    def popen(command, **options):
        return warm_python.Popen(command[1:], preload=PRELOAD, **options)

    others = {name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")}
    monkeypatch.setattr(processes, "subprocess", types.SimpleNamespace(Popen=popen, **others))


@pytest.fixture
def port():
    """Stays free for listeners with SO_REUSEPORT: a socket that does not listen holds it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
