"""A served replay: who gets in, by which way, and what its end leaves behind."""

import os
import pathlib
import pickle
import socket
import stat
import tempfile
import time

import numpy as np
import psutil
import pytest
import zmq
from background import Background, until
from interrupts import interrupt
from served_table import KEYS, counts, num_rows, table, write

from framework import replay
from framework.datasets import Dataset
from framework.replay.client import ServedClient
from framework.replay.remote import connection
from framework.replay.remote.connection import ReplayConnection, SessionLost
from framework.replay.server import operations, service
from framework.replay.tables.rate_limiters import SAMPLERS
from launch.rpc import sockets


def test_stop_wakes_every_wait_at_once(connect):
    client = connect(table())
    calls = [Background(client.sample_batch, "t", 1) for _ in range(3)]
    here = client.server.tables["t"]
    until(lambda: here.info.rate_limiter_info.sample_stats.pending == 3)
    client.server.stop()
    begin = time.monotonic()
    for call in calls:
        with pytest.raises(replay.ServerClosed):
            call.result()
    with pytest.raises(replay.ServerClosed):
        client.sample_batch("t", 1)
    with pytest.raises(replay.ServerClosed):
        client.batch_writer().append("s", {"x": np.arange(3)})
    assert time.monotonic() - begin < 20, "it waited for a server to come back"


def test_stop_leaves_no_files():
    server = replay.Server([table()])
    directory = server._store.allocator.directory
    client = ServedClient(server.address)
    write(client.batch_writer(), 10)
    client.sample_batch("t", 4)
    client.close()
    assert os.listdir(directory)
    server.stop()
    assert not os.path.exists(directory)
    server.stop()


