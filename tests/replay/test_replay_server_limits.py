"""What clients without a key may use of a server, one by one and all together."""

import contextlib
import gc
import socket
import sys
import threading
import types

import numpy as np
import psutil
import pytest
import zmq
from background import until
from served_table import table, write, write_columns

from framework import replay
from framework.replay import wire
from framework.replay.client import ServedClient
from framework.replay.rows.store import RowStore
from framework.replay.server.holdings import Held, Holdings
from framework.replay.server.intake import Intake
from framework.replay.server.limits import Unread
from launch.rpc import sockets

F4 = np.dtype(np.float32)
MIB = 1 << 20
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


@contextlib.contextmanager
def connected(server):
    """A connection of a peer that ZeroMQ has greeted, step by step: it may stall on several at once."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
        got = b""
        for part, awaited in ((GREETING, b"NULL"), (b"\x04" + bytes([len(READY)]) + READY, b"READY")):
            peer.sendall(part)
            while awaited not in got:
                got += peer.recv(1000)
        yield peer


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not count the bytes of a connection")
@pytest.mark.parametrize(
    "frame, limit",
    [
        (b"\x03\0\0\0\0\0\x01\0\0" + bytes(1 << 16), 4 * MIB),  # never the last one
        (b"\x01\0" * 20_000, 1 << 28),  # empty ones, which take memory
        (b"\x02\0\0\0\0\x10\0\0\0" + bytes(MIB), 4 * MIB),  # longer than any may be
    ],
    ids=["endless", "empty", "long"],
)
def test_a_message_that_does_not_end_ends_its_connection(frame, limit):
    with replay.Server([table()], limits=replay.Limits(max_message_bytes=limit)) as server:
        client = ServedClient(server.address)
        write(client.batch_writer(), 5)
        with connected(server) as peer, pytest.raises(ConnectionError):
            for _ in range(8000):
                peer.sendall(frame)
        assert len(client.sample_batch("t", 4, timeout=20).data["x"]) == 4
        client.close()


def test_only_as_many_frames_as_a_message_may_have_are_kept():
    with replay.Server([table()]) as server:
        client = ServedClient(server.address, local=False)
        write(client.batch_writer(), 5)
        with connected(server) as peer:
            peer.sendall(b"\x01\0" * (2 * wire.MAX_ARRAYS) + b"\0\0")
            until(lambda: server._service.malformed == 1)
        assert len(client.sample_batch("t", 4, timeout=20).data["x"]) == 4
        with pytest.raises(ValueError, match="max_message_bytes"):
            client._idle[0].post({"op": "insert", "a": np.zeros(1 << 26)})
        client.close()


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


def test_a_descriptor_that_zeromq_has_closed_is_nobodys_connection(tmp_path):
    """Its number is free, or that of a file or of another socket, before the monitor says so."""
    watch = Intake("tcp://127.0.0.1:9", max_bytes=1, watches=True)
    with (
        socket.socketpair()[0] as other,
        (tmp_path / "file").open("w") as file,
        (tmp_path / "gone").open("w") as gone,
    ):
        numbers = [other.fileno(), file.fileno(), gone.fileno()]
        for number in numbers:
            watch.note(zmq.EVENT_ACCEPTED, number)
        gone.close()
        watch.look()
        for number in numbers:
            watch.close(number, "a test")
        assert watch.cut == 0 and not watch.peers
        other.getsockname()
        file.write("is open")


def holdings(max_bytes, **options):
    store = RowStore(**options)
    tables = [table()]
    tables[0].attach(store)
    return store, Holdings(store, tables, max_bytes)


def test_rows_that_clients_hold_are_bounded_and_come_back():
    store, holds = holdings(10_000)
    clients = [Held() for _ in range(3)]
    for held in clients:
        stream, _ = holds.declare(held, "s", {"x": ((24,), F4)}, None)  # 100 bytes with the count
    for held, n in zip(clients, (100, 50, 0), strict=True):
        holds.lease(held, stream, n)
        with pytest.raises(replay.StoreFullError, match="max_leased_bytes"):
            holds.lease(held, stream, 51 if n == 50 else 1)
    with pytest.raises(replay.StoreFullError, match="max_leased_bytes"):  # for the rows that exist
        holds.declare(clients[2], "s", {"y": ((100,), F4)}, stream)
    holds.release(clients[0], stream, np.arange(10))
    holds.lease(clients[2], stream, 10)
    for held in clients:
        holds.close(held)
    assert not store.streams and store.num_bytes == 0


def test_columns_go_with_the_last_client_that_has_declared_them():
    store, holds = holdings(1 << 30)
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


def test_requests_wait_for_answers_to_be_read_and_the_idlest_client_goes():
    now = [0.0]
    unread = Unread(100 * MIB, lambda: now[0])
    trackers = [types.SimpleNamespace(done=False) for _ in range(8)]
    assert unread.has_room(1000 * MIB) == (True, [])  # alone
    for client, tracker in zip("abcc", trackers, strict=False):
        assert unread.add(client, tracker, 24 * MIB)
        now[0] += 1
    assert unread.has_room(3 * MIB) == (True, []) and unread.has_room(5 * MIB) == (False, ["a"])
    trackers[0].done = True
    assert unread.has_room(24 * MIB) == (True, [])
    assert [unread.add("d", each, 8 * MIB) for each in trackers[3:]] == [True, True, True, True, False]
