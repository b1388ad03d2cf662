"""What the supervisor of `processes` and `ray` does with nodes that die, hang, fail, or ignore the stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import pytest
from ended import has_ended

import launch as lp

PATIENCE = 180.0


class Service:
    def __init__(self):
        self._waiting = threading.Semaphore(0)

    def pid(self):
        return os.getpid()

    def wait(self):
        self._waiting.release()
        threading.Event().wait()

    def waiting(self, times):
        for _ in range(times):
            assert self._waiting.acquire(timeout=PATIENCE)


class Relay:
    """Calls the service for others, as often as its call is lost."""

    def __init__(self, service):
        self._service = service

    def pid(self):
        return ask(self._service, "pid")


def ask(client, method):
    while True:
        try:
            return getattr(client.with_timeout(PATIENCE), method)()
        except lp.CallLost:
            continue


def service_program():
    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.CourierNode(Relay, service), label="relay")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="main")
    return program


@pytest.mark.real
def test_a_killed_node_comes_back_and_the_calls_it_had_are_lost(supervised_engine):
    with lp.start(service_program(), supervised_engine, restarts={"service": 1}) as job:
        client, relay = job.client("service"), job.client("relay")
        first = relay.pid()
        assert client.pid() == first
        lost = [client.futures.wait() for _ in range(2)]
        client.waiting(2)
        os.kill(first, signal.SIGKILL)
        assert {type(future.exception(PATIENCE)) for future in lost} == {lp.CallLost}
        assert relay.pid() == ask(client, "pid") != first
        assert {node["label"]: node["restarts"] for node in job.nodes()} == {
            "service-0": 1, "relay-0": 0, "main-0": 0,
        }  # fmt: skip


@pytest.mark.real
def test_a_killed_node_without_restarts_ends_the_program(supervised_engine):
    job = lp.start(service_program(), supervised_engine)
    os.kill(job.client("service").pid(), signal.SIGKILL)
    how = {"processes": "SIGKILL", "ray": "Ray actor"}[supervised_engine]
    with pytest.raises(lp.NodeError, match=rf"service-0.*{how}") as caught:
        job.wait(timeout=PATIENCE)
    assert caught.value.kind == "ProcessDied"
    assert job.status()["state"] == "failed"
    assert job.nodes()[0]["state"] == "failed"


@pytest.mark.real
def test_a_hung_node_is_found(supervised_engine):
    job = lp.start(service_program(), supervised_engine, heartbeat_timeout=8.0)
    pid = job.client("service").pid()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(lp.NodeError, match=r"service-0.*no sign of life") as caught:
        job.wait(timeout=PATIENCE)
    assert caught.value.kind == "Hung"
    assert has_ended(pid)


def test_node_that_ignores_the_stop_is_killed(supervised_engine):
    def stubborn():
        lp.stop("result")
        threading.Event().wait()

    program = lp.Program("test")
    program.add_node(lp.PyNode(stubborn), label="stubborn")
    with pytest.warns(lp.StopTimeoutWarning, match="stubborn-0"):
        assert lp.launch(program, supervised_engine, stop_timeout=0.2) == "result"


def test_logs_and_status_file(supervised_engine, tmp_path):
    def main():
        print("about to fail")
        print("on stderr", file=sys.stderr)
        raise ValueError("no good")

    program = lp.Program("test")
    program.add_node(lp.PyNode(main), label="main")
    with pytest.raises(lp.NodeError, match="no good"):
        lp.launch(program, supervised_engine, directory=tmp_path)
    text = (tmp_path / "logs" / "main-0.log").read_text()
    assert "about to fail" in text and "on stderr" in text
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed"
    (node,) = status["nodes"]
    assert (node["label"], node["state"], node["error"]) == ("main-0", "failed", "ValueError: no good")


def test_resources_of_a_group(supervised_engine):
    def main():
        lp.stop((os.environ["COLOUR"], os.environ["OMP_NUM_THREADS"]))

    program = lp.Program("test")
    program.add_node(lp.PyNode(main), label="main")
    resources = {"main": {"threads": 3, "env": {"COLOUR": "red"}}}
    assert lp.launch(program, supervised_engine, resources=resources) == ("red", "3")
    program.resources = {"main": {"threads": 2, "env": {"COLOUR": "blue"}}}
    assert lp.launch(program, supervised_engine) == ("blue", "2")
    # In place of the program's.
    assert lp.launch(program, supervised_engine, resources=resources) == ("red", "3")
