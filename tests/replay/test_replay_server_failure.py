"""Processes die, servers restart, memory is full: nothing is torn, lost twice or left behind."""

import os
import signal
import subprocess
import time
import zlib

import numpy as np
import pytest
import warm_python
from background import Background, until
from served_table import counts, num_rows, table, write, write_columns

from framework import replay
from framework.datasets import Dataset
from framework.replay.__main__ import main
from framework.replay.client import ServedClient
from framework.replay.remote.connection import ReplayConnection
from framework.replay.sharded import ShardedClient
from launch.rpc.sockets import CurveKeys


def _hold_rows(pipe, address, local):
    writer = ServedClient(address, local=local).batch_writer()
    write(writer, 10)
    writer.flush()
    writer.append("s", {"x": np.arange(300), "y": np.ones((300, 3), np.float32)})  # no item yet
    pipe.send("ready")
    pipe.recv()


@pytest.mark.parametrize("local", [True, False])
def test_a_killed_writer_leaves_no_half_item_and_its_rows_return(fork, local):
    with replay.Server([table()]) as server:
        child = fork(_hold_rows, server.address, local)
        child.word()
        client = server.localhost_client()
        assert num_rows(client) >= 310
        child.kill()
        until(lambda: num_rows(client) == 10)
        assert client.server_info()["t"].current_size == 10
        assert set(client.sample_batch("t", 100).data["x"].tolist()) <= set(range(10))


def _fetch_ahead(pipe, address):
    dataset = Dataset(ServedClient(address), "t", 10, prefetch=3)
    next(dataset)
    until(lambda: len(dataset._batches) == 3)
    pipe.send("ready")
    pipe.recv()


def _keep_samples(pipe, addresses):
    dataset = Dataset(ShardedClient(addresses), "t", 10)
    for _ in range(10):
        next(dataset)
    pipe.send("ready")
    pipe.recv()


def _drawn(made):
    """The samples of a table that count, and those that a reader holds, at one moment."""
    with made.lock:
        return made.rate_limiter.samples, int((made.items.times - made.items.done).sum())


def test_a_killed_sampler_of_several_servers_keeps_no_samples(fork):
    tables = table(), table()
    with replay.Server([tables[0]]) as first, replay.Server([tables[1]]) as second:
        for server in (first, second):
            write(server.localhost_client().batch_writer(), 50)
        child = fork(_keep_samples, [first.address, second.address])
        child.word()
        assert sum(_drawn(each)[0] for each in tables) > 100
        child.kill()
        until(lambda: not any(_drawn(each)[1] for each in tables))
        assert sum(_drawn(each)[0] for each in tables) <= 100


def test_a_killed_sampler_pins_no_rows_and_its_reservations_return(fork):
    queue = replay.Table.queue("t", 100)
    with replay.Server([queue]) as server:
        client = server.localhost_client()
        write(client.batch_writer(), 50)
        child = fork(_fetch_ahead, server.address)
        child.word()
        assert counts(client) == (50, 40) and queue.info.current_size == 10
        child.kill()
        until(lambda: queue.info.current_size == 40)
        assert counts(client) == (50, 10)
        np.testing.assert_array_equal(client.sample_batch("t", 40, timeout=60).data["x"], np.arange(10, 50))
        until(lambda: num_rows(client) <= 512)


def test_the_request_of_a_killed_sampler_takes_nothing(fork):
    queue = replay.Table.queue("t", 100)
    with replay.Server([queue]) as server:
        child = fork(lambda pipe: ServedClient(server.address).sample_batch("t", 5))
        until(lambda: queue.info.rate_limiter_info.sample_stats.pending == 1)
        child.kill()
        until(lambda: queue.info.rate_limiter_info.sample_stats.pending == 0)
        write(server.localhost_client().batch_writer(), 5)
        assert queue.info.current_size == 5


def _serve(pipe, made):
    with replay.Server([made]) as server:
        pipe.send((server.address, server._store.allocator.directory))
        server.wait()


