"""Environments of servers that connect, each in a process of its own."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from framework import environments
from framework.environments import environment_server
from launch.rpc.sockets import CurveKeys

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def port():
    """A port that stays free for listeners with SO_REUSEPORT: a socket that does not listen holds it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def serve(port, tmp_path):
    """Starts servers, which end with the test."""
    key = tmp_path / "run" / "environments.key"
    key.parent.mkdir()
    CurveKeys.from_file(str(key))
    with contextlib.ExitStack() as stack:

        def start(*arguments, program=(sys.executable, environment_server.__file__), num_envs=1):
            command = [*program, *arguments, "--connect", f"127.0.0.1:{port}", "--key", str(key)]
            process = subprocess.Popen([*command, "--num-envs", str(num_envs)], cwd=ROOT)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process

        start.key, start.address = str(key), f"tcp://127.0.0.1:{port}"
        yield start


def make(serve, num_envs, **options):
    return environments.make(
        f"remote:{serve.address}", num_envs=num_envs, seed=1, options={"key": serve.key, **options}
    )


def test_the_envs_of_servers_become_one_batch(serve):
    for _ in range(2):
        serve("gymnasium:CartPole-v1", num_envs=2)
    with make(serve, 3) as environment, make(serve, 1) as other:
        assert environment.spec == environments.make("gymnasium:CartPole-v1").spec
        assert environment.reset().step_type.tolist() == [0, 0, 0]
        assert other.reset().step_type.tolist() == [0]
        kinds = []
        for _ in range(60):
            timestep = environment.step(np.ones(3, np.int64))
            kinds.append(timestep.step_type)
            assert timestep.observation.shape == (3, 4)
        kinds = np.array(kinds)
        for env in range(3):  # Always to the right: an episode ends within 12 steps.
            lasts = np.flatnonzero(kinds[:-1, env] == environments.LAST)
            assert len(lasts) >= 4
            assert (kinds[lasts + 1, env] == environments.FIRST).all()
    with make(serve, 4) as environment:  # The envs were given back.
        assert environment.reset().observation.shape == (4, 4)


def test_a_killed_server_is_replaced_and_its_episodes_end(serve):
    killed, _ = serve("gymnasium:CartPole-v1"), serve("gymnasium:CartPole-v1")
    with make(serve, 2) as environment:
        environment.reset()
        environment.step(np.zeros(2, np.int64))
        killed.kill()
        serve("gymnasium:CartPole-v1")
        timestep = environment.step(np.zeros(2, np.int64))
        if (timestep.step_type == environments.MID).all():  # It answered before it was killed.
            timestep = environment.step(np.zeros(2, np.int64))
        assert sorted(timestep.step_type.tolist()) == [environments.FIRST, environments.MID]
        begun = timestep.step_type == environments.FIRST
        assert timestep.reward[begun] == 0 and timestep.discount[begun] == 1
