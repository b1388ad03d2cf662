"""Agents train in environments of a server on Python 3.8, which has numpy, pyzmq and msgpack only."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess

import pytest

import launch
from framework.environments.remote import environment_server
from framework.programs import RunConfig, make_agent, make_program
from launch.rpc.sockets import CurveKeys

PYTHON = pathlib.Path(__file__).resolve().parents[3] / ".venv-server/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-server: `make test-server` makes it")

# The environment: a walk on a line whose end, on the right, pays 1. dm_env is not installed there.
WALK = """
import collections
import random
import types
import numpy as np

assert not hasattr(str, "removeprefix"), "newer than Python 3.8"

def Spec(shape, dtype, num_values):
    return types.SimpleNamespace(shape=shape, dtype=dtype, num_values=num_values)

Step = collections.namedtuple("Step", "step_type reward discount observation")

class Walk:
    def observation_spec(self): return Spec((2,), np.float32, None)
    def action_spec(self): return Spec((), np.int64, 2)
    def reward_spec(self): return Spec((), np.float32, None)
    def discount_spec(self): return Spec((), np.float32, None)
    def _observe(self): return np.array([self.place / 5, 1], np.float32)

    def reset(self):
        # Episodes of several envs hardly ever end in the same step.
        self.place, self.steps, self.limit = 0, 0, random.randrange(20, 40)
        return Step(0, None, None, self._observe())

    def step(self, action):
        self.place, self.steps = self.place + 2 * int(action) - 1, self.steps + 1
        ended, cut = self.place == 5, self.steps == self.limit
        return Step(2 if ended or cut else 1, float(ended), 0.0 if ended else 1.0, self._observe())
"""
SMALL = {
    "dqn": {"min_replay_size": 64, "batch_size": 16, "hidden_sizes": (16,), "insert_burst": 64},
    "impala": {"unroll_length": 8, "batch_size": 4, "hidden_sizes": (16,)},
    "ppo": {"unroll_length": 16, "minibatch_size": 32, "hidden_sizes": (16,)},
}


@pytest.fixture
def serve(tmp_path):
    """Starts servers from a folder that holds a copy of the server's file and the environment."""
    key = tmp_path / "environments.key"
    CurveKeys.from_file(str(key))
    shutil.copy(environment_server.__file__, tmp_path / "server.py")
    (tmp_path / "walk.py").write_text(WALK)
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with socket.socket() as held, contextlib.ExitStack() as stack:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))  # Keeps the port for the listeners that share it.
        port = held.getsockname()[1]

        def start():
            command = [PYTHON, "server.py", "walk:Walk", "--connect", f"127.0.0.1:{port}"]
            command += ["--key", key, "--num-envs", "8"]
            process = subprocess.Popen(command, cwd=tmp_path, env=bare)
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            return process

        start.name, start.options = f"remote:tcp://127.0.0.1:{port}", {"key": str(key)}
        yield start


@pytest.mark.cpu_budget(60)
@pytest.mark.parametrize(
    "agent", ["dqn", *(pytest.param(name, marks=pytest.mark.release) for name in ("impala", "ppo"))]
)
def test_an_agent_trains_and_outlives_its_server(agent, serve, tmp_path):
    server = serve()
    settings = {"num_actors": 2, "envs_per_actor": 2, "log_period": 20, "publish_period": 1}
    settings |= {"evaluate_period": None, "environment_options": serve.options}
    config = RunConfig(directory=str(tmp_path / "run"), **settings)
    program = make_program(make_agent(agent, **SMALL[agent]), serve.name, config)
    with launch.start(program, "processes") as job:
        counter = job.client("counter")
        assert counter.wait_for("learner_steps", 3, timeout=120)
        server.kill()
        server.wait(30)
        steps = counter.get_counts()["env_steps"]
        serve()
        assert counter.wait_for("env_steps", steps + 2_000, timeout=120)
        job.stop()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    dropped = {
        row["label"]: row["dropped_episodes"] for row in map(json.loads, lines) if "dropped_episodes" in row
    }
    # Of the two envs of each actor, but for those whose episodes had just ended.
    assert set(dropped) <= {"actor-0", "actor-1"} and 1 <= sum(dropped.values()) <= 4
