"""`launch` where the system has only what POSIX says: abilities are switched off, all else is real."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import launch as lp
from launch import platforms, texts

PATIENCE = 60.0


@pytest.fixture
def temporary(monkeypatch, tmp_path):  # pytest makes its folder first
    """Switches everything off; the folder of temporary files, in which nothing may be left."""
    monkeypatch.setenv("REPERTORY_PLATFORM_WITHOUT", ",".join(platforms.ABILITIES))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path:  # Unix sockets have short names.
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)
        assert os.listdir(path) == []


@pytest.mark.parametrize("ability", platforms.ABILITIES)
def test_each_ability_can_be_switched_off_alone(ability, monkeypatch):
    before = {name: platforms.has(name) for name in platforms.ABILITIES}
    monkeypatch.setenv("REPERTORY_PLATFORM_WITHOUT", ability)
    assert {name: platforms.has(name) for name in platforms.ABILITIES} == {**before, ability: False}


def test_a_process_that_was_killed_has_a_likely_reason():
    assert "the memory was full" in texts.why_killed(-9)
    assert not texts.why_killed(-15) and not texts.why_killed(1)


def test_linux_has_everything():
    assert all(map(platforms.has, platforms.ABILITIES)) == (sys.platform == "linux")


def test_an_unknown_ability_is_an_error(monkeypatch):
    monkeypatch.setenv("REPERTORY_PLATFORM_WITHOUT", "shm,frok")
    with pytest.raises(ValueError, match=r"WITHOUT: got \['frok'\], expected some of \['affinity'"):
        platforms.has("shm")


@pytest.mark.parametrize("without", ["", "fallocate"])
def test_reserved_bytes_have_pages_and_earlier_ones_stay(without, monkeypatch, tmp_path):
    monkeypatch.setenv("REPERTORY_PLATFORM_WITHOUT", without)
    size = (2 << 20) + 5
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"before")
        file.flush()
        platforms.reserve(file.fileno(), 6, size)
        assert file.seek(0) == 0 and file.read() == b"before" + bytes(size - 6)
        status = os.fstat(file.fileno())
        platforms.reserve(file.fileno(), size, size)  # There is nothing to do.
        assert (status.st_size, status.st_blocks * 512 >= size) == (size, True)
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(OSError) as caught:
        platforms.reserve(full.fileno(), 0, 10)
    assert caught.value.errno == (errno.ENOSPC if without else errno.ENODEV)


class Box:
    def pid(self):
        return os.getpid()

    def session(self):
        return os.getsid(0)


@pytest.mark.parametrize("how", ["an error", "an exit"])
def test_spawned_nodes_are_restarted_write_logs_and_fail_as_forked_ones(how, temporary, tmp_path):
    def main(box):
        folder = lp.shared_memory_directory()
        print(f"folder {folder} {os.stat(folder).st_mode & 0o777:o} threads {os.environ['OMP_NUM_THREADS']}")
        print("interpreter with", sys.modules["sitecustomize"].__file__)
        assert box.pid() == box.session() != os.getsid(0)
        os.kill(first := box.pid(), signal.SIGKILL)
        with contextlib.suppress(lp.CallLost):
            box.with_timeout(PATIENCE).pid()  # goes to the dead or to the new life
        assert box.pid() != first
        if how == "an exit":
            print("leaves", flush=True)
            os._exit(3)
        raise ValueError("no good")

    # A signal to all processes of the job reaches each new interpreter before its first line of ours.
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 15)\n")
    program = lp.Program("spawned")
    box = program.add_node(lp.CourierNode(Box), label="box")
    program.add_node(lp.PyNode(main, box), label="main")
    resources = {"main": {"threads": 2, "env": {"PYTHONPATH": str(tmp_path)}}}
    job = lp.start(program, directory=tmp_path, restarts={"box": 1}, resources=resources)
    with pytest.raises(lp.NodeError) as caught:
        job.wait(timeout=PATIENCE)
    expected = "raise ValueError" if how == "an error" else "exited with code 3"
    assert expected in f"{caught.value} {caught.value.frames}" and caught.value.node == "main-0"
    assert {node["label"]: node["restarts"] for node in job.status()["nodes"]} == {"box-0": 1, "main-0": 0}
    log = (tmp_path / "logs" / "main-0.log").read_text()
    assert f"folder {temporary}/lp-{job.status()['job']} 700 threads 2\n" in log
    assert f"interpreter with {tmp_path}/sitecustomize.py\n" in log


def test_nodes_end_with_the_process_that_spawned_them(temporary):
    program = lp.Program("spawned")
    for label in ("one", "two"):
        program.add_node(lp.CourierNode(Box), label=label)
    program.add_node(lp.PyNode(lp.wait_for_stop), label="main")
    job = lp.start(program)
    nodes = [psutil.Process(job.client(label).pid()) for label in ("one", "two")]
    nodes[0].parent().kill()
    with pytest.raises(lp.LaunchError, match=r"The fork server.* was killed by SIGKILL"):
        job.wait(timeout=PATIENCE)
    assert psutil.wait_procs(nodes, timeout=PATIENCE)[1] == []
