"""The serial engine: turns in order on one thread, deadlocks, and programs that are left and continued."""

from __future__ import annotations

import threading

import pytest

import launch as lp
from launch.engines import serial


class Queue:
    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)

    def take(self):
        return self.items.pop(0)

    def size(self):
        return len(self.items)


class Maker:
    def __init__(self, queue, limit):
        self._queue = queue
        self._left = limit

    def ready(self):
        return self._left > 0

    def why_not_ready(self):
        return "nothing left to make"

    def step(self):
        self._queue.put(self._left)
        self._left -= 1

    def run(self):
        raise AssertionError("the serial engine steps")


class Taker:
    def __init__(self, queue, enough):
        self._queue = queue
        self._enough = enough
        self._taken = []

    def ready(self):
        return self._queue.size() >= 2

    def step(self):
        self._taken.append((self._queue.take(), self._queue.take()))
        if len(self._taken) == self._enough:
            lp.stop(self._taken)

    def run(self):
        raise AssertionError("the serial engine steps")


def queue_program(limit, enough):
    program = lp.Program("test")
    queue = program.add_node(lp.CourierNode(Queue), label="queue")
    program.add_node(lp.PyClassNode(Maker, queue, limit), label="maker")
    program.add_node(lp.PyClassNode(Taker, queue, enough), label="taker")
    return program


def test_serial_takes_turns_in_order():
    assert lp.launch(queue_program(10, 3), "serial") == [(10, 9), (8, 7), (6, 5)]


def test_serial_runs_on_the_calling_thread():
    program = lp.Program("test")
    program.add_node(lp.PyNode(lambda: lp.stop(threading.get_ident())), label="main")
    assert lp.launch(program, "serial") == threading.get_ident()


def test_serial_deadlock_names_everybody():
    with pytest.raises(lp.DeadlockError) as caught:
        lp.launch(queue_program(3, 2), "serial")
    assert "maker-0: nothing left to make" in str(caught.value)
    assert "taker-0: ready() is false" in str(caught.value)


@pytest.mark.parametrize("wait", [lp.wait_for_stop, lambda: lp.stop_event().wait()])
def test_serial_finds_a_wait_that_nothing_can_end(wait):
    program = lp.Program("waits")
    program.add_node(lp.PyNode(wait), label="waits")
    with pytest.raises(lp.NodeError, match="DeadlockError"):
        lp.launch(program, "serial")


def test_serial_worker_without_step_is_told_what_to_add():
    class OnlyRun:
        def run(self):
            return None

    program = lp.Program("test")
    program.add_node(lp.CourierNode(OnlyRun), label="worker")
    with pytest.raises(lp.NodeError, match=r"Add step\(\)"):
        lp.launch(program, "serial")


def test_serial_names_the_workers_that_cannot_end(monkeypatch, caplog):
    """As in Launchpad's consumer and producers, whose `run()` makes ten steps."""

    class Consumer:
        def step(self):
            if caplog.records:
                lp.stop()

        def run(self):
            raise AssertionError("the serial engine steps")

    monkeypatch.setattr(serial, "_ENDLESS_S", 0.01)
    program = queue_program(10**9, 10**9)
    program.add_node(lp.PyClassNode(Consumer), label="consumer")
    lp.launch(program, "serial")
    (told,) = caplog.messages
    assert "consumer-0 (" in told and "got no finished()" in told and "threads" in told


def test_serial_finished_workers_end_the_program():
    class Finite:
        left = 3

        def finished(self):
            return self.left == 0

        def step(self):
            self.left -= 1

        def run(self):
            return None

    program = lp.Program("test")
    program.add_node(lp.CourierNode(Finite), label="worker")
    assert lp.launch(program, "serial") is None


def test_serial_job_can_be_left_and_taken_up_again():
    job = lp.start(queue_program(10**9, 10**9), "serial")
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.0)
    before = job.client("queue").size()
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.0)
    assert job.client("queue").size() != before or before > 0
    assert job.status()["state"] == "running"
    with job:
        pass
    assert job.over
