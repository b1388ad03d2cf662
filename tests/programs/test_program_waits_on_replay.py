"""A node that waits on replay when its program stops has ended in good order."""

import pytest

import launch
from framework import replay


def tables():
    limiter = replay.rate_limiters.MinSize(1)
    return [replay.Table("t", replay.selectors.Uniform(), replay.selectors.Fifo(), 10, limiter)]


def sample(client):
    client.sample_batch("t", 1)  # of a table that stays empty


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_stop_that_ends_a_wait_is_no_failure(engine):
    program = launch.Program("test")
    server = program.add_node(launch.ReplayNode(tables), label="replay")
    program.add_node(launch.PyNode(sample, server), label="waiter")
    program.add_node(launch.PyNode(launch.stop, "fine"), label="main")
    assert launch.launch(program, engine) == "fine"
