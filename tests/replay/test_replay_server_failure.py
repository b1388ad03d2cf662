"""Processes die, servers restart, memory is full: nothing is torn, lost twice or left behind."""

import errno
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import warm_python

from framework import replay
from framework.replay.remote.client import ServedClient
from launch.rpc.sockets import CurveKeys

PRELUDE = """
import sys, time, zlib
import numpy as np
from framework import replay
from framework.datasets import Dataset
from framework.replay.remote.client import ServedClient

def table(limiter=None, size=1000):
    return replay.Table("t", replay.selectors.Uniform(), replay.selectors.Fifo(), size,
                        limiter or replay.rate_limiters.MinSize(1), seed=1)

def say(*words):
    print(*words, flush=True)
"""


def start(code, *arguments):
    """A process that runs ``code``; wait for its words with ``child.stdout.readline()``."""
    return warm_python.Popen(
        ["-c", PRELUDE + code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def spawn():
    children = []

    def spawn(code, *arguments):
        children.append(start(code, *arguments))
        return children[-1]

    yield spawn
    for child in children:
        child.kill()
        child.communicate(timeout=20)


def kill(child):
    child.send_signal(signal.SIGKILL)
    child.wait(10)


def table(limiter=None, size=1000, **kwargs):
    return replay.Table(
        "t",
        replay.selectors.Uniform(),
        replay.selectors.Fifo(),
        size,
        limiter or replay.rate_limiters.MinSize(1),
        seed=1,
        **kwargs,
    )


def eventually(condition, timeout=15.0):
    """Waits for something that another process causes."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        threading.Event().wait(0.02)


def write(writer, n, start=0):
    rows = writer.append("s", {"x": np.arange(start, start + n)})
    keys = writer.create_items("t", {"x": writer.slice("s", "x", rows)})
    writer.release("s", rows)
    return keys


@pytest.mark.parametrize("local", [True, False])
def test_a_killed_writer_leaves_no_half_item_and_its_rows_return(spawn, local):
    with replay.Server([table()]) as server:
        child = spawn(
            """
client = ServedClient(sys.argv[1], local=sys.argv[2] == "True")
writer = client.batch_writer()
rows = writer.append("s", {"x": np.arange(10)})
writer.create_items("t", {"x": writer.slice("s", "x", rows)})
writer.flush()
writer.append("s", {"x": np.arange(300)})     # held, no item yet
say("ready")
sys.stdin.read()
""",
            server.address,
            local,
        )
        assert child.stdout.readline().split() == ["ready"]
        client = server.localhost_client()
        stream = server._client.store.streams["s"]
        assert stream.num_rows >= 310
        kill(child)
        eventually(lambda: stream.num_rows == 10)
        assert client.server_info()["t"].current_size == 10
        assert set(client.sample_batch("t", 100).data["x"].tolist()) <= set(range(10))


def test_a_killed_sampler_pins_no_rows_and_its_reservations_return(spawn):
    queue = replay.Table.queue("t", 100)
    with replay.Server([queue]) as server:
        client = server.localhost_client()
        write(client.batch_writer(), 50)
        child = spawn(
            """
client = ServedClient(sys.argv[1])
dataset = Dataset(client, "t", 10, prefetch=3)
next(dataset)
while len(dataset._batches) < 3:
    time.sleep(0.01)
say("ready")
sys.stdin.read()
""",
            server.address,
        )
        child.stdout.readline()
        stream = server._client.store.streams["s"]
        assert queue.info.rate_limiter_info.sample_stats.completed == 40
        assert queue.info.current_size == 10
        kill(child)
        eventually(lambda: queue.info.current_size == 40)
        assert queue.info.rate_limiter_info.sample_stats.completed == 10
        np.testing.assert_array_equal(client.sample_batch("t", 40, timeout=60).data["x"], np.arange(10, 50))
        eventually(lambda: stream.num_rows <= 512)
        assert queue.info.current_size == 0


def test_the_request_of_a_killed_sampler_takes_nothing(spawn):
    queue = replay.Table.queue("t", 100)
    with replay.Server([queue]) as server:
        child = spawn(
            'client = ServedClient(sys.argv[1]); say("ready"); client.sample_batch("t", 5)', server.address
        )
        child.stdout.readline()
        eventually(lambda: queue.info.rate_limiter_info.sample_stats.pending == 1)
        kill(child)
        eventually(lambda: queue.info.rate_limiter_info.sample_stats.pending == 0)
        write(server.localhost_client().batch_writer(), 5)
        assert queue.info.current_size == 5


SERVER = """
with replay.Server([table()], port=int(sys.argv[1])) as server:
    say(server.port, server._store.allocator.directory)
    sys.stdin.read()
"""


def test_a_killed_server_is_an_error_and_leaves_nothing_after_the_next_start(spawn):
    child = spawn(SERVER, 0)
    port, directory = child.stdout.readline().split()
    client = ServedClient(f"tcp://127.0.0.1:{port}", reconnect_timeout=0.5)
    write(client.batch_writer(), 10)
    assert client.sample_batch("t", 4).data["x"].shape == (4,)
    outcome = []

    def wait():
        try:
            client.sample_batch("t", 1, timeout=None)
            client.reset("t")
            client.sample_batch("t", 1, timeout=None)
        except replay.ServerClosed as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    kill(child)
    thread.join(10)
    assert outcome and "no replay server answered" in str(outcome[0])
    with replay.Server([table()]):  # or a server of another test, a moment before
        assert not os.path.exists(directory)
    client.close()


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_writer_ends_with_its_server_and_counts_what_is_lost(spawn, local, end):
    child = spawn(
        """
with replay.Server([replay.Table.queue("t", 4)]) as server:
    say(server.address)
    sys.stdin.read()
"""
    )
    client = ServedClient(child.stdout.readline().strip(), local=local, reconnect_timeout=0.5)
    writer = client.batch_writer(max_in_flight_items=100)
    for n in range(10):
        write(writer, 1, start=n)
    with pytest.raises(replay.DeadlineExceededError):
        writer.flush(timeout=0.2)
    if end == "killed":
        kill(child)
    else:
        child.send_signal(signal.SIGINT)
        child.wait(10)
    lost = replay.ServerLost if end == "killed" else replay.ServerClosed
    for _ in range(2):
        with pytest.raises(lost):
            writer.flush(timeout=10)
    with pytest.raises(lost):
        writer.append("s", {"x": np.arange(3)})
    assert writer.num_pending == 0 and writer.num_lost >= 6
    assert writer.close() == writer.num_lost
    client.close()


@pytest.mark.parametrize("local", [True, False])
def test_a_client_finds_a_server_that_was_restarted_and_makes_a_new_writer(local):
    first = replay.Server([table()])
    client = ServedClient(first.address, local=local, reconnect_timeout=20)
    writer = client.batch_writer()
    write(writer, 10)
    writer.flush()
    first.stop()
    second = replay.Server([table()], port=first.port)
    try:
        eventually(lambda: _tried(lambda: client.server_info(timeout=60)))
        with pytest.raises(replay.ServerClosed):
            write(writer, 1)
            writer.flush(timeout=10)
        again = client.batch_writer()
        write(again, 3)
        assert client.server_info()["t"].current_size == 3
        assert again.close() == 0
    finally:
        client.close()
        second.stop()


def _tried(call):
    try:
        call()
        return True
    except replay.ServerClosed:
        return False


def test_full_shared_memory_is_an_error_at_the_writer(monkeypatch):
    reserve = os.posix_fallocate

    def full(file, offset, size):
        if offset + size > 3 << 20:
            raise OSError(errno.ENOSPC, "no space")
        reserve(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with replay.Server([table(size=10**6)]) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer()
        with pytest.raises(replay.StoreFullError, match=r"\d+ more bytes"):
            for n in range(1000):
                write(writer, 10_000, start=n)
        assert client.sample_batch("t", 10).data["x"].shape == (10,)
        client.close()


WRITER = """
rng = np.random.default_rng(int(sys.argv[2]))
client = ServedClient(sys.argv[1], local=sys.argv[3] == "True")
writer = client.batch_writer()
say("ready")
end = time.monotonic() + float(sys.argv[4])
while time.monotonic() < end:
    x = rng.integers(0, 255, (32, 1000), np.uint8)
    check = np.array([zlib.crc32(row) for row in x], np.int64)
    rows = writer.append("s", {"x": x, "check": check})
    writer.create_items("t", {"x": writer.slice("s", "x", rows), "check": writer.slice("s", "check", rows)})
    writer.release("s", rows)
say("done", writer.close(timeout=10))
client.close()
"""
READER = """
client = ServedClient(sys.argv[1], local=sys.argv[3] == "True")
say("ready")
end = time.monotonic() + float(sys.argv[4])
seen = torn = 0
while time.monotonic() < end:
    sample = client.sample_batch("t", 64, timeout=20)
    seen += 64
    torn += sum(zlib.crc32(x) != c for x, c in zip(sample.data["x"], sample.data["check"].tolist()))
say("done", torn, seen)
client.close()
"""


def test_no_row_is_ever_torn(spawn):
    """A small table, so that rows are reused all the time; 60 seconds with REPERTORY_TORN_SECONDS=60."""
    seconds = float(os.environ.get("REPERTORY_TORN_SECONDS", "4"))
    with replay.Server([table(size=200)]) as server:
        children = [
            spawn(code, server.address, number, number % 4 != 3, seconds)
            for number, code in enumerate([WRITER] * 4 + [READER] * 4)
        ]
        for child in children:
            assert child.stdout.readline().split() == ["ready"]
        outcomes = [child.stdout.readline().split() for child in children]
        assert all(outcome[0] == "done" for outcome in outcomes)
        assert [int(outcome[1]) for outcome in outcomes] == [0] * 8  # nothing dropped, nothing torn
        assert all(int(outcome[2]) > 0 for outcome in outcomes[4:])
        stream = server._client.store.streams["s"]
        eventually(lambda: stream.num_rows == 200)


CONFIG = """
from framework import replay
def tables():
    return [replay.Table.queue("q", 10)]
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_by_itself(tmp_path, number):
    (tmp_path / "tables.py").write_text(CONFIG)
    keys = tmp_path / "keys"
    command = ["-m", "framework.replay", "--config", tmp_path / "tables.py", "--keys", keys]
    child = warm_python.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = child.stdout.readline().split()[-1]
        client = replay.Client(address, curve=CurveKeys.from_file(str(keys)))
        assert list(client.server_info(timeout=10)) == ["q"]
        client.close()
        child.send_signal(number)
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("text", ["", "def tables(): return []"])
def test_a_config_without_tables(tmp_path, text, capsys):
    from framework.replay.__main__ import main

    (tmp_path / "tables.py").write_text(text)
    assert main(["--config", str(tmp_path / "tables.py")]) == 2
    assert "tables" in capsys.readouterr().err


def test_a_checkpoint_of_other_tables(tmp_path, capsys):
    from framework.replay.__main__ import main

    folder = tmp_path / "checkpoints"
    checkpointer = replay.checkpointers.DefaultCheckpointer(folder)
    replay.EmbeddedClient([replay.Table.queue("a", 1)], checkpointer=checkpointer).checkpoint()
    (tmp_path / "tables.py").write_text(
        "from framework import replay\n"
        "tables = lambda: [replay.Table.queue('b', 1)]\n"
        f"checkpointer = lambda: replay.checkpointers.DefaultCheckpointer({str(folder)!r})\n"
    )
    assert main(["--config", str(tmp_path / "tables.py")]) == 2
    assert "expected tables of the server, ['b']" in capsys.readouterr().err


def _use_in_a_child(client, writer, source, report):
    """What a forked child does with what it inherits, in the order of the words that it reports."""
    assert client.sample_batch("t", 4, timeout=10).data["x"].shape == (4,)
    report.send("sampled")
    with pytest.raises(replay.ServerClosed):
        write(writer, 1)
    report.send("refused")
    write(client.batch_writer(), 3, start=10)
    assert client.server_info(timeout=10)["t"].current_size == 13
    report.send("written")
    sample, drawn = source.draw("t", 4, 10.0, None, False)
    source.release(drawn)
    assert sample.data["x"].shape == (4,)
    client.close()
    report.send("closed")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("local", [True, False])
def test_a_forked_child_uses_a_client_of_its_parent_and_the_parent_goes_on(local):
    with replay.Server([table()]) as server:
        client = ServedClient(server.address, local=local)
        writer = client.batch_writer()
        write(writer, 10)
        writer.flush()
        source = client.source()
        source.release(source.draw("t", 4, 10.0, None, False)[1])
        with writer._lock, client._lock:  # by a thread of the parent, when it forks
            forked = multiprocessing.get_context("fork")
            ours, theirs = forked.Pipe()
            child = forked.Process(target=_use_in_a_child, args=(client, writer, source, theirs))
            child.start()
        theirs.close()
        try:
            for word in ("sampled", "refused", "written", "closed"):
                assert ours.poll(60), f"not {word}"
                assert ours.recv() == word
            child.join(20)
            assert child.exitcode == 0
        finally:
            child.kill()
            child.join(20)
        write(writer, 2, start=20)
        assert client.server_info(timeout=10)["t"].current_size == 15
        assert client.sample_batch("t", 4, timeout=10).data["x"].shape == (4,)
        source.close()
        client.close()


def _insert_in_a_child(address, report):
    client = replay.Client(address)
    with client.trajectory_writer(1) as writer:
        writer.append({"x": np.float32(2)})
        key = writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
    report.send((key, client.server_info(timeout=60)["t"].current_size))
    client.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_of_a_server_reach_its_tables_and_make_keys_of_their_own():
    with replay.Server([table()]) as server:
        keys = set()
        for size in (1, 2):
            forked = multiprocessing.get_context("fork")
            ours, theirs = forked.Pipe()
            child = forked.Process(target=_insert_in_a_child, args=(server.address, theirs))
            child.start()
            theirs.close()
            try:
                assert ours.poll(60)
                key, seen = ours.recv()
                child.join(20)
            finally:
                child.kill()
                child.join(20)
            keys.add(key)
            assert seen == size
        assert len(server.tables["t"]) == 2  # and not two copies of the table with one item each
        assert len(keys) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("end", ["source", "client"])
def test_what_a_forked_child_interrupts_goes_on_in_its_parent(end):
    with replay.Server([replay.Table.queue("t", 10)]) as server, ServedClient(server.address) as client:
        source = client.source()
        drawn = []
        reader = threading.Thread(target=lambda: drawn.append(source.draw("t", 1, 20.0, None, False)))
        reader.start()
        while not server.tables["t"].waiting.counts[0]:
            time.sleep(0.01)
        child = multiprocessing.get_context("fork").Process(
            target=(source if end == "source" else client).interrupt
        )
        child.start()
        child.join(20)
        write(client.batch_writer(), 1)
        reader.join(20)
        assert drawn and drawn[0][0].data["x"].tolist() == [0]
        source.close()
