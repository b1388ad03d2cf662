"""The engine `threads` alone."""

from __future__ import annotations

import sys
import threading
import time

import pytest

import launch as lp

PATIENCE = 15.0


class Failing:
    """A service that fails when it is told to."""

    def __init__(self):
        self._fail = lp.make_failure_handler()

    def fail(self):
        self._fail(ValueError("told to"))


def test_a_stop_before_the_thread_of_a_restart_has_started(monkeypatch):
    start, jobs, begun = threading.Thread.start, [], threading.Event()

    def main(service):
        begun.wait(PATIENCE)
        service.fail()

    def start_late(thread):
        if getattr(thread._target, "__name__", "") == "_live_again":
            jobs[0].stop("stopped")
            time.sleep(0.3)  # The supervisor joins the threads in the meantime.
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Failing), label="service")
    program.add_node(lp.PyNode(main, service), label="main")
    jobs.append(lp.start(program, "threads", restarts={"service": 1}))
    begun.set()
    assert jobs[0].wait(timeout=PATIENCE) == "stopped"


def test_a_node_that_does_not_close_is_reported_with_its_stack():
    release, closed = threading.Event(), []

    class Stubborn:
        def close(self):
            release.wait(PATIENCE)

    class Obliging:
        def close(self):
            closed.append(self)

    program = lp.Program("test")
    program.add_node(lp.CourierNode(Obliging), label="obliging")
    program.add_node(lp.CourierNode(Stubborn), label="stubborn")
    program.add_node(lp.PyNode(lp.stop), label="main")
    try:
        with pytest.raises(lp.LaunchError, match=r"stubborn-0(?s:.*)release\.wait"):
            lp.launch(program, "threads", stop_timeout=0.5)
    finally:
        release.set()
    assert closed


def test_a_constructor_that_ends_its_node_does_not_keep_the_program():
    class Done:
        def __init__(self):
            sys.exit(0)

    program = lp.Program("test")
    program.add_node(lp.PyClassNode(Done), label="done")
    program.add_node(lp.PyNode(lambda: None), label="main")
    with lp.start(program, "threads") as job:
        job.wait(timeout=PATIENCE)
        assert job.over
