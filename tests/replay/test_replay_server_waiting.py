"""Messages of one writer that arrive while an earlier one waits for its rate limiter lose nothing."""

import threading
import time

import numpy as np
import pytest
from background import Background, until
from served_table import write

from framework import replay
from framework.replay.client import ServedClient


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_every_item_arrives_however_many_messages_wait(local):
    with replay.Server([replay.Table.queue("t", 150)]) as server:
        client = ServedClient(server.address, local=local)
        writer = client.batch_writer(max_in_flight_items=10_000)
        sent = 0
        for _ in range(40):  # messages of their own, of which the first fills the table
            write(writer, 50, start=sent)
            writer.show()
            sent += 50
        assert client.server_info(timeout=60)["t"].current_size == 150
        seen = []
        while len(seen) < sent:
            seen.extend(client.sample_batch("t", 50, timeout=60).data["x"].tolist())
        assert seen == list(range(sent))
        writer.flush(timeout=60)
        assert writer.close(timeout=60) == 0
        client.close()


@pytest.mark.parametrize("limit", [20_000, 100])
def test_messages_that_wait_keep_their_items_only(limit):
    limits = replay.Limits(max_unread_bytes=limit)
    with replay.Server([replay.Table.queue("t", 1)], limits=limits) as server:
        client = ServedClient(server.address, local=False)
        writer = client.batch_writer()

        def write_all():
            for at in range(10):
                rows = writer.append("s", {"x": np.full((1, 25_000), at, np.float32)})
                writer.create_items("t", {"x": writer.slice("s", "x", rows)})
                writer.show()
            writer.flush(timeout=10)

        if limit == 100:
            with pytest.raises(replay.StoreFullError, match="more than 100 bytes of all clients"):
                write_all()
        else:
            writing, reader = Background(write_all), server.localhost_client()
            seen = [reader.sample_batch("t", 1, timeout=10).data["x"][0, 0] for _ in range(10)]
            writing.result(10)
            assert seen == list(range(10))
        client.close()
        until(lambda: server._service._waiting_bytes == 0)


@pytest.mark.parametrize("ask", ["create", "flush"])
def test_an_acknowledgement_on_its_way_is_not_taken_for_a_table_without_room(ask, monkeypatch):
    """It may come late, on a machine that is busy, and who polls (timeout 0) does not ask a second time."""
    with replay.Server([replay.Table.queue("t", 150)]) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer(max_in_flight_items=1)
        rows = writer.append("s", {"x": np.arange(2)})
        # Nothing is seen of the server but its answers to questions: the rest is still on its way.
        receive = writer._connection.receive
        asks = lambda until, watch: until > time.monotonic() + 1.0 and receive(until, watch)  # noqa: E731
        monkeypatch.setattr(writer._connection, "receive", asks)
        writer.create_items("t", {"x": writer.slice("s", "x", rows[:1])})
        assert server.localhost_client().sample_batch("t", 1, timeout=10).data["x"].tolist() == [0]
        if ask == "create":
            writer.create_items("t", {"x": writer.slice("s", "x", rows[1:])}, timeout=0)
            assert server.localhost_client().sample_batch("t", 1, timeout=10).data["x"].tolist() == [1]
        else:
            writer.flush(timeout=0)
        monkeypatch.undo()
        assert writer.close(timeout=60) == 0
        client.close()


def test_single_items_are_sent_soon():
    with replay.Server([replay.Table.queue("t", 150)]) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer()
        rows = writer.append("s", {"x": np.arange(2)})
        reader = server.localhost_client()
        for at in range(2):
            writer.create_items("t", {"x": writer.slice("s", "x", rows[at : at + 1])})
            assert reader.sample_batch("t", 1, timeout=10).data["x"].tolist() == [at]
        writer.close(timeout=5)
        client.close()