def test_a_killed_server_is_an_error_and_leaves_nothing_after_the_next_start(fork):
    child = fork(_serve, table())
    address, directory = child.word()
    client = ServedClient(address, reconnect_timeout=0.5)
    write(client.batch_writer(), 10)
    assert client.sample_batch("t", 4).data["x"].shape == (4,)
    client.reset("t")
    waiting = Background(client.sample_batch, "t", 1)
    child.kill()
    with pytest.raises(replay.ServerClosed, match="no replay server answered"):
        waiting.result()
    with replay.Server([table()]):  # or a server of another test, a moment before
        assert not os.path.exists(directory)
    client.close()


@pytest.mark.parametrize("end", ["killed", "stopped: all its messages at once", "stopped: one at a time"])
@pytest.mark.parametrize("local", [True, False])
def test_a_writer_ends_with_its_server_and_counts_what_is_lost(fork, monkeypatch, local, end):
    receive, queue = ReplayConnection.receive, replay.Table.queue("t", 4)

    def receive_more(connection, deadline, watch):
        if deadline == 0.0:  # what has come together with the first message
            return end.endswith("once") and receive(connection, time.monotonic() + 60.0, watch)
        return receive(connection, deadline, watch)

    server = fork(_serve, queue) if end == "killed" else replay.Server([queue])
    address = server.word()[0] if end == "killed" else server.address
    client = ServedClient(address, local=local, reconnect_timeout=0.5)
    writer = client.batch_writer(max_in_flight_items=100)
    for n in range(10):
        write(writer, 1, start=n)
    with pytest.raises(replay.DeadlineExceededError, match=r"wait for room: table '\w+': cannot insert"):
        writer.flush(timeout=0.2)
    monkeypatch.setattr(ReplayConnection, "receive", receive_more)
    server.kill() if end == "killed" else server.stop()
    lost = replay.ServerLost if end == "killed" else replay.ServerClosed
    for _ in range(2):
        with pytest.raises(lost):
            writer.flush(timeout=10)
    with pytest.raises(lost):
        writer.append("s", {"x": np.arange(3)})
    assert writer.num_pending == 0 and writer.num_lost >= 6
    assert writer.close() == writer.num_lost
    client.close()


def _write_checked(pipe, local, seconds, seed):
    rng = np.random.default_rng(seed)
    writer = ServedClient(pipe.recv(), local=local).batch_writer()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        x = rng.integers(0, 255, (32, 1000), np.uint8)
        write_columns(writer, {"x": x, "check": np.array([zlib.crc32(row) for row in x], np.int64)})
    pipe.send(writer.close(timeout=10))


def _read_checked(pipe, local, seconds):
    client = ServedClient(pipe.recv(), local=local)
    end, seen, torn = time.monotonic() + seconds, 0, 0
    while not seen or time.monotonic() < end:
        data = client.sample_batch("t", 64, timeout=20).data
        seen += 64
        torn += [zlib.crc32(row) for row in data["x"]] != data["check"].tolist()
    pipe.send(torn)
    client.close()


