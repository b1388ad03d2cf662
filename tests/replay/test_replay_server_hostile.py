"""What a broken or hostile client may send or leave undone, with the key or without need of one."""

import gc
import threading
import time

import numpy as np
import psutil
import pytest
from background import Background, until
from served_table import counts, num_rows, table, write

from framework import replay
from framework.replay import wire
from framework.replay.client import ServedClient
from launch.rpc import sockets

NAN, INF = float("nan"), float("inf")
NUMBERS = [None, True, -1, 0, 3, 1 << 40, NAN, INF, -INF, 1e17, 1e300]
OTHERS = ["", "t", "s", b"\0", [], [1], [[1]], {}, {"t": 1}]
ARRAYS = [np.zeros(0), np.arange(3), np.array(NAN), np.array([1 << 62], np.uint64), np.zeros((2, 2), "f4")]
ODD = [*NUMBERS, *OTHERS, *ARRAYS]
LAYOUT = [[["s", 1, False]], [["x", 0, False, False]], [["dict", ["x"], [None]]]]
ITEM = ["t", 0, np.array([[0]]), None, np.array([1], np.uint64), None, None]
INSERT = {"layouts": [[0, LAYOUT]], "write": [], "items": [ITEM], "release": [], "lease": {}}
SAMPLE = {"table": "t", "n": 3, "least": 2, "timeout": 0.01, "local": False, "hold": False, "pad": False}
MESSAGES = {
    "hello": {"protocol": wire.PROTOCOL},
    "declare": {"name": "s", "stream": None, "columns": {"x": [[], "<i8"]}},
    "lease": {"stream": "s", "n": 4},
    "insert": INSERT,
    "sample": SAMPLE,
    "give_back": {"deliveries": [1], "used": 0},
    "mutate": {"table": "t", "arguments": [np.arange(2), np.ones(2), np.arange(0)]},
    "reset": {"table": "other", "arguments": []},
    "can_sample": {"table": "t", "arguments": [1]},
    "can_insert": {"table": "t", "arguments": [1]},
    "weight": {"table": "t", "arguments": []},
    "info": {},
    "sync": {},
    "cancel": {},
    "checkpoint": {"timeout": 5.0},
}


class Raw:
    """A peer that sends what it likes."""

    def __init__(self, address):
        self.socket = sockets.make_client_socket(address, None)

    def send(self, message):
        self.socket.send_multipart(wire.encode(message))

    def hello(self):
        self.send({"op": "hello", "id": 0, **MESSAGES["hello"]})
        assert self.socket.poll(5000)
        return wire.decode(self.socket.recv_multipart())

    def drain(self):
        while self.socket.poll(20):
            self.socket.recv_multipart()

    def close(self):
        self.socket.close(linger=0)


def odd_messages(op):
    """Every field of a message, with every odd value in its place."""
    fields = {"op": op, "id": 7, "done": [], **MESSAGES[op]}
    for name in fields:
        for value in ODD:
            yield {**fields, name: value}
        yield {other: value for other, value in fields.items() if other != name}
    if op == "insert":
        for at in range(len(ITEM)):
            for value in ODD:
                yield {**fields, "items": [[*ITEM[:at], value, *ITEM[at + 1 :]]]}
        for value in ODD:
            yield {**fields, "layouts": [[0, [value, *LAYOUT[1:]]]]}
            yield {**fields, "layouts": [[0, [*LAYOUT[:2], value]]]}
            yield {**fields, "write": [["s", value, {"x": np.arange(1)}]]}
            yield {**fields, "release": [["s", value]]}
            yield {**fields, "lease": {"s": value}}


@pytest.mark.parametrize("waits", [False, True], ids=["answered", "waiting"])
@pytest.mark.parametrize("op", MESSAGES)
def test_no_field_of_any_message_ends_the_server(op, waits, tmp_path):
    checkpointer = replay.checkpointers.DefaultCheckpointer(str(tmp_path))
    with replay.Server([table(), table("other")], checkpointer=checkpointer) as server:
        client = ServedClient(server.address, local=False)
        writer = client.batch_writer()
        if not waits:
            write(writer, 20)
            writer.flush()
        raw = Raw(server.address)
        for message in odd_messages(op):
            raw.send({"op": "hello", "id": 0, **MESSAGES["hello"]})
            raw.send(message)
            if waits and op == "sample":
                raw.send({**message, "timeout": NAN})
        raw.drain()
        raw.close()
        write(writer, 5)
        writer.flush(timeout=20)
        assert client.server_info(timeout=20)["t"].current_size >= 5
        assert len(client.sample_batch("t", 4, timeout=20).data["x"]) == 4
        assert server._service.error is None
        client.close()