def test_a_client_can_be_closed_while_a_writer_waits_in_another_thread():
    with replay.Server([replay.Table.queue("t", 3)]) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer(max_in_flight_items=1)
        writing = Background(lambda: (write(writer, 10), writer.flush()))
        until(lambda: server.tables["t"].info.rate_limiter_info.insert_stats.pending)
        client.close()
        with pytest.raises(replay.ServerClosed):
            writing.result(10)


@pytest.mark.parametrize("size", [1, 3, 50])
def test_no_wake_up_is_lost_between_served_and_local_readers_and_writers(size):
    """All of them wait for one another all the time; each item arrives once."""
    with replay.Server([replay.Table.queue("a", size), replay.Table.queue("b", size)]) as server:
        clients = [
            server.localhost_client(),
            *[ServedClient(server.address, local=n % 2 == 0) for n in range(3)],
        ]
        n, seen = 400, []

        def write(client, start):
            writer = client.batch_writer(max_in_flight_items=7)
            for value in range(start, start + n, 5):
                rows = writer.append("s", {"x": np.arange(value, value + 5)})
                writer.create_items("ab"[value // 5 % 2], {"x": writer.slice("s", "x", rows)}, timeout=60)
                writer.release("s", rows)
            writer.flush(timeout=60)

        def read(client, table):
            while True:
                seen.extend(client.sample_batch(table, 1, timeout=60).data["x"].tolist())

        readers = [Background(read, client, table) for client in clients for table in "ab"]
        writers = [Background(write, client, number * n) for number, client in enumerate(clients)]
        for writer in writers:
            writer.result()
        until(lambda: len(seen) >= n * len(clients), timeout=20)
        for client in clients:
            client.close()
        for reader in readers:
            with pytest.raises(replay.ServerClosed):
                reader.result(20)
        assert sorted(seen) == list(range(n * len(clients)))


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_the_time_that_served_calls_wait_counts_for_the_table_that_holds_them_back(local):
    tables = [replay.Table.queue(name, 1) for name in ("t", "free")]
    with replay.Server(tables) as server:
        client, here = ServedClient(server.address, local=local), server.localhost_client()

        def waited(name):
            info = here.server_info()[name].rate_limiter_info
            return info.sample_stats.blocked_ms, info.insert_stats.blocked_ms

        def create(writer):
            rows = writer.append("s", {"x": np.zeros(2)})
            for at in range(2):
                writer.create_items("t", {"x": writer.slice("s", "x", rows[at : at + 1])})
            writer.create_items("free", {"x": writer.slice("s", "x", rows[:1])})
            writer.show()

        sampling = Background(client.sample_batch, "t", 1, 60)
        assert sampling.running(0.3)
        writer = client.batch_writer()
        create(writer)  # one of two goes to the sampler
        sampling.result()
        assert waited("t")[0] >= 200
        create(writer)
        threading.Event().wait(0.3)
        for _ in range(3):
            here.sample_batch("t", 1, timeout=60)
            if here.can_sample("free", 1):
                here.sample_batch("free", 1, timeout=60)
        writer.flush(timeout=60)
        assert waited("t")[1] >= 200
        assert max(waited("free")) < 200
        client.close()


def test_single_items_that_wait_for_a_full_table_become_few_messages():
    with replay.Server([replay.Table.queue("t", 10)]) as server:
        client = ServedClient(server.address)
        writer = client.trajectory_writer(1)
        n = 1500
        for at in range(n):
            writer.append({"x": np.int64(at)})
            writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
            writer._writer._push_late()  # as the timer does, if the next item comes too late for it
        assert max(len(each.waiting) for each in server._service._sessions.values()) < 200
        reader = server.localhost_client()
        seen = []
        while len(seen) < n:  # the last items, too, without another call of the writer
            seen += reader.sample_batch("t", 1, timeout=60).data["x"].tolist()
        assert seen == list(range(n))
        assert writer.close(timeout=60) == 0
        client.close()