def test_an_interrupt_while_a_connection_is_closed_counts_what_is_lost(monkeypatch):
    with replay.Server([replay.Table.queue("t", 2)]) as server:
        writer = ServedClient(server.address).batch_writer()
        write(writer, 5)

        def interrupted(message):
            writer._connection.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(writer._connection, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.flush(timeout=60)
        assert writer.close() == writer.num_lost == 5


def test_no_row_is_ever_torn(fork):
    """A small table, so that rows are reused all the time; 60 seconds with REPERTORY_TORN_SECONDS=60."""
    seconds = float(os.environ.get("REPERTORY_TORN_SECONDS", "2"))
    # Before the server: a fork beside busy threads may inherit a lock that one of them holds.
    children = [fork(_write_checked, number > 0, seconds, number) for number in range(4)]
    children += [fork(_read_checked, number > 0, seconds) for number in range(4)]
    with replay.Server([table(size=200)]) as server:
        for child in children:
            child.tell(server.address)
        assert [child.word() for child in children] == [0] * 8  # nothing dropped, nothing torn
        until(lambda: num_rows(server._store) == 200)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_by_itself(tmp_path, number, code):
    config, keys = tmp_path / "tables.py", str(tmp_path / "keys")
    config.write_text("from framework import replay\ntables = lambda: [replay.Table.queue('q', 10)]")
    command = ["-m", "framework.replay", "--config", str(config), "--keys", keys]
    child = warm_python.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = child.stdout.readline().split()[-1]
        with replay.Client(address, curve=CurveKeys.from_file(keys)) as client:
            assert list(client.server_info(timeout=10)) == ["q"]
        child.send_signal(number)
        assert child.wait(10) == code
    finally:
        child.kill()
        child.communicate()


WRONG_CONFIGS = {
    "no tables": ("", "expected a function tables()"),
    "an empty list": ("def tables(): return []", "tables: got none"),
    "a checkpoint of others": (
        "from framework import replay\n"
        "tables = lambda: [replay.Table.queue('b', 1)]\n"
        "checkpointer = lambda: replay.checkpointers.DefaultCheckpointer({folder!r})",
        "expected tables of the server, ['b']",
    ),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_wrong_configurations(tmp_path, capsys, name):
    config, message = WRONG_CONFIGS[name]
    folder = str(tmp_path / "checkpoints")
    checkpointer = replay.checkpointers.DefaultCheckpointer(folder)
    replay.EmbeddedClient([replay.Table.queue("a", 1)], checkpointer=checkpointer).checkpoint()
    (tmp_path / "tables.py").write_text(config.format(folder=folder))
    assert main(["--config", str(tmp_path / "tables.py")]) == 2
    assert message in capsys.readouterr().err


def _use_in_a_child(pipe, client, writer, source):
    """What a forked child does with what it inherits, in the order of the words that it sends."""
    assert client.sample_batch("t", 4, timeout=10).data["x"].shape == (4,)
    pipe.send("sampled")
    with pytest.raises(replay.ServerClosed):
        write(writer, 1)
    pipe.send("refused")
    write(client.batch_writer(), 3, start=10)
    assert client.server_info(timeout=10)["t"].current_size == 13
    pipe.send("written")
    sample, drawn = source.draw("t", 4, 10.0, None, False)
    source.release(drawn)
    assert sample.data["x"].shape == (4,)
    client.close()
    pipe.send("closed")


@pytest.mark.parametrize("local", [True, False])
def test_a_forked_child_uses_a_client_of_its_parent_and_the_parent_goes_on(fork, local):
    with replay.Server([table()]) as server:
        client = ServedClient(server.address, local=local)
        writer = client.batch_writer()
        write(writer, 10)
        writer.flush()
        source = client.source()
        source.release(source.draw("t", 4, 10.0, None, False)[1])
        with writer.lock, client._lock:  # by a thread of the parent, when it forks
            child = fork(_use_in_a_child, client, writer, source)
        assert [child.word() for _ in range(4)] == ["sampled", "refused", "written", "closed"]
        child.end()
        write(writer, 2, start=20)
        assert client.server_info(timeout=10)["t"].current_size == 15
        assert client.sample_batch("t", 4, timeout=10).data["x"].shape == (4,)
        source.close()
        client.close()


def _insert_in_a_child(pipe, address):
    client = replay.Client(address)
    with client.trajectory_writer(1) as writer:
        writer.append({"x": np.float32(2)})
        key = writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
    pipe.send((key, client.server_info(timeout=60)["t"].current_size))
    client.close()


def test_forked_children_of_a_server_reach_its_tables_and_make_keys_of_their_own(fork):
    with replay.Server([table()]) as server:
        words = []
        for _ in range(2):
            child = fork(_insert_in_a_child, server.address)
            words.append(child.word())
            child.end()
        (first, one), (second, two) = words
        assert (one, two) == (1, 2) == (1, len(server.tables["t"]))  # no copies of the table
        assert first != second


@pytest.mark.parametrize("end", ["source", "client"])
def test_what_a_forked_child_interrupts_goes_on_in_its_parent(fork, end):
    with replay.Server([replay.Table.queue("t", 10)]) as server, ServedClient(server.address) as client:
        source = client.source()
        reading = Background(source.draw, "t", 1, 20.0, None, False)
        until(lambda: server.tables["t"].waiting.counts[0])
        fork(lambda pipe: (source if end == "source" else client).interrupt()).end()
        write(client.batch_writer(), 1)
        assert reading.result()[0].data["x"].tolist() == [0]
        source.close()
