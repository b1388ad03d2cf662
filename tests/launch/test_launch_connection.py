"""Clients of nodes that are restarted, here or elsewhere; waits, stops and cancels."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from background import Background, until

from launch import CallLost, CallTimeout, ClientClosed, ProgramStopped, directories
from launch.rpc import client, wire
from launch.rpc.client import Connection
from launch.rpc.server import RpcServer
from launch.rpc.shared_socket import SharedSocket
from launch.rpc.sockets import CurveKeys

PATIENCE = 30.0


class Service:
    def __init__(self, name: str) -> None:
        self._name = name
        self.entered = threading.Event()
        self.release = threading.Event()
        self.notes: list[int] = []

    def note(self, number: int) -> None:
        self.notes.append(number)

    def name(self) -> str:
        return self._name

    def hold(self) -> str:
        self.entered.set()
        self.release.wait(PATIENCE)
        return self._name

    def keep(self, values: list) -> list:
        return values


@pytest.fixture
def keys():
    return CurveKeys.generate()


@pytest.fixture
def serve(keys):
    servers = []

    def serve(name, address="tcp://127.0.0.1:*", **options):
        service = Service(name)
        servers.append((RpcServer(service, address, keys, name=name, **options).start(), service))
        return servers[-1]

    yield serve
    for server, service in servers:
        service.release.set()
        server.close()


@pytest.fixture
def stopped():
    return threading.Event()


@pytest.fixture
def connection(keys, stopped):
    connection = Connection(None, keys, name="node", max_in_flight=8, stopped=stopped)
    yield connection
    connection.close()


def test_calls_wait_until_the_node_is_somewhere(connection, serve):
    waiting = Background(connection.call, "name", (), {}, None)
    future = connection.submit("name", (), {}, None)
    assert not future.done() and not waiting.done()
    connection.move(serve("first")[0].address)
    assert waiting.result(PATIENCE) == future.result(PATIENCE) == "first"


@pytest.mark.parametrize("moment", ["_begin", "_look"])
def test_the_node_may_come_at_any_moment(connection, serve, monkeypatch, moment):
    address, work = serve("first")[0].address, getattr(client._Line, moment)

    def come_before(*args):
        connection.move(address)
        work(*args)

    monkeypatch.setattr(client._Line, moment, come_before)
    connection.probe_interval_s = 0.0
    assert connection.call("name", (), {}, PATIENCE) == "first"


@pytest.mark.parametrize("address", [None, "ipc:///nowhere/node"])
def test_no_idle_line_stays_where_the_node_was(connection, serve, address):
    connection.move(serve("first")[0].address)
    connection.call("name", (), {}, PATIENCE)
    connection.move(address)
    assert not connection._lines


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_move_to_where_nothing_can_be_ends_the_calls(connection, serve):
    server, service = serve("first")
    connection.move(server.address)
    future = connection.submit("hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    *_, thread = (each for each in threading.enumerate() if each.name == "futures-node")
    connection.move("ipc:///nowhere/node")
    assert isinstance(future.exception(PATIENCE), ClientClosed)
    thread.join(PATIENCE)  # It says why here, and not in the tests that follow.


def test_a_client_that_cannot_connect_leaves_no_file_open(keys, monkeypatch):
    opened, here = [], threading.get_ident()

    def record(make):
        def recording(*args, **options):
            made = make(*args, **options)
            if threading.get_ident() == here:  # Other tests may have left threads.
                opened.extend(made if isinstance(made, tuple) else [made])
            return made

        return recording

    monkeypatch.setattr(client.socket, "socketpair", record(client.socket.socketpair))
    monkeypatch.setattr(zmq.Context, "socket", record(zmq.Context.socket))
    with pytest.raises(ValueError, match="does not exist"):
        Connection("ipc:///nowhere/node", keys).call("name", (), {}, PATIENCE)
    assert all(each.closed if isinstance(each, zmq.Socket) else each.fileno() < 0 for each in opened)


def test_arguments_of_a_call_that_waits_are_copied(connection, serve):
    values = [1]
    future = connection.submit("keep", (values,), {}, None)
    values.append(2)
    connection.move(serve("first")[0].address)
    assert future.result(PATIENCE) == [1]


def test_futures_that_waited_count_when_the_node_has_them(connection, serve):
    """Who waits for room is not let in by the node's coming, only by an answer."""
    server, service = serve("first")
    for _ in range(8):
        connection.submit("hold", (), {}, None)
    ninth = Background(connection.submit, "name", (), {}, None)
    connection.move(server.address)
    assert service.entered.wait(PATIENCE)
    with pytest.raises(CallTimeout):
        connection.submit("name", (), {}, 0.3)
    assert not ninth.done()
    service.release.set()
    assert ninth.result(PATIENCE).result(PATIENCE) == "first"


