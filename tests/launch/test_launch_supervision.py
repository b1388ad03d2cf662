"""What the supervisor survives: files it cannot write, nodes that do not read, errors of its own."""

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from background import Background

import launch as lp
from launch.engines import processes
from launch.engines.processes import ForkServer
from launch.engines.supervised import job as supervised_job
from launch.engines.supervised.channel import Channel
from launch.engines.supervised.files import Files
from launch.engines.supervised.job import SupervisedJob

PATIENCE = 60.0


class Saver:
    """A worker that saves when it is closed."""

    def __init__(self, path):
        self._path = path

    def run(self):
        lp.wait_for_stop()

    def close(self):
        with open(self._path, "a") as file:
            file.write("saved\n")


def saving_program(path, count=1):
    program = lp.Program("saving")
    for _ in range(count):
        program.add_node(lp.CourierNode(Saver, path), label="saver")
    return program


def wait_until(job, holds):
    """Waits for a state of the nodes; the supervisor notifies of each turn."""
    with job.outcome.changed:
        assert job.outcome.changed.wait_for(lambda: job.over or holds(), PATIENCE)
    assert not job.over


def all_run(job):
    return all(node["state"] == "running" for node in job.nodes())


@pytest.fixture
def warnings():
    """The warnings of the launcher, each of which notifies the test."""

    class Warnings(logging.Handler):
        def __init__(self):
            super().__init__()
            self.changed = threading.Condition()
            self.texts = []

        def emit(self, record):
            with self.changed:
                self.texts.append(record.getMessage())
                self.changed.notify_all()

        def wait(self, word):
            with self.changed:
                assert self.changed.wait_for(lambda: any(word in text for text in self.texts), PATIENCE)

    handler = Warnings()
    logging.getLogger("launch").addHandler(handler)
    yield handler
    logging.getLogger("launch").removeHandler(handler)


# Files.


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_folder_that_goes_away_does_not_end_the_program(tmp_path, warnings, comes_back):
    folder, away, saved = tmp_path / "run", tmp_path / "away", tmp_path / "saved"
    with lp.start(saving_program(saved), "processes", directory=folder, stop_timeout=PATIENCE) as job:
        wait_until(job, lambda: all_run(job))
        if comes_back:
            os.rename(folder, away)
        else:
            shutil.rmtree(folder)
        warnings.wait("status.json cannot be written")
        wait_until(job, lambda: all_run(job))
        if comes_back:
            os.rename(away, folder)
        job.stop("result")
        assert job.wait(timeout=PATIENCE) == "result"
    assert saved.read_text() == "saved\n"
    assert sum("status.json" in text for text in warnings.texts) == 1
    if comes_back:
        assert json.loads((folder / "status.json").read_text())["state"] == "finished"
        assert not list(folder.glob("status.json.*"))


def test_a_file_that_cannot_be_written_is_logged_once_until_it_can(tmp_path, warnings):
    files, folder = Files(), tmp_path / "run"
    for failures in (1, 2):
        for _ in range(3):
            files.append(str(folder / "log"), b"lost")
            files.write_status(str(folder / "status.json"), {})
        assert [sum(name in text for text in warnings.texts) for name in ("log ", "status.json ")] == [
            failures
        ] * 2
        folder.mkdir()
        files.append(str(folder / "log"), b"kept")
        files.write_status(str(folder / "status.json"), {"state": "running"})
        assert (folder / "log").read_bytes() == b"kept"
        assert json.loads((folder / "status.json").read_text()) == {"state": "running"}
        shutil.rmtree(folder)


