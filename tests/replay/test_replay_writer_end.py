"""Writers that nothing has closed, when the interpreter ends."""

import gc
import os
import signal

import pytest
from background import Background, until
from served_table import table, write

from framework import replay
from framework.replay.client import ServedClient
from framework.replay.remote import connection, writer
from framework.replay.writers import end_writers


def by_batch(client):
    writing = client.batch_writer()
    write(writing, 3)
    return writing


def by_trajectory(client):
    writing = client.trajectory_writer(1)
    for x in range(3):
        writing.append({"x": x})
        writing.create_item("t", 1.0, {"x": writing.history["x"][-1:]})
    return writing


def staged(client):
    """Another object stages for this one, as an adder does."""
    writing = client.batch_writer()
    writing.before_read(lambda: write(writing, 3))
    return writing


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("create", [by_batch, by_trajectory, staged])
@pytest.mark.parametrize("size, arrive", [(5, 3), (2, 2)])
def test_the_end_of_the_interpreter_inserts_what_writers_hold_back(
    monkeypatch, caplog, create, kept, size, arrive
):
    monkeypatch.setattr(writer, "_DELAY_S", 60.0)
    with replay.Server([replay.Table.queue("t", size)]) as server:
        client = ServedClient(server.address)
        writing = create(client)
        if not kept:
            del writing
            gc.collect()
        end_writers()
        assert server.localhost_client().server_info()["t"].current_size == arrive
        lost = [text for text in caplog.messages if "in no table" in text]
        assert ["1 of its" in text for text in lost] == [True] * (arrive < 3)
        client.close()


def serve(pipe):
    with replay.Server([table()]) as server:
        pipe.send(server.address)
        server.wait()


@pytest.mark.parametrize("why", ["another thread waits for room", "the server hangs"])
def test_the_end_of_the_interpreter_waits_for_no_writer_for_long(monkeypatch, caplog, fork, why):
    monkeypatch.setattr(writer, "_DELAY_S", 60.0)
    monkeypatch.setattr(connection, "LAST_WORDS_S", 0.2)
    if why == "the server hangs":
        child = fork(serve)
        client = ServedClient(child.word())
        writing = client.batch_writer()
        write(writing, 3)
        os.kill(child.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
        end_writers()
    else:
        with replay.Server([replay.Table.queue("t", 1)]) as server:
            client = ServedClient(server.address)
            writing = client.batch_writer(max_in_flight_items=2)
            call = Background(write, writing, 4)
            until(lambda: writing._waits)
            end_writers()
            client.close()
            call.exception()
    # The thread that waits is interrupted: only after that does the writer know which item got in.
    assert any(f"{n} of its items are in no table" in text for text in caplog.messages for n in (3, 4))
    client.close()