@pytest.mark.parametrize("way", ["embedded", "local", "remote"])
def test_a_request_for_too_many_samples_honors_its_timeout_and_lets_others_go_on(way):
    with replay.Server([table()]) as server:
        client = server.localhost_client()
        if way != "embedded":
            client = ServedClient(server.address, local=way == "local")
        other = ServedClient(server.address)
        writer = other.batch_writer()
        write(writer, 50)
        writer.flush()
        begin = time.monotonic()
        call = Background(client.sample_batch, "t", 10**8, 1.0)
        slowest, drawn = 0.0, 0
        while call.running() and time.monotonic() < begin + 60:
            before = time.monotonic()
            drawn += len(other.sample_batch("t", 8, timeout=60).info.key)
            slowest = max(slowest, time.monotonic() - before)
        with pytest.raises((ValueError, replay.DeadlineExceededError)):
            call.result()
        assert time.monotonic() - begin < 40 and slowest < 10
        until(lambda: counts(other) == (50, drawn))  # The large request has taken nothing.
        client.close()
        other.close()


def test_a_client_that_never_reads_is_cut_off_and_others_go_on():
    item = np.zeros((64, 1 << 16), np.uint8)
    with replay.Server([table()], limits=replay.Limits(max_unread_bytes=1 << 27)) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer()
        rows = writer.append("s", {"x": item})
        writer.create_items("t", {"x": writer.slice("s", "x", rows)})
        writer.flush()
        raw = Raw(server.address)
        raw.socket.disconnect(server.address)
        raw.socket.rcvhwm = 1  # what it received would count as memory of this process
        raw.socket.connect(server.address)
        raw.hello()
        before, sessions = psutil.Process().memory_info().rss, len(server._service._sessions)
        for number in range(1, 400):
            raw.send({"op": "sample", "id": number, **SAMPLE, "n": 64, "timeout": None})
        peak, deadline = 0, time.monotonic() + 60
        while len(server._service._sessions) == sessions and time.monotonic() < deadline:
            peak = max(peak, psutil.Process().memory_info().rss - before)
            time.sleep(0.01)
        assert len(server._service._sessions) < sessions
        other = ServedClient(server.address, local=False)
        assert other.sample_batch("t", 64, timeout=60).data["x"].shape == (64, 1 << 16)
        other.close()
        assert peak < 400 << 20, peak  # 399 answers of 4 MiB are 1.6 GB
        raw.close()
        client.close()


def test_dropped_writers_give_back_rows_and_files(connect):
    client = connect(table(size=10))

    def use(n):
        for _ in range(n):
            writer = client.batch_writer()
            write(writer, 10)
            writer.append("s", {"x": np.arange(50), "y": np.ones((50, 3), np.float32)})  # never released
            del writer
        gc.collect()
        return client.server_info()["t"]

    use(3)
    files, threads = psutil.Process().num_fds(), threading.active_count()
    assert use(40).rate_limiter_info.insert_stats.completed == 430
    # A look ends the last writer, which its late thread may have held until now.
    until(lambda: client.server_info() and num_rows(client.server._store) == 10)
    until(lambda: psutil.Process().num_fds() <= files + 20)
    assert threading.active_count() <= threads + 5


def test_checkpoints_are_written_one_at_a_time(tmp_path):
    class Slow(replay.checkpointers.DefaultCheckpointer):
        now = most = total = 0

        def save(self, tables, store):
            self.now += 1
            self.most = max(self.most, self.now)
            self.total += 1
            time.sleep(0.05)
            self.now -= 1
            return super().save(tables, store)

    checkpointer = Slow(str(tmp_path))
    with replay.Server([table()], checkpointer=checkpointer) as server:
        raws = [Raw(server.address) for _ in range(3)]
        before = threading.active_count()
        for raw in raws:
            raw.hello()
            for number in range(1, 50):
                raw.send({"op": "checkpoint", "id": number, "timeout": 30.0})
        for raw in raws:
            assert raw.socket.poll(10_000)
            assert "path" in wire.decode(raw.socket.recv_multipart())
        assert threading.active_count() <= before + 1
        for raw in raws:
            raw.close()
        client = ServedClient(server.address)
        assert client.checkpoint()  # those of the clients that have gone are not written any more
        assert checkpointer.most == 1
        assert checkpointer.total < 100
        client.close()
