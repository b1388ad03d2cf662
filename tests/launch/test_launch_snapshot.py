"""When the serial engine saves the state of a program that is interrupted."""

import pytest

import launch as lp


class Worker:
    def __init__(self, steps):
        self.steps = steps

    def run(self):
        raise AssertionError("the serial engine calls step()")

    def step(self):
        self.steps -= 1

    def finished(self):
        return self.steps == 0


class Snapshot:
    saved = None

    def save(self, state):
        self.saved = state

    def load(self):
        return None


def program_of(*nodes):
    program = lp.Program("snapshot")
    program.snapshot = Snapshot()
    for number, node in enumerate(nodes):
        program.add_node(node, label=f"n{number}")
    return program


def test_an_interrupt_after_the_last_worker_of_a_pass_has_finished_saves():
    program = program_of(lp.CourierNode(Worker, 10), lp.CourierNode(Worker, 1))
    with lp.start(program, "serial") as job:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                job.wait(timeout=0)
        assert [node["state"] for node in job.nodes()] == ["running", "returned"]
    assert program.snapshot.saved.objects["n0-0"].steps == 8


def test_after_a_failure_no_later_node_begins_and_nothing_is_saved():
    def fail():
        raise ZeroDivisionError

    later = []
    program = program_of(lp.PyNode(fail), lp.PyNode(later.append, 1))
    with pytest.raises(lp.NodeError):
        lp.launch(program, "serial")
    assert later == [] and program.snapshot.saved is None