def test_close_says_how_many_were_dropped_and_they_stay_away(connect):
    """Three of eight fit; the message that they were in was never acknowledged as a whole."""
    client = connect(replay.Table.queue("t", 3))
    writer = client.trajectory_writer(1)
    for value in range(8):
        writer.append({"x": value})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1]})
    assert writer.close(timeout=0.3) == 5
    with pytest.raises(replay.ServerClosed):
        writer.append({"x": 1})
    assert [int(client.sample_batch("t", 1, timeout=60).data["x"][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(replay.DeadlineExceededError):
        client.sample_batch("t", 1, timeout=0.2)
    assert client.server_info()["t"].rate_limiter_info.insert_stats.completed == 3


def test_clients_find_the_shortest_way():
    with replay.Server([table()]) as server:
        here = replay.Client(f"localhost:{server.port}")
        assert isinstance(here, replay.EmbeddedClient) and isinstance(here, replay.Client)
        away = replay.Client(f"localhost:{server.port}", local=False)
        assert isinstance(away, ServedClient) and isinstance(away, replay.Client)
        again = pickle.loads(pickle.dumps(away))
        assert again.server_info().keys() == {"t"}
        again.close()
        away.close()
        embedded = pickle.loads(pickle.dumps(server.localhost_client()))
        assert isinstance(embedded, replay.EmbeddedClient)
        assert embedded.server_address == away.server_address == f"localhost:{server.port}"
        embedded.server_info()
    alone = replay.EmbeddedClient([table()])
    with pytest.raises(TypeError, match="in this process only"):
        pickle.dumps(alone)
    with pytest.raises(ValueError, match="in this process only"):
        _ = alone.server_address


def test_interrupting_one_client_leaves_the_others_alone(connect, monkeypatch):
    monkeypatch.setattr(connection, "LAST_WORDS_S", 3600.0)  # It waits for the end that it has asked for.
    client = connect(table())
    other = client.server.localhost_client()
    waiting = Background(client.sample_batch, "t", 1)
    until(lambda: other.tables["t"].waiting.counts[SAMPLERS])
    client.interrupt()
    for call in (waiting.result, lambda: client.sample_batch("t", 1)):
        with pytest.raises(replay.ServerClosed):
            call()
    write(other.batch_writer(), 3)
    assert other.sample_batch("t", 2).data["x"].shape == (2,)


def test_an_interrupt_between_two_waits_of_a_writer_ends_the_next_one(monkeypatch):
    with replay.Server([replay.Table.queue("q", 2)]) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer(max_in_flight_items=1)
        rows = writer.append("s", {"x": np.arange(5)})
        receive = ReplayConnection.receive

        def receive_late(self, deadline, watch):
            if deadline is None:
                client.interrupt()
                deadline = time.monotonic() + 60.0  # so that a failure ends, too
            return receive(self, deadline, watch)

        monkeypatch.setattr(ReplayConnection, "receive", receive_late)
        begin = time.monotonic()
        with pytest.raises(replay.ServerClosed, match="interrupted"):
            writer.create_items("q", {"x": writer.slice("s", "x", rows)})
        assert time.monotonic() - begin < 30
        client.close()


def test_strangers_are_kept_out():
    with replay.Server([table()], curve=sockets.CurveKeys.generate()) as server:
        stranger = ServedClient(server.address, sockets.CurveKeys.generate(), reconnect_timeout=0.3)
        with pytest.raises(replay.ServerClosed):
            stranger.server_info()


def insert(column, index, lengths, written=(), released=()):
    """The message that inserts items of one column into table `t`."""
    layout = [[column], [["x", 0, column[1] > 1, False]], [["dict", ["x"], [None]]]]
    keys = np.ones(len(index), np.uint64)
    items = [["t", 0, index, lengths, keys, None, None]]
    message = {"op": "insert", "layouts": [[0, layout]], "items": items, "lease": {}}
    return {**message, "write": list(written), "release": list(released)}


def test_rows_of_others_are_refused():
    """What a broken or malicious client could send; ours never does."""
    with replay.Server([table()]) as server:
        good, bad = (ServedClient(server.address, local=False) for _ in range(2))
        write(good.batch_writer(), 5)
        with bad.borrow() as connection:
            connection.open()
            lease = {"op": "lease", "stream": "s", "n": 1}
            own = connection.request(lease)["rows"][0]
            none = np.zeros((0, 1), np.int64)
            for index, written, released in [
                (np.array([[0]]), [], []),
                (np.array([[10**9]]), [], []),
                (np.array([[-1]]), [], []),
                (np.array([[0, 1]]), [], []),
                (none, [["s", np.array([0]), {"x": np.array([7])}]], []),
                (none, [], [["s", np.array([0])]]),
                (none, [], [["s", np.array([[own, own]])]]),
            ]:
                with pytest.raises(ValueError, match=r"got|expected"):
                    connection.request(insert(["s", 1, False], index, None, written, released))
        assert good.server_info()["t"].current_size == 5
        assert set(good.sample_batch("t", 50).data["x"].tolist()) <= set(range(5))
        good.close()
        bad.close()


def test_items_without_the_lengths_of_their_layout_are_refused():
    """In the table they would be an error of every reader."""
    with replay.Server([table()]) as server, ServedClient(server.address, local=False) as client:
        write(client.batch_writer(), 5)
        with client.borrow() as connection:
            connection.open()
            rows = connection.request({"op": "lease", "stream": "s", "n": 2})["rows"]
            for ragged, lengths in ((True, None), (False, np.ones((1, 1), np.int32))):
                with pytest.raises(ValueError, match="lengths"):
                    connection.request(insert(["s", 2, ragged], rows[None], lengths))
        assert client.server_info()["t"].current_size == 5


def test_an_append_of_more_rows_than_half_of_the_largest_lease():
    with replay.Server([table()]) as server, ServedClient(server.address) as client:
        rows = client.batch_writer().append("s", {"x": np.zeros(600_000, np.int8)})
        assert len(np.unique(rows)) == 600_000


WRONG_SERVERS = {
    "one name twice": (lambda: replay.EmbeddedClient([table(), table()]), "'t'"),
    "open interface": (lambda: replay.Server([table()], address="tcp://0.0.0.0:*"), "keys"),
    "loopback": (
        lambda: replay.Server([table()], address="tcp://127.0.0.1:*"),
        "without keys, expected keys",
    ),
    "another host": (
        lambda: replay.Client("host:8000"),
        "'host:8000' without keys, expected 'localhost:8000'",
    ),
    "tcp without keys": (lambda: replay.Client("tcp://127.0.0.1:8000"), "without keys"),
    "port and address": (lambda: replay.Server([table()], port=1, address="tcp://127.0.0.1:*"), "one of"),
    "embedded port": (lambda: replay.Server([table()], port=1, embedded=True), "embedded"),
    "no port": (lambda: replay.Client("localhost"), "host:port"),
}


@pytest.mark.parametrize("name", WRONG_SERVERS)
def test_wrong_arguments(name):
    make, message = WRONG_SERVERS[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_server_without_keys_is_found_by_its_port_and_by_its_user_alone(host, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = replay.Client(f"{host}:8000")  # before there is a server
    call = Background(client.server_info)
    with replay.Server([table()], port=8000) as server:
        assert call.result().keys() == {"t"} and client._idle[0].mapped.local
        folder = pathlib.Path(server.address.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.parent == tmp_path
        client.close()
    folder.chmod(0o755)
    for make in (lambda: replay.Server([table()], port=8000), lambda: replay.Client("localhost:8000")):
        with pytest.raises(PermissionError, match="0755"):
            make()


def _serve(pipe, folder):
    tempfile.tempdir = folder
    server = replay.Server([table()], port=8000)
    pipe.send(server.address)
    pipe.recv()


def test_a_killed_server_does_not_keep_its_port_and_a_live_one_does(fork, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = fork(_serve, str(tmp_path))
    path = first.word().removeprefix("ipc://")
    with pytest.raises(OSError, match="localhost:8000: Address"):
        replay.Server([table()], port=8000)
    first.kill()
    assert os.path.exists(path)
    with replay.Server([table()], port=8000), replay.Client("localhost:8000", local=False) as client:
        assert client.server_info().keys() == {"t"}
    assert not os.path.exists(path)


def test_a_taken_port_is_an_error_and_leaves_nothing():
    with replay.Server([table()]) as server:
        own = pathlib.Path(server._store.allocator.directory)
        pattern = f"{own.name.rpartition('-')[0]}-*"  # of this process: others come and go
        before = set(own.parent.glob(pattern))
        with pytest.raises(OSError, match=r"[Aa]ddress"):
            replay.Server([table()], port=server.port)
        assert set(own.parent.glob(pattern)) == before >= {own}


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the option is Linux's")
def test_the_kernel_watches_every_connection_between_machines():
    """So that what a client of a machine that vanished held comes back."""
    with replay.Server([table()], curve=KEYS) as server:
        client = ServedClient(server.address, KEYS)
        client.server_info()
        watched = []
        for each in psutil.Process().net_connections("tcp4"):
            if each.raddr and server.port in (each.laddr.port, each.raddr.port):
                with socket.socket(fileno=os.dup(each.fd)) as end:
                    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
                    watched.append([end.getsockopt(socket.IPPROTO_TCP, option) for option in options])
        assert watched == [[30, 10, 60_000]] * 2
        client.close()


def test_embedded_servers_have_no_sockets():
    with replay.Server([table()], embedded=True) as server:
        assert server.port is None
        write(server.localhost_client().batch_writer(), 3)
        assert server.localhost_client().server_info()["t"].current_size == 3
        assert server.wait(0) is False
    assert server.wait(0) is True


def test_a_reader_goes_on_after_an_answer_that_is_too_large(monkeypatch):
    monkeypatch.setattr(operations, "_MAX_ANSWER_BYTES", 100)
    with replay.Server([table()]) as server:
        client = ServedClient(server.address, local=False)
        writer = client.batch_writer()
        write(writer, 5)
        writer.flush()
        with pytest.raises(ValueError, match="Ask for smaller batches"):
            client.sample_batch("t", 1000)
        assert client.sample_batch("t", 2).data["x"].shape == (2,)
        assert counts(client) == (5, 2)


def test_a_request_that_waits_ends_once_when_its_client_has_gone():
    """An answer that finds the client gone ends the session, and with it the other requests."""
    ended = []

    def steps(number):
        yield service.Request(number, None)
        try:
            while True:
                yield None
        finally:
            ended.append(number)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        server = service.Service(None, socket)
    session = service.ClientSession(b"gone")
    for number in range(2):
        assert server._begin(session, number, 0, steps(number)) is None
    server._send = lambda identity, answer, number: [
        server._end_request(other, None) for other in list(session.waiting)
    ]
    for request in list(session.waiting):
        server._end_request(request, replay.ServerClosed("the request was canceled by its client"))
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("how", ["too late", "Ctrl-C"])
def test_a_writer_whose_session_ended_in_a_call_touches_no_row_of_others(how, monkeypatch):
    def receive(deadline, watch):
        if how == "Ctrl-C" and deadline > time.monotonic() + 1.0:
            raise KeyboardInterrupt  # where it waits
        return False

    with replay.Server([table()]) as server:
        client, other = (ServedClient(server.address, local=True) for _ in range(2))
        ended, writer = client.batch_writer(), other.batch_writer()
        write(ended, 10)
        monkeypatch.setattr(ended._connection, "receive", receive)
        if how == "Ctrl-C":
            with pytest.raises(KeyboardInterrupt):
                ended.show()
        else:
            ended.show()  # for a reader, to whom it is no error
        until(lambda: num_rows(server._store) <= 10)  # The server takes the rows back.
        write(writer, 500, start=1000)
        writer.flush(timeout=60)
        with pytest.raises(replay.ServerLost, match="in the middle of a call"):
            ended.append("s", {"x": np.full(400, -1), "y": np.ones((400, 3), np.float32)})
        assert ended.close() == 10
        assert other.sample_batch("t", 2000, timeout=60).data["x"].min() >= 0
        client.close()
        other.close()


@pytest.mark.parametrize("use", ["sample", "ahead", "write"])
def test_an_interrupt_anywhere_leaves_a_client_that_works(use):
    """A writer goes on, or says that it has ended. Nothing is written twice."""
    with replay.Server([table()]) as server:
        client = ServedClient(server.address, local=False)
        writer, made = client.batch_writer(), 0

        def create():
            nonlocal made
            rows = writer.append("s", {"x": np.zeros((2, 4096))})  # in a frame of its own
            made += 2
            writer.create_items("t", {"x": writer.slice("s", "x", rows)})
            writer.release("s", rows)
            writer.flush(20)

        create()
        dataset = Dataset(client, "t", 2, prefetch=2 if use == "ahead" else 0)
        uses = {
            "sample": lambda: client.sample_batch("t", 2, 20),
            "ahead": lambda: next(dataset),
            "write": create,
        }
        files = ("replay/writer.py", "replay/writers.py", "datasets/dataset.py")
        files, at = (*files, "zmq/sugar/socket.py", "launch/locks.py"), 0
        files += tuple(f"remote/{name}.py" for name in ("client", "connection", "writer"))
        while interrupt(uses[use], at, *files):
            at += 1
            assert client.server_info(20)["t"].current_size <= made
            try:
                uses[use]()
            except replay.ServerLost:
                writer = client.batch_writer()
                create()
        assert at > 5
        dataset.close()
        client.close()


def test_a_request_that_ends_each_session_is_given_up(monkeypatch):
    with replay.Server([table()]) as server:
        client = ServedClient(server.address)

        def lose(connection, *_):
            connection.close()
            raise SessionLost

        with client.borrow() as connection:
            monkeypatch.setattr(ReplayConnection, "answer", lose)
            with pytest.raises(replay.ServerLost, match=r"info: (.*) 5 sessions in a row"):
                connection.call({"op": "info"})
            assert connection.session == 6
        client.close()
