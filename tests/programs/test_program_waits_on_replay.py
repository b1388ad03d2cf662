"""Programs whose replay node is waited for when they stop, or fails."""

import contextlib

import numpy as np
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


class Broken(replay.selectors.Uniform):
    def sample(self, n, rng):
        raise RuntimeError("a mistake in a selector")


def broken_tables():
    limiter = replay.rate_limiters.MinSize(1)
    return [replay.Table("t", Broken(), replay.selectors.Fifo(), 10, limiter)]


def sample_often(client):
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.zeros(1)})
    writer.create_items("t", {"x": writer.slice("s", "x", rows)})
    writer.flush(60)
    for _ in range(3):
        with contextlib.suppress(RuntimeError, replay.ServerClosed):
            client.sample_batch("t", 1)
    launch.stop_event().wait()


def test_a_mistake_that_repeats_in_a_replay_server_ends_the_program_with_its_traceback():
    program = launch.Program("test")
    server = program.add_node(launch.ReplayNode(broken_tables), label="replay")
    program.add_node(launch.PyNode(sample_often, server), label="sampler")
    with pytest.raises(launch.NodeError, match="node 'replay-0' failed with RuntimeError") as error:
        launch.launch(program, "processes")
    assert "in sample" in error.value.traceback
