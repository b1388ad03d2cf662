"""What only processes can do: die, hang, write logs, outlive their launcher."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import psutil
import pytest
from ended import has_ended

import launch as lp
from launch import seeds
from launch.engines import processes
from launch.engines.options import Options
from launch.engines.processes import fork_server
from launch.engines.supervised import job as supervised_job
from launch.engines.supervised.node_process import NodeProcess

PATIENCE = 60.0


class Service:
    def pid(self):
        return os.getpid()

    def echo(self, x):
        return x

    def imported(self, *names):
        return [name for name in names if name in sys.modules]

    def files(self):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def hang(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # the other threads stop first, this one perhaps only after the answer


def wait_for_stop():
    lp.wait_for_stop()


def service_program(main=wait_for_stop, *args):
    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(main, *[service if a is Service else a for a in args]), label="main")
    return program


def test_a_real_time_signal_without_a_name():
    job = lp.start(service_program())
    os.kill(job.client("service").pid(), 40)
    with pytest.raises(lp.NodeError, match=r"service-0.*signal 40"):
        job.wait(timeout=PATIENCE)


def test_a_node_may_have_more_clients_than_the_launcher_may_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with lp.start(service_program()) as job:
            allowed = job.client("service").files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))


class LoadsSlowly:
    """Takes longer to load than a node may be silent, as imports on a busy machine do."""

    def __reduce__(self):
        return _load, ()


def _load():
    threading.Event().wait(3.0)
    return "loaded"


def test_a_node_that_takes_long_to_load_is_not_taken_for_hung():
    def main(what):
        lp.stop(what)

    program = lp.Program("test")
    program.add_node(lp.PyNode(main, LoadsSlowly()), label="main")
    assert lp.launch(program, heartbeat_timeout=1.5) == "loaded"


def test_a_process_that_can_open_no_file_gives_a_sign_of_life(monkeypatch):
    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil, "Process", fail)
    known = NodeProcess._usage(SimpleNamespace(_instances=[SimpleNamespace(messages=3)]))
    assert known == {"cpu_seconds": None, "memory_bytes": None, "calls": 3}


@pytest.mark.filterwarnings("error::launch.StopTimeoutWarning")
@pytest.mark.parametrize("takes_s", [1.0, 600.0])
def test_a_stop_does_not_wait_for_nodes_that_have_not_begun(tmp_path, monkeypatch, takes_s):
    (tmp_path / "slow_to_import.py").write_text(f"import time; time.sleep({takes_s})")
    monkeypatch.syspath_prepend(tmp_path)
    if takes_s > PATIENCE:
        monkeypatch.setattr(supervised_job, "_REPORT_S", 0.5)
    with lp.start(service_program(), preload=["slow_to_import"], stop_timeout=0.1) as job:
        job.stop()
        job.wait(timeout=PATIENCE)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_group_may_need_more_time_to_end(engine):
    class Slow:
        def run(self):
            lp.stop("result")
            time.sleep(1.0)

        def close(self):
            time.sleep(1.0)

    program = lp.Program("test")
    program.add_node(lp.CourierNode(Slow), label="slow")
    program.stop_timeouts = {"slow": PATIENCE}
    with warnings.catch_warnings():
        warnings.simplefilter("error", lp.StopTimeoutWarning)
        assert lp.launch(program, engine, stop_timeout=0.2) == "result"


def test_keys_show_nowhere(tmp_path):
    with lp.start(service_program(), directory=tmp_path) as job:
        assert job.client("service").echo(1) == 1
        keys = job._keys
        node = psutil.Process(job.client("service").pid())
        seen = {}
        me = psutil.Process()
        for process in {me, node, *node.parents()[:2], *me.children(recursive=True)}:
            for what in ("cmdline", "environ"):
                with open(f"/proc/{process.pid}/{what}", "rb") as file:
                    seen[process.pid, what] = file.read()
        job.stop()
        job.wait(timeout=PATIENCE)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            seen[path] = path.read_bytes()
    assert len(seen) >= 2 * 4 + 3  # launcher, fork server, two nodes; two logs and the status
    for secret in (keys.secret, keys.public, keys.token):
        assert not [where for where, text in seen.items() if secret in text]


def test_what_a_node_started_ends_with_it():
    def main():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        lp.stop(child.pid)

    program = lp.Program("test")
    program.add_node(lp.PyNode(main), label="main")
    pid = lp.launch(program)
    assert has_ended(pid)


def test_shared_memory_of_a_killed_node_is_taken_away():
    def main():
        path = lp.shared_memory_directory()
        with open(os.path.join(path, "column"), "wb") as file:
            file.write(b"x" * 100)
        assert os.stat(path).st_mode & 0o077 == 0
        lp.stop(path)
        lp.wait_for_stop()
        os.kill(os.getpid(), signal.SIGKILL)

    assert lp.shared_memory_directory() is None
    program = lp.Program("test")
    program.add_node(lp.PyNode(main), label="main")
    job = lp.start(program)
    with pytest.raises(lp.NodeError, match=r"SIGKILL.*the memory was full"):
        job.wait(timeout=PATIENCE)
    assert job.result.startswith("/dev/shm/lp-")
    assert not os.path.exists(job.result)


def test_random_numbers_differ_between_nodes_and_follow_from_the_seed():
    def draw():
        import random

        import numpy as np
        import torch

        return random.random(), float(np.random.random()), float(torch.rand(()))

    class Box:
        def __init__(self):
            self.numbers = {}

        def put(self, index, numbers):
            self.numbers[index] = numbers
            if len(self.numbers) == 2:
                lp.stop([self.numbers[0], self.numbers[1]])

    program = lp.Program("test")
    program.seed = 1
    box = program.add_node(lp.CourierNode(Box), label="box")
    for index in range(2):
        program.add_node(lp.PyNode(lambda box, index: box.put(index, draw()), box, index), label="main")
    draw()  # Imports them here.
    drawn = lp.launch(program, preload=["torch"])  # Whose state the forks share.
    for seed in (seeds.of_node(1, "main-0"), seeds.of_node(1, "main-1"), seeds.of_node(2, "main-0"), None):
        seeds.seed_generators(seed)
        drawn.append(draw())
    assert drawn[:2] == drawn[2:4]
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn[2:], strict=True))


@pytest.mark.parametrize(("given", "imported"), [(None, ["colorsys"]), (["wave"], ["wave"]), ([], [])])
def test_what_processes_are_forked_with(given, imported):
    program = service_program()
    program.preload = ["colorsys"]
    with lp.start(program, preload=given) as job:
        assert job.client("service").imported("colorsys", "torch", "wave") == imported


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_node_is_a_fresh_interpreter_where_a_fork_would_lose_threads(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "starts_a_thread.py").write_text(code)
    with lp.start(service_program(), preload=["wave", "starts_a_thread"]) as job:
        assert job.client("service").imported("wave", "starts_a_thread") == []


def test_processes_are_forked_with_torch_if_the_launcher_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    program = service_program()
    program.preload = None
    with lp.start(program) as job:
        assert job.client("service").imported("torch") == ["torch"]


def test_unpicklable_node_names_itself():
    program = lp.Program("test")
    program.add_node(lp.PyNode(print, threading.Lock()), label="main")
    with pytest.raises(TypeError, match=r"node 'main-0' cannot be sent"):
        lp.launch(program)


def test_launches_leave_no_files_open():
    def files():
        """What this process has open. Objects of earlier tests may close theirs meanwhile."""
        gc.collect()
        found = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
        return found

    def run():
        program = lp.Program("short")
        program.add_node(lp.PyNode(lp.stop, 1), label="main")
        assert lp.launch(program) == 1

    run()
    before = files()
    for _ in range(6):
        run()
    deadline = time.monotonic() + 30
    while new := files() - before:
        assert time.monotonic() < deadline, new
        time.sleep(0.05)


class Diary(Service):
    """Writes when it is closed what its worker told it while that ended, and starts a process."""

    def __init__(self, path):
        self._path, self._last = path, ""
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def write(self, line):
        self._last = line
        return self.child.pid

    def close(self):
        self._path.write_text(self._last)


def write_at_the_end(diary):
    lp.wait_for_stop()
    diary.write("saved")


@pytest.mark.parametrize("stopped", [False, True])
def test_nodes_save_what_they_have_when_the_fork_server_is_lost(tmp_path, monkeypatch, caplog, stopped):
    """It is killed; or is stopped, and does not report the end of a node."""
    monkeypatch.setattr(supervised_job, "_REPORT_S", 0.5)
    program = lp.Program("test")
    diary = program.add_node(lp.CourierNode(Diary, tmp_path / "diary"), label="diary")
    program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(write_at_the_end, diary), label="main")
    with (
        pytest.raises(lp.LaunchError, match=r"The fork server.* was killed") as caught,
        lp.start(program, restarts={"service": 1}) as job,
    ):
        child, pids = job.client("diary").write(""), [job.client(of).pid() for of in ("diary", "service")]
        os.kill(psutil.Process(pids[0]).ppid(), signal.SIGSTOP if stopped else signal.SIGKILL)
        if stopped:
            os.kill(pids[1], signal.SIGKILL)
        job.wait(timeout=PATIENCE)
    assert (tmp_path / "diary").read_text() == "saved"
    assert ("did not report the end of node 'service-0'" in str(caught.value)) == stopped
    assert str(caught.value) in caplog.text
    assert all(map(has_ended, (*pids, child)))


def test_a_fork_server_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(processes, "_CLOSE_TIMEOUT_S", 0.5)
    server = processes.ForkServer([], [], Options(preload=[]), print)
    os.kill(server._process.pid, signal.SIGSTOP)
    server.close()
    assert has_ended(server._process.pid)


def test_a_launcher_may_have_closed_its_standard_streams(tmp_path):
    code = (
        "import os, sys; os.closerange(0, 3); import launch as lp; program = lp.Program('test')\n"
        "program.add_node(lp.PyNode(lp.stop, 3), label='main')\n"
        "os._exit(lp.launch(program, directory=sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=PATIENCE).returncode == 3


def test_an_interrupt_of_the_launch_ends_the_fork_server(monkeypatch):
    start, started = processes.start_interpreter, []

    def note(*arguments):
        started.append(start(*arguments))
        return started[0]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "start_interpreter", note)
    monkeypatch.setattr(supervised_job, "RemoteRuntime", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lp.start(service_program())
    assert started[0].poll() == 0


def test_unread_reports_do_not_hold_up_the_end(monkeypatch):
    close = processes.ForkServer.close

    def close_with_reports(server):
        for _ in range(2000):  # as the ends of 2,000 nodes would make
            server._report({})
        close(server)

    monkeypatch.setattr(processes.ForkServer, "close", close_with_reports)
    with lp.start(service_program()) as job:
        job.stop()
        job.wait(timeout=PATIENCE)
        assert job.over


@pytest.mark.parametrize("file", ["", "no-python", "README"])
def test_an_interpreter_that_cannot_be_executed_is_named(monkeypatch, tmp_path, file):
    (tmp_path / "README").touch()
    path = file and str(tmp_path / file)
    monkeypatch.setattr(sys, "executable", path)
    with pytest.raises(lp.LaunchError, match=f"executable: got {path!r}, expected .* Restore that file"):
        fork_server.command("main", 3)
