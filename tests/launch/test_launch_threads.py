"""The engine `threads` alone."""

from __future__ import annotations

import threading
import time

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
