"""A replay server that comes back at another address, from its checkpoint: its clients follow."""

import pytest
from background import Background
from served_table import table, write

from framework import replay
from framework.replay import checkpointers
from framework.replay.addresses import directory
from framework.replay.client import ServedClient

PATIENCE = 30.0


def serve(folder):
    return replay.Server([table()], checkpointer=checkpointers.DefaultCheckpointer(str(folder)))


@pytest.mark.parametrize("local", [True, False])
def test_clients_follow_their_server(tmp_path, local):
    first = serve(tmp_path)
    client = ServedClient(first.address, local=local, reconnect_timeout=1.0)
    writer = client.batch_writer()
    write(writer, 5)
    writer.flush(PATIENCE)
    assert len(client.sample_batch("t", 3, PATIENCE).data["x"]) == 3
    client.checkpoint()
    first.stop()
    client.move(None)
    second = serve(tmp_path)
    client.move(second.address)
    assert client.server_info()["t"].current_size == 5
    with pytest.raises(replay.ServerClosed):
        write(writer, 4)
        writer.flush(PATIENCE)
    write(client.batch_writer(), 4)
    assert client.server_info()["t"].current_size == 9
    assert set(client.sample_batch("t", 50, PATIENCE).data["x"].tolist()) <= set(range(5))
    client.close()
    second.stop()


def test_a_call_waits_for_a_server_that_is_away(tmp_path):
    first = serve(tmp_path)
    nowhere = first.address.rpartition("/")[0] + "/9"
    client = ServedClient(nowhere, reconnect_timeout=0.1)
    client.move(None)
    call = Background(client.server_info)
    assert call.running(0.5)  # five times the time to give up
    client.move(first.address)
    assert call.result(PATIENCE)["t"].current_size == 0
    client.close()
    first.stop()


def test_an_interrupt_ends_the_wait_for_a_server_that_is_away():
    client = ServedClient(f"ipc://{directory()}/9", reconnect_timeout=0.1)
    client.move(None)
    call = Background(client.sample_batch, "t", 1)
    assert call.running(0.3)
    client.interrupt()
    with pytest.raises(replay.ServerClosed):
        call.result(PATIENCE)