def test_calls_that_waited_are_sent_in_order(connection, serve):
    server, service = serve("first", thread_pool_size=1)
    futures = [connection.submit("note", (number,), {}, None) for number in range(4)]
    connection.move(server.address)
    futures.append(connection.submit("note", (9,), {}, None))
    wait(futures, PATIENCE)
    assert service.notes == [0, 1, 2, 3, 9]


def test_a_cancelled_call_makes_room_and_is_not_made(connection, serve):
    futures = [connection.submit("note", (number,), {}, None) for number in range(8)]
    assert futures[3].cancel()
    futures.append(connection.submit("note", (8,), {}, PATIENCE))
    server, service = serve("first")
    connection.move(server.address)
    for future in futures[:3] + futures[4:]:
        future.result(PATIENCE)
    assert sorted(service.notes) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_future_that_waits_for_room_is_let_go_by_the_stop(connection, stopped):
    for _ in range(8):
        connection.submit("name", (), {}, None)
    ninth = Background(connection.submit, "name", (), {}, None)
    stopped.set()
    connection.stop()
    with pytest.raises(ProgramStopped):
        raise ninth.exception(PATIENCE) or ninth.result().exception(PATIENCE)


def test_a_move_loses_what_was_under_way_and_serves_what_comes(connection, serve):
    server, service = serve("first")
    connection.move(server.address)
    called = Background(connection.call, "hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    future = connection.submit("hold", (), {}, None)
    until(lambda: server.calls == 2)
    connection.move(None)
    later = connection.submit("name", (), {}, None)
    connection.move(serve("second")[0].address)
    assert isinstance(called.exception(PATIENCE), CallLost)
    assert isinstance(future.exception(PATIENCE), CallLost)
    assert later.result(PATIENCE) == "second"
    assert connection.call("name", (), {}, PATIENCE) == "second"


def test_a_node_that_comes_back_where_it_was_keeps_its_connections(connection, serve):
    server, service = serve("first")
    connection.move(server.address)
    called = Background(connection.call, "hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    connection.move(None)
    connection.move(server.address)
    service.release.set()
    assert called.result(PATIENCE) == "first"


def test_nobody_waits_for_ever(connection, stopped):
    with pytest.raises(CallTimeout, match=r"node\.name"):
        connection.call("name", (), {}, 0.05)
    assert isinstance(connection.submit("name", (), {}, 0.05).exception(PATIENCE), CallTimeout)
    waiting = Background(connection.call, "name", (), {}, None)
    future = connection.submit("name", (), {}, None)
    stopped.set()
    connection.stop()
    assert isinstance(waiting.exception(PATIENCE), ProgramStopped)
    assert isinstance(future.exception(PATIENCE), ProgramStopped)
    connection.probe_interval_s = PATIENCE
    with pytest.raises(ProgramStopped):
        connection.call("name", (), {}, 5.0)  # At once, not at the next look.


def test_closing_ends_calls_that_wait(connection):
    waiting = Background(connection.call, "name", (), {}, None)
    future = connection.submit("name", (), {}, None)
    connection.close()
    assert isinstance(waiting.exception(PATIENCE), ClientClosed)
    assert isinstance(future.exception(PATIENCE), ClientClosed)
    with pytest.raises(ClientClosed):
        connection.submit("name", (), {}, None)


# Restarts at the same address.


def test_a_call_is_not_lost_while_its_answer_is_on_its_way(connection, serve, impatient, monkeypatch):
    """A node that is asked for its calls between the end of one and its answer still has it."""
    server, _ = serve("first")
    send, told = server._socket.send, threading.Event()

    def send_late(frames):
        kind = frames[1][0]
        if kind == wire.REPLY:
            assert told.wait(PATIENCE)
        send(frames)
        if kind == wire.UNKNOWN:
            told.set()

    monkeypatch.setattr(server._socket, "send", send_late)
    connection.move(server.address)
    assert connection.call("name", (), {}, PATIENCE) == "first"


@pytest.fixture
def impatient(monkeypatch):
    """Clients ask every 50 ms which of their calls the node has."""
    monkeypatch.setattr(client.Connection, "probe_interval_s", 0.05)


@pytest.fixture
def address():
    folder = directories.make_private_directory()
    yield f"ipc://{folder}/node"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def connect(address, keys, stopped):
    made = []

    def connect(**options):
        made.append(Connection(address, keys, name="node", stopped=stopped, **options))
        return made[-1]

    yield connect
    for connection in made:
        connection.close()


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("waiting", [False, True], ids=["future", "waiting"])
def test_a_restart_loses_or_repeats_what_was_under_way(
    serve, connect, address, stopped, impatient, repeat, waiting
):
    connection = connect(repeat_lost=repeat)
    server, service = serve("first", address)
    if waiting:
        answer = Background(connection.call, "hold", (), {}, None)
    else:
        answer = connection.submit("hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    server.close()
    _, second = serve("second", address)
    if repeat:
        assert second.entered.wait(PATIENCE)
        second.release.set()
        assert answer.result(PATIENCE) == "second"
    else:
        assert isinstance(answer.exception(PATIENCE), CallLost)
    assert connection.call("name", (), {}, PATIENCE) == "second"


def test_arguments_of_a_repeated_call_are_those_it_was_made_with(serve, connect, address, impatient):
    class Keeper(Service):
        def hold_and_keep(self, values):
            self.hold()
            return values

    connection = connect(repeat_lost=True)
    keys = connection.curve
    first, second = Keeper("first"), Keeper("second")
    server = RpcServer(first, address, keys).start()
    values = np.zeros(100_000)
    answer = connection.submit("hold_and_keep", (values,), {}, None)
    assert first.entered.wait(PATIENCE)
    values += 1
    server.close()
    first.release.set()
    second.release.set()
    again = RpcServer(second, address, keys).start()
    assert not answer.result(PATIENCE).any()
    again.close()


def test_errors_of_the_node_are_not_repeated(serve, connect, address):
    serve("first", address)
    with pytest.raises(AttributeError, match="no method"):
        connect(repeat_lost=True).call("missing", (), {}, PATIENCE)


def test_after_the_stop_a_running_call_is_waited_for_and_a_lost_node_is_not(
    serve, connect, address, stopped, impatient
):
    server, service = serve("first", address)
    connection = connect()
    stopped.set()
    answer = Background(connection.call, "hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    assert answer.running(0.4)
    server.close()
    assert isinstance(answer.exception(PATIENCE), ProgramStopped)


def test_a_timeout_leaves_nothing_to_the_next_call(connect, address, stopped, impatient, serve):
    """Silence before the call must not count as silence after the stop."""
    connection = connect()
    with pytest.raises(CallTimeout):
        connection.call("name", (), {}, 0.5)  # It sends several probes.
    connection.probe_interval_s = 10.0
    stopped.set()
    waiting = Background(connection.call, "name", (), {}, PATIENCE)
    serve("first", address)
    assert waiting.result(PATIENCE) == "first"


def test_deadlines_of_threads_that_share_a_client(serve, connect, address, monkeypatch):
    monkeypatch.setattr(client.Connection, "probe_interval_s", 60.0)
    _, service = serve("first", address)
    connection = connect()
    receiving = Background(connection.call, "hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    began = time.monotonic()
    for timeout in (0.05, 0.3):
        with pytest.raises(CallTimeout, match=r"node\.hold"):
            connection.call("hold", (), {}, timeout)
    assert time.monotonic() - began < 30
    assert not receiving.done()


def test_threads_and_futures_use_a_client_together(serve, connect, address, monkeypatch):
    monkeypatch.setattr(client.Connection, "probe_interval_s", 60.0)
    serve("first", address)
    connection = connect()

    def work(number):
        for i in range(100):
            futures = [connection.submit("keep", ([number, i],), {}, PATIENCE) for _ in range(i % 3)]
            assert connection.call("keep", ([number, -i],), {}, PATIENCE) == [number, -i]
            for future in futures:
                assert future.result(PATIENCE) == [number, i]

    for worker in [Background(work, number) for number in range(6)]:
        worker.result(PATIENCE)


def test_a_client_closed_by_a_callback_of_its_future(serve, connect, address):
    serve("first", address)
    connection = connect()
    future = connection.submit("name", (), {}, None)
    closed = threading.Event()
    future.add_done_callback(lambda _: (connection.close(), closed.set()))
    assert closed.wait(PATIENCE)
    with pytest.raises(ClientClosed):
        connection.call("name", (), {}, None)


def test_a_cancelled_future_is_done_for_everybody(serve, connect, address):
    _, service = serve("first", address)
    connection = connect(max_in_flight=1)
    held = connection.submit("hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    assert held.cancel()
    assert wait([held], PATIENCE).done == {held}
    assert connection.call("name", (), {}, PATIENCE) == "first"  # there is room again


def test_closed_clients_leave_no_files_open(serve, connect, address):
    serve("first", address)

    def ask():
        connection = connect()
        assert connection.call("name", (), {}, PATIENCE) == "first"
        connection.close()

    ask()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        ask()
    deadline = time.monotonic() + PATIENCE
    while len(os.listdir("/proc/self/fd")) > before + 5 and time.monotonic() < deadline:
        time.sleep(0.05)  # ZeroMQ closes its own files a little later
    assert len(os.listdir("/proc/self/fd")) <= before + 5


def test_a_forked_child_makes_its_own_connection(serve, connect, address):
    serve("first", address)
    connection = connect()
    assert connection.call("name", (), {}, PATIENCE) == "first"
    for use in (connection.close, lambda: connection.call("name", (), {}, PATIENCE)):
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            os._exit(7 if use() in (None, "first") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert connection.call("name", (), {}, PATIENCE) == "first"


def test_a_closing_server_sends_the_answer_of_the_call_in_progress(serve, connect, address):
    """A call that stops the program is answered, although the stop closes the node that carries it out."""
    server, service = serve("first", address)
    answer = Background(connect().call, "hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    closing = Background(server.close)
    assert closing.running(0.2)
    service.release.set()
    assert answer.result(PATIENCE) == "first"
    closing.result(PATIENCE)


def test_a_closing_client_takes_the_answers_that_have_arrived(serve, connect, address):
    _, service = serve("first", address)
    connection = connect()
    entered, release = threading.Event(), threading.Event()

    def occupy(future):
        """Runs on the thread that receives, which meanwhile receives nothing."""
        entered.set()
        release.wait(PATIENCE)

    answers = [connection.submit("hold", (), {}, None) for _ in range(2)]
    for answer in answers:
        answer.add_done_callback(occupy)
    until(lambda: service.entered.is_set())
    service.release.set()
    assert entered.wait(PATIENCE)
    until(lambda: connection._line._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)
    connection.close()
    release.set()
    assert [answer.result(PATIENCE) for answer in answers] == ["first", "first"]


def test_a_send_that_finds_an_answer_wakes_the_receiver(monkeypatch):
    shared, woken = SharedSocket(SimpleNamespace(send=print, getsockopt=lambda _: zmq.POLLIN)), []
    monkeypatch.setattr(shared, "_wake", lambda: woken.append(True))
    shared.send([b"hello"])
    assert woken


def test_closing_ends_a_call_in_a_callback(serve, connect, address):
    """The callback runs on the receiving thread, which cannot end before the call in it."""
    connection = connect()
    errors: Future = Future()

    def call_again(future):
        try:
            connection.call("hold", (), {}, None)
        except BaseException as error:
            errors.set_result(error)

    first = connection.submit("keep", ([1],), {}, None)
    first.add_done_callback(call_again)  # Before there is an answer, or it would run on this thread.
    _, service = serve("first", address)
    assert service.entered.wait(PATIENCE)
    connection.close()
    assert isinstance(errors.result(PATIENCE), ClientClosed)