def test_a_status_that_cannot_be_put_in_place_leaves_no_file(tmp_path, warnings):
    (tmp_path / "status.json").mkdir()
    Files().write_status(str(tmp_path / "status.json"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    warnings.wait("status.json cannot be written")


# Errors of the supervisor itself.


class Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def test_nodes_close_after_a_result_that_the_launcher_cannot_read(tmp_path):
    def main(path):
        lp.stop(Unreadable())

    program = saving_program(tmp_path / "saved")
    program.add_node(lp.PyNode(main, tmp_path / "saved"), label="main")
    with pytest.raises(ValueError, match="not a number"):
        lp.launch(program, "processes", stop_timeout=PATIENCE)
    assert (tmp_path / "saved").read_text() == "saved\n"


@pytest.mark.parametrize("when", ["once", "in every turn"])
def test_nodes_close_after_an_unexpected_error(tmp_path, monkeypatch, when):
    look, errors = SupervisedJob._look_at_clock, []

    def fail(job, *args):
        if all_run(job) and not (errors and when == "once"):
            errors.append(1)
            raise ZeroDivisionError("a mistake in the supervisor")
        if when == "in every turn" and errors:
            raise ZeroDivisionError("again")
        look(job, *args)

    monkeypatch.setattr(SupervisedJob, "_look_at_clock", fail)
    monkeypatch.setattr(processes, "_CLOSE_TIMEOUT_S", PATIENCE)  # a busy machine
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        lp.launch(saving_program(tmp_path / "saved", 2), "processes", stop_timeout=PATIENCE)
    assert (tmp_path / "saved").read_text() == "saved\n" * 2


@pytest.mark.parametrize("step", ["at_end", "_write_status"])
def test_an_error_at_the_very_end_ends_the_wait(tmp_path, monkeypatch, step):
    program = saving_program(tmp_path / "saved")
    finish = SupervisedJob._finish

    def fail(over=True):
        raise OSError("at the end")

    def break_the_end(job):
        if step == "at_end":
            job._options.at_end.callback(fail)
        else:
            monkeypatch.setattr(job, step, fail)
        finish(job)

    monkeypatch.setattr(SupervisedJob, "_finish", break_the_end)
    job = lp.start(program, "processes", directory=tmp_path, stop_timeout=PATIENCE)
    waiting = Background(job.wait)
    job.stop()
    assert isinstance(waiting.exception(PATIENCE), OSError)
    assert job.over


def test_a_stalled_launcher_reads_before_it_takes_a_node_for_silent(tmp_path, monkeypatch):
    look, seen = SupervisedJob._look_at_clock, []
    late = SimpleNamespace(monotonic=time.monotonic, time=time.time)

    def stall(job, *args):
        if all_run(job) and not seen:
            seen.append(1)
            for process in job._processes:  # its next heartbeat has arrived
                assert select.select([process.channel], [], [], PATIENCE)[0]
            late.monotonic = lambda: time.monotonic() + 1000.0
        look(job, *args)

    monkeypatch.setattr(SupervisedJob, "_look_at_clock", stall)
    monkeypatch.setattr(supervised_job, "time", late)
    limits = {"heartbeat_timeout": 500.0, "stop_timeout": 5000.0}  # for the clock's leap, before it and after
    with lp.start(saving_program(tmp_path / "saved", 2), "processes", **limits) as job:
        wait_until(job, lambda: seen)
        job.stop("result")
        assert job.wait(timeout=PATIENCE) == "result"
    assert (tmp_path / "saved").read_text() == "saved\n" * 2


def test_what_a_node_has_said_is_heard_though_its_end_is_known_first(monkeypatch):
    def refuse():
        raise ValueError("said before the end")

    def hear_the_host_only(job, source, process, events):
        if source is job._inbox:
            exchange(job, source, process, events)

    exchange = SupervisedJob._exchange
    monkeypatch.setattr(SupervisedJob, "_exchange", hear_the_host_only)
    program = lp.Program("test")
    program.add_node(lp.PyNode(refuse), label="node")
    with pytest.raises(lp.NodeError, match="said before the end"):
        lp.launch(program, "processes")


# Nodes that do not read.


def test_orders_wait_for_a_process_that_does_not_read():
    ours, theirs = socket.socketpair()
    writer, reader, received = Channel(ours), Channel(theirs), []
    orders = [{"setup": b"x" * 400_000}, *(("addresses", {number: "tcp://a:1"}) for number in range(1000))]
    Background(lambda: [writer.post(each) for each in orders]).result(PATIENCE)
    while len(received) < len(orders):
        received += reader.receive_ready()
        writer.flush()
    assert received == orders
    assert not writer.unsent
    theirs.close()
    for each in orders[:2]:
        with pytest.raises(OSError):
            writer.post(each)
    assert not writer.unsent


class Member:
    """A worker that waits."""

    def __init__(self, ballast):
        pass

    def pid(self):
        return os.getpid()

    def run(self):
        lp.wait_for_stop()


class Watcher:
    """A service that hears of losses."""

    def __init__(self):
        self._lost = threading.Semaphore(0)
        lp.register_loss_handler(lambda label: self._lost.release())

    def wait_for_loss(self):
        assert self._lost.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("has_a_place", [True, False], ids=["cut off", "without a place"])
def test_a_node_that_does_not_read_holds_up_no_other(monkeypatch, has_a_place):
    """On Ray, nobody reads the orders of a node before it has a place, or while its machine is cut off."""
    fork, kill, unread, killed = ForkServer.fork, ForkServer.kill, {}, []

    def fork_one_apart(server, process, line, resources):
        if process.unit.label != "member-1" or unread:
            return fork(server, process, line, resources)
        unread[process.number] = line
        if has_a_place:
            server._report({"forked": process.number, "pid": os.getpid()})

    def kill_one_apart(server, number):
        killed.append(number)
        if number not in unread:
            return kill(server, number)
        server._report({"exit": number, "code": -9, "reason": None})

    monkeypatch.setattr(ForkServer, "fork", fork_one_apart)
    monkeypatch.setattr(ForkServer, "kill", kill_one_apart)
    monkeypatch.setattr(supervised_job, "_MOST_UNREAD", 2)  # a setup and one order
    program = lp.Program("test")
    program.add_node(lp.CourierNode(Watcher), label="watcher")
    for _ in range(2):  # a setup for which there is no room in a socket
        program.add_node(lp.CourierNode(Member, b"x" * 1_000_000), label="member")
    with lp.start(program, "processes", min_nodes={"member": 1}) as job:
        watcher = job.client("watcher").with_timeout(PATIENCE)
        for _ in range(2):
            while True:
                with contextlib.suppress(lp.CallLost):  # lost with the last life
                    os.kill(job.client("member", 0).with_timeout(PATIENCE).pid(), signal.SIGKILL)
                    break
            watcher.wait_for_loss()
        if has_a_place:  # as good as dead, and restarted
            watcher.wait_for_loss()
            wait_until(job, lambda: all_run(job))
            assert "did not read its last 2 orders" in job.nodes()[2]["error"]
        else:
            assert not set(killed) & set(unread)
            (theirs,) = unread.values()
            assert not select.select([theirs], [], [], 0)[0]


def test_the_start_of_many_nodes_does_not_fill_the_channels(monkeypatch):
    """With Linux's usual buffers the reports of about 830 forks filled them; here, those of a few."""
    pair = socket.socketpair

    def narrow_pair(*args):
        ends = pair(*args)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ends

    monkeypatch.setattr(socket, "socketpair", narrow_pair)
    program = lp.Program("many")
    for _ in range(24):
        program.add_node(lp.CourierNode(Member, b""), label="member")
    with lp.start(program, "processes") as job:
        wait_until(job, lambda: all_run(job))
        assert len({node["pid"] for node in job.nodes()}) == 24
