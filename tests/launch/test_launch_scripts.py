"""Scripts that launch programs: signals to them, their death, and what they leave."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

import launch as lp
from launch import directories, platforms

PATIENCE = 60.0

SCRIPT = """
    import contextlib, fcntl, os, sys, threading, time
    import launch as lp

    @contextlib.contextmanager
    def locked_file(path):
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def say(line):  # in one write: several processes share the pipe
        os.write(1, (line + "\\n").encode())

    class Store:
        def __init__(self):
            say(f"node {os.getpid()}")
            time.sleep(float(os.environ.get("STORE_NEEDS_S", 0)))
            self.saved = None
        def put(self, value):
            self.saved = value
        def close(self):
            say(f"store closes with {self.saved}")

    class Learner:
        def __init__(self, store):
            say(f"node {os.getpid()}")
            self.store = store
        def run(self):
            say("working")
            {work}
        def close(self):
            say("learner closes")

    program = lp.Program("script")
    program.contexts = [lambda: locked_file(sys.argv[1])] if sys.argv[1:] else []
    store = program.add_node(lp.CourierNode(Store), label="store")
    program.add_node(lp.CourierNode(Learner, store), label="learner")
    try:
        lp.launch(program, stop_timeout=100)  # More than the patience of these tests.
    except lp.ProgramInterrupted as error:
        say(f"interrupted {error.signal.name} {error.job.over} {error.job.result}")
        raise
"""
SAVES = "lp.wait_for_stop(); time.sleep(0.5); self.store.put('parameters')"
CLOSED = ["learner closes", "store closes with parameters"]


class Script:
    """A launcher in a process of its own; it defines its nodes in ``__main__`` and has no main guard."""

    def __init__(self, tmp_path, work=SAVES, *arguments):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(SCRIPT).replace("{work}", work))
        self.sockets = tmp_path / "s"
        self.sockets.mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(self.sockets), "XDG_RUNTIME_DIR": ""}
        root = os.path.dirname(os.path.dirname(os.path.abspath(lp.__file__)))
        environment["PYTHONPATH"] = root
        options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        self.process = subprocess.Popen([sys.executable, str(path), *arguments], env=environment, **options)
        self.lines = []
        self.nodes = []

    def read_until(self, word):
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("node"):
                self.nodes.append(psutil.Process(int(line.split()[1])))
            if line.startswith(word):
                return
        raise AssertionError(f"{word!r} did not come; there was {self.lines}")

    def finish(self):
        rest, _ = self.process.communicate(timeout=PATIENCE)
        self.lines += rest.split("\n")
        _, alive = psutil.wait_procs(self.nodes, timeout=PATIENCE)
        assert not alive
        return self.process.returncode


@pytest.fixture
def short_tmp(tmp_path_factory):
    """Unix sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_signal_stops_in_good_order(short_tmp, number):
    script = Script(short_tmp, "lp.wait_for_stop(); lp.stop('partial')")
    script.read_until("working")
    os.kill(script.process.pid, number)
    assert script.finish() != 0
    assert "store closes with None" in script.lines
    assert f"interrupted {number.name} True partial" in script.lines
    assert list(script.sockets.iterdir()) == []


def test_second_interrupt_ends_at_once(short_tmp):
    script = Script(short_tmp, "lp.wait_for_stop(); say('stopping'); threading.Event().wait()")
    script.read_until("working")
    os.kill(script.process.pid, signal.SIGINT)
    script.read_until("stopping")
    os.kill(script.process.pid, signal.SIGINT)
    assert script.finish() != 0
    assert list(script.sockets.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "without"), [(signal.SIGKILL, ()), (signal.SIGKILL, platforms.ABILITIES), (signal.SIGHUP, ())]
)
def test_workers_save_before_services_close(short_tmp, monkeypatch, number, without):
    """Also when the launcher dies without a word, before it knows the services, and with spawned nodes."""
    monkeypatch.setenv("REPERTORY_PLATFORM_WITHOUT", ",".join(without))
    monkeypatch.setenv("STORE_NEEDS_S", "0.3")
    script = Script(short_tmp)
    script.read_until("working")
    servers = [p for p in psutil.Process(script.process.pid).children() if p not in script.nodes]
    os.kill(script.process.pid, number)
    assert script.finish() != 0
    psutil.wait_procs(servers, timeout=PATIENCE)
    assert not [p for p in servers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert [line for line in script.lines if "closes" in line] == CLOSED
    assert list(script.sockets.iterdir()) == []


def test_a_lock_of_the_program_lasts_until_its_last_process_has_ended(short_tmp):
    path = short_tmp / "lock"
    script = Script(short_tmp, SAVES, str(path))
    script.read_until("working")
    script.process.kill()
    with open(path, encoding="utf-8") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not [node for node in script.nodes if node.is_running()]
    script.finish()
    assert "store closes with parameters" in script.lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2], ids=lambda n: n.name)
def test_a_signal_to_all_processes_of_a_program(short_tmp, number):
    """As Slurm and systemd send it."""
    script = Script(short_tmp)
    script.read_until("working")
    launcher = psutil.Process(script.process.pid)
    for process in launcher.children(recursive=True):
        process.send_signal(number)
    launcher.send_signal(number)  # It has no handler of SIGUSR2, which ends it.
    assert script.finish() != 0
    assert [line for line in script.lines if "closes" in line] == CLOSED
    assert list(script.sockets.iterdir()) == []


def test_what_a_killed_program_left_the_next_one_removes(short_tmp):
    script = Script(short_tmp, "lp.wait_for_stop()")
    script.read_until("working")
    (folder,) = script.sockets.iterdir()
    job = folder.name.split("-")[1]
    assert os.path.isdir(f"/dev/shm/lp-{job}")
    (server,) = [p for p in psutil.Process(script.process.pid).children() if p not in script.nodes]
    directories.sweep()
    assert os.path.isdir(f"/dev/shm/lp-{job}"), "its processes live"
    server.suspend()  # else it cleans up
    script.process.kill()
    server.kill()
    script.finish()
    assert folder.exists()  # the other folder may be gone: programs of other tests remove it as well
    again = Script(short_tmp, "lp.stop()")
    again.finish()
    assert not os.path.exists(f"/dev/shm/lp-{job}")
    assert list(script.sockets.iterdir()) == []
