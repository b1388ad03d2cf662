"""Groups that may lose nodes: `min_nodes`."""

import os
import queue
import signal
import threading

import pytest

import launch as lp
from launch.engines.base import Unit
from launch.engines.supervised.elastic import ElasticGroups
from launch.engines.supervised.process import Process

PATIENCE = 60.0


class Member:
    """A worker that only waits; it may fail at its start, or when it is asked to."""

    def __init__(self, fails=False):
        if fails:
            raise RuntimeError("this member is broken")
        self._fails = threading.Event()

    def pid(self):
        return os.getpid()

    def fail(self):
        self._fails.set()

    def run(self):
        stopped = lp.stop_event()
        lp.register_stop_handler(self._fails.set)
        self._fails.wait()
        if not stopped.is_set():
            raise RuntimeError("asked to fail")


class Watcher:
    """A service that hears of losses."""

    def __init__(self):
        self._lost = queue.Queue()
        lp.register_loss_handler(self._lost.put)

    def next_loss(self):
        return self._lost.get(timeout=PATIENCE)


def members(broken=()):
    program = lp.Program("test")
    program.add_node(lp.CourierNode(Watcher), label="watcher")
    for index in range(3):
        program.add_node(lp.CourierNode(Member, index in broken), label="member")
    return program


def ask(client, method):
    """Calls until the node is there; a call may be lost with a life of it."""
    while True:
        try:
            return getattr(client.with_timeout(PATIENCE), method)()
        except lp.CallLost:
            continue


def test_lost_nodes_come_back_without_restarts_and_others_hear_of_it(supervised_engine):
    program = members()
    program.min_nodes = {"member": 2}
    with lp.start(program, supervised_engine) as job:
        watcher = job.client("watcher").with_timeout(PATIENCE)
        pids = [ask(job.client("member", index), "pid") for index in range(3)]
        for _ in range(2):
            os.kill(ask(job.client("member", 1), "pid"), signal.SIGKILL)
            assert watcher.next_loss() == "member-1"
        job.client("member", 2).futures.fail()  # its answer may be lost
        assert watcher.next_loss() == "member-2"
        assert ask(job.client("member", 2), "pid") != pids[2]
        assert ask(job.client("member", 1), "pid") != pids[1]
        assert ask(job.client("member", 0), "pid") == pids[0]
        assert {node["label"]: node["restarts"] for node in job.status()["nodes"]} == {
            "watcher-0": 0, "member-0": 0, "member-1": 2, "member-2": 1,
        }  # fmt: skip


@pytest.mark.parametrize("given", [{"min_nodes_timeout": 1e-6}, {}], ids=["launch", "program"])
def test_too_few_nodes_for_too_long_end_the_program(given):
    program = members()
    program.min_nodes, program.min_nodes_timeout = {"member": 3}, 1000.0 if given else 1e-6
    job = lp.start(program, "processes", **given)
    with pytest.raises(lp.LaunchError, match=r"min_nodes\['member'\]: .* of 3 nodes .* at least 3"):
        job.wait(timeout=PATIENCE)
    assert all(node["state"] in ("closed", "killed") for node in job.nodes())


def test_when_a_group_is_short_of_nodes_and_which_errors_it_forgives():
    groups = ElasticGroups({"group": 1}, 0.0)
    node = Process(Unit("group-0", "group", 0, ()), b"", None)
    node.state, node.failure = "running", {"kind": "ValueError"}
    assert not groups.forgives(node)  # there were never enough
    assert groups.shortage([node], 1.0) is None
    for _ in range(5):
        assert groups.forgives(node)
        groups.lost(node, 1.0)
    assert not groups.forgives(node)
    node.state = "restarting"
    assert "0 of 1 nodes are there, expected at least 1" in groups.shortage([node], 1.0)


def test_an_error_before_enough_nodes_were_there_ends_the_program_at_once():
    with pytest.raises(lp.NodeError, match="this member is broken"):
        lp.launch(members(broken={0, 1, 2}), "processes", min_nodes={"member": 1})


def test_a_node_that_cannot_start_does_not_hold_up_the_others(supervised_engine):
    """Its first error may come before or after the others are there; from then on it is tried again."""
    with lp.start(
        members(broken={2}), supervised_engine, min_nodes={"member": 2}, restarts={"member": 99}
    ) as job:
        watcher = job.client("watcher").with_timeout(PATIENCE)
        assert {watcher.next_loss() for _ in range(5)} == {"member-2"}
        assert ask(job.client("member", 0), "pid")


@pytest.mark.parametrize("given, message", [
    ({"member": 4}, r"min_nodes\['member'\]: got 4, expected 1 to 3"),
    ({"member": 0}, r"min_nodes\['member'\]: got 0, expected 1 to 3"),
    ({"others": 1}, r"min_nodes: got \['others'\], expected groups"),
])  # fmt: skip
def test_wrong_numbers_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        lp.launch(members(), "processes", min_nodes=given)


def test_a_strategy_that_starts_all_nodes_together_is_refused():
    with pytest.raises(ValueError, match=r"resources\['member'\]: got strategy 'PACK' .* expected SPREAD"):
        lp.launch(members(), "ray", min_nodes={"member": 1}, resources={"member": {"strategy": "PACK"}})
