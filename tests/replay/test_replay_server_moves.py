"""A replay server that comes back at another address, from its checkpoint: its clients follow."""

import threading

import numpy as np
import pytest

from framework import replay
from framework.replay import checkpointers
from framework.replay.remote.client import ServedClient

PATIENCE = 30.0


def serve(folder):
    table = replay.Table(
        "t", replay.selectors.Uniform(), replay.selectors.Fifo(), 100, replay.rate_limiters.MinSize(1)
    )
    return replay.Server([table], checkpointer=checkpointers.DefaultCheckpointer(str(folder)))


def write(writer, n):
    rows = writer.append("s", {"x": np.arange(n)})
    writer.create_items("t", {"x": writer.slice("s", "x", rows)})
    writer.release("s", rows)
    writer.flush(PATIENCE)


def in_background(fn):
    """A thread that runs ``fn``, and where its result or error will be."""
    outcome = []

    def run():
        try:
            outcome.append(fn())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("local", [True, False])
def test_clients_follow_their_server(tmp_path, local):
    first = serve(tmp_path)
    client = ServedClient(first.address, local=local, reconnect_timeout=1.0)
    writer = client.batch_writer()
    write(writer, 5)
    assert len(client.sample_batch("t", 3, PATIENCE).data["x"]) == 3
    client.checkpoint()
    first.stop()
    client.move(None)
    second = serve(tmp_path)
    client.move(second.address)
    assert client.server_info()["t"].current_size == 5
    with pytest.raises(replay.ServerClosed):
        write(writer, 4)
    write(client.batch_writer(), 4)
    assert client.server_info()["t"].current_size == 9
    assert set(client.sample_batch("t", 50, PATIENCE).data["x"].tolist()) <= set(range(5))
    client.close()
    second.stop()


def test_a_call_waits_for_a_server_that_is_away(tmp_path):
    first = serve(tmp_path)
    client = ServedClient("tcp://127.0.0.1:9", reconnect_timeout=0.1)  # no server is there
    client.move(None)
    thread, outcome = in_background(client.server_info)
    thread.join(0.5)  # five times the time to give up
    assert thread.is_alive()
    client.move(first.address)
    thread.join(PATIENCE)
    assert outcome[0]["t"].current_size == 0
    client.close()
    first.stop()


def test_an_interrupt_ends_the_wait_for_a_server_that_is_away():
    client = ServedClient("tcp://127.0.0.1:9", reconnect_timeout=0.1)
    client.move(None)
    thread, outcome = in_background(lambda: client.sample_batch("t", 1))
    thread.join(0.3)
    assert thread.is_alive()
    client.interrupt()
    thread.join(PATIENCE)
    assert isinstance(outcome[0], replay.ServerClosed)
