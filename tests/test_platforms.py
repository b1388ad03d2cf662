"""What the framework keeps in shared memory, where the system has only what POSIX says, and on arm64."""

from __future__ import annotations

import fcntl
import os
import pickle
import tempfile

import numpy as np
import psutil
import pytest
import warm_python

import launch
from agents.dqn import DQN, DQNConfig
from framework import environments, variables
from framework.environments.testing import EchoEnvironment
from framework.programs import RunConfig, make_program
from framework.replay import shm
from framework.replay.errors import StoreFullError
from framework.variables import VariableBlock
from launch import platforms


@pytest.fixture
def temporary(monkeypatch, tmp_path):  # pytest makes its folder first
    """Switches everything off; the folder of temporary files, in which nothing may be left."""
    monkeypatch.setenv("REPERTORY_PLATFORM_WITHOUT", ",".join(platforms.ABILITIES))
    monkeypatch.setenv("REPERTORY_PLATFORM_MACHINE", "arm64")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path:  # Unix sockets have short names.
        monkeypatch.setenv("TMPDIR", path)
        yield path
        # The servers of this user listen there; it stays, and so do caches of torch.
        own = f"repertory.{os.getuid()}"
        left = {name for name in os.listdir(path) if not name.startswith("torchinductor_")}
        assert left <= {own}
        assert not left or {*os.listdir(f"{path}/{own}")} <= {"lock"}


def filled(value):
    return {"body": {"weight": np.full(100, value, np.float32)}}


@pytest.mark.parametrize("machine", ["x86_64", "arm64"])
def test_where_publish_and_read_order_their_loads_and_stores(machine, tmp_path, monkeypatch):
    """On arm64 both lock the file between the steps of the protocol, on x86 they do not."""
    monkeypatch.setenv("REPERTORY_PLATFORM_MACHINE", machine)
    moments = []

    def flock(file, kind):
        begun, done = writer._header[:2].tolist()
        assert (kind, os.fstat(file).st_ino) == (fcntl.LOCK_SH, os.stat(tmp_path / "block").st_ino)
        moments.append((begun, done, *(float(of["body"]["weight"][-1]) for of in (writer._slots[1], into))))
        locked(file, kind)

    locked, into = fcntl.flock, filled(0)
    monkeypatch.setattr(variables.fcntl, "flock", flock)
    writer = VariableBlock(filled(0), str(tmp_path / "block"))
    reader = pickle.loads(pickle.dumps(writer))
    ordered = machine == "x86_64"
    writer.publish(7, filled(7))
    # begun, done, the written slot, the reader's copy
    assert moments == ([] if ordered else [(1, 0, 0.0, 0.0), (1, 0, 7.0, 0.0)])
    del moments[:]
    assert reader.read(into).version == 7
    assert moments == ([] if ordered else [(1, 1, 7.0, 0.0), (1, 1, 7.0, 7.0)])
    del moments[:]
    assert reader.version == 7 and len(moments) == (not ordered)


def test_a_block_leaves_no_descriptor_open(tmp_path, monkeypatch):
    monkeypatch.setenv("REPERTORY_PLATFORM_MACHINE", "arm64")

    def are_open():
        return [file for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]

    block = VariableBlock(filled(0), str(tmp_path / "block"))
    assert are_open()
    del block
    assert not are_open()


def test_columns_are_in_private_files_that_are_backed_and_go(temporary):
    memory = shm.SharedMemory()
    column = memory.allocate("steps", "reward", (1 << 20, 2), np.dtype(np.float32))
    memory.reserve("steps", "reward", 0, 3 << 20)
    path = memory.path("steps", "reward")
    assert os.path.dirname(memory.directory) == temporary
    assert [os.stat(each).st_mode & 0o777 for each in (memory.directory, path)] == [0o700, 0o600]
    assert 3 << 20 <= os.stat(path).st_blocks * 512 < 8 << 20 == os.stat(path).st_size
    column[7] = 5
    assert shm.attach(path, (1 << 20, 2), np.float32)[7].tolist() == [5, 5]
    memory.close()


def test_a_full_disk_is_an_error(temporary):
    with pytest.raises(StoreFullError, match="10 more bytes are needed"):
        shm.back_with_memory("/dev/full", 0, 10)


def test_environments_in_processes(temporary):
    made = environments.make(EchoEnvironment, num_envs=3, stepping="processes", num_processes=2)
    with made, environments.make(EchoEnvironment, num_envs=3) as inline:
        for environment in (made, inline):
            environment.reset()
        action = np.zeros((3, *made.spec.actions.shape), made.spec.actions.dtype)
        for _ in range(3):
            ours, theirs = made.step(action), inline.step(action)
            np.testing.assert_array_equal(ours.observation, theirs.observation)
            np.testing.assert_array_equal(ours.reward, theirs.reward)


@pytest.mark.release
@pytest.mark.cpu_budget(80)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_the_main_job_learns(engine, temporary):
    agent = DQN(DQNConfig(samples_per_insert=24.0, learning_rate_decay=50_000, epsilon_decay=3_000))
    config = RunConfig(num_actors=2, envs_per_actor=4, max_env_steps=5_000, evaluate_period=2_500, seed=1)
    result = launch.launch(make_program(agent, "gymnasium:CartPole-v1", config), engine)
    assert result["env_steps"] == 5_000
    assert result["episode_return"] > 100, "random actions earn 22"
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    assert children <= warm_python.templates()
