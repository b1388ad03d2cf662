"""What clients may use of a server, and what comes back when they go."""

import contextlib
import gc
import threading
import types

import numpy as np
import psutil
import pytest
import zmq
from background import until
from served_table import table, write, write_columns

from framework import replay
from framework.replay.client import ServedClient
from framework.replay.rows.store import RowStore
from framework.replay.server.holdings import Held, Holdings
from framework.replay.server.limits import Unread
from launch.rpc import sockets

F4 = np.dtype(np.float32)
MIB = 1 << 20


def test_messages_that_arrive_faster_than_they_are_read_wait_at_their_senders(monkeypatch):
    sent, go = [], threading.Event()
    with replay.Server([table()]) as server:
        monkeypatch.setattr(server._service, "_receive", lambda: go.wait(60))
        peer = sockets.make_client_socket(server.address, None)
        peer.sndhwm = 1
        peer.disconnect(server.address)
        peer.connect(server.address)
        message = [b"\xc1", bytes(4 * MIB)]
        for _ in range(100):
            if not peer.poll(1000, zmq.POLLOUT):
                break
            sent.append(peer.send_multipart(message))
        go.set()
        peer.close(linger=0)
    assert 2 <= len(sent) <= 10  # the queues of both sides, and what is on the way


def test_a_message_that_is_too_large_is_an_error_of_its_writer_and_of_no_reader():
    with replay.Server([table()], limits=replay.Limits(max_message_bytes=1000)) as server:
        client = ServedClient(server.address, local=False)
        writer = client.batch_writer()
        write_columns(writer, {"x": np.zeros((2, 1000))})
        assert client.server_info()["t"].current_size == 0
        with pytest.raises(ValueError, match="max_message_bytes"):
            writer.flush(timeout=60)
        with pytest.raises(ValueError, match="max_message_bytes"):
            writer.close(timeout=0)
        client.close()


def holdings():
    store = RowStore()
    tables = [table()]
    tables[0].attach(store)
    return store, Holdings(store, tables)


def test_rows_that_a_client_holds_come_back():
    store, holds = holdings()
    held = Held()
    stream, _ = holds.declare(held, "s", {"x": ((24,), F4)}, None)
    holds.lease(held, stream, 100)
    holds.release(held, stream, np.arange(10))
    holds.close(held)
    assert not store.streams and store.num_bytes == 0


def test_columns_go_with_the_last_client_that_has_declared_them():
    store, holds = holdings()
    first, second = Held(), Held()
    stream, names = holds.declare(first, "s", {"x": ((), F4)}, None)
    assert holds.declare(second, "s", {"x": ((), F4)}, None) == (stream, names)
    holds.declare(second, "s", {"y": ((), F4)}, stream)
    holds.close(second)
    assert list(store.streams[stream].columns) == ["x"]
    holds.close(first)
    assert not store.streams
    again, _ = holds.declare(Held(), "s", {"x": ((), F4)}, None)
    assert again != stream  # a client may still have the columns of the old one


def test_a_stream_lives_as_long_as_its_items_and_its_layouts_are_forgotten():
    with replay.Server([table(size=5)]) as server:
        client = ServedClient(server.address, local=False)
        for shape in range(1, 6):
            with contextlib.closing(client.batch_writer()) as writer:
                write_columns(writer, {"x": np.full((5, shape), shape)})
                writer.flush()
            assert client.sample_batch("t", 3, timeout=20).data["x"].tolist() == [[shape] * shape] * 3
        until(lambda: client.server_info() and len(server._store.streams) == 1)
        assert len(server.tables["t"].bindings) == 1
        client.close()


def test_columns_take_no_descriptors():
    with replay.Server([table()]) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer()
        write(writer, 5)
        gc.collect()
        before = psutil.Process().num_fds()
        for shape in range(100):
            writer.append(f"s{shape}", {"x": np.zeros((1, shape + 1))})
        assert psutil.Process().num_fds() <= before + 10
        client.close()


@pytest.mark.parametrize("held", [0, 10])
def test_memory_of_rows_that_nobody_uses_goes_to_others(held):
    store = RowStore(max_bytes=4 * MIB)
    wide, other = (
        store.stream(name, {"x": ((length,), F4)}) for name, length in (("a", 1 << 16), ("b", 1 << 15))
    )
    rows = wide.lease(14)
    wide.columns["x"][rows] = 1
    wide.release(rows[held:])
    assert len(other.lease(20 if held == 0 else 10)) == (20 if held == 0 else 10)
    assert (wide.columns["x"][rows[:held]] == 1).all() and wide.num_rows == held
    with pytest.raises(replay.StoreFullError, match="max_bytes"):
        other.lease(40)
    other.release(np.arange(8, 10))
    assert wide.lease(1).tolist() == [held]


def test_requests_wait_for_answers_to_be_read_and_the_client_of_the_oldest_goes():
    now = [0.0]
    unread = Unread(100 * MIB, lambda: now[0])
    trackers = [types.SimpleNamespace(done=False) for _ in range(3)]
    assert unread.has_room(1000 * MIB) == (True, None)  # alone
    for client, tracker in zip("abc", trackers, strict=True):
        unread.add(client, tracker, 32 * MIB)
    assert unread.has_room(4 * MIB) == (True, None) and unread.has_room(5 * MIB) == (False, None)
    now[0] = 3.0  # a second, and one for each 32 MiB
    assert unread.has_room(5 * MIB) == (False, "a")
    trackers[0].done = True
    assert unread.has_room(32 * MIB) == (True, None)
