"""The short way of waiting callers: streams, their door, and the falling back on the long way."""

from __future__ import annotations

import os
import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import launch as lp
from launch.rpc import client as client_module
from launch.rpc import door, sockets, stream, wire
from launch.rpc.client import Connection
from launch.rpc.server import Server

PATIENCE = 30.0
LARGE = 8 << 20  # bytes; more than a socket holds
LIMIT = 16 << 20


class Thing:
    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.release = threading.Event()

    def echo(self, value):
        return value

    def block(self):
        self.entered.release()
        return self.release.wait(PATIENCE)

    def large(self):
        return np.ones(LARGE, np.uint8)

    @lp.batched_handler(batch_size=2, timeout=0.01)
    def batched(self, sizes):
        return np.ones((len(sizes), int(sizes.max())), np.uint8)


@pytest.fixture
def keys():
    return sockets.CurveKeys.generate()


@pytest.fixture
def directory():
    path = sockets.make_private_directory()
    yield path
    sockets.remove_private_directory(path)


@pytest.fixture
def serve(keys, directory):
    """``serve(**options)`` → (object, server, connection); the address is always the same."""
    made = []

    def make(**options):
        thing = Thing()
        server = Server(thing, f"ipc://{directory}/n", keys, max_frame_bytes=LIMIT, **options).start()
        connection = Connection(server.address, keys, name="thing")
        made.append((thing, server, connection))
        return made[-1]

    yield make
    for thing, server, connection in made:
        thing.release.set()
        connection.close()
        server.close()


def ask(connection, value=1, timeout=PATIENCE):
    return connection.call("echo", (value,), {}, timeout)


def knock(server, keys, name=b"stranger"):
    here = stream.connect(stream.door(server.address), keys.token, name, LIMIT, PATIENCE)
    assert here is not None
    return here


def raw(server, keys):
    """A socket that has said hello and may now write anything."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE)
    sock.connect(stream.door(server.address))
    sock.sendall(b"launch-stream-1\n" + keys.token + os.urandom(8))
    return sock


def on_thread(function, *args):
    """``(thread, outcomes)`` of a call on a thread of its own."""
    outcomes = []

    def work():
        try:
            outcomes.append(function(*args))
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, outcomes


def test_waiting_calls_come_through_the_door(serve):
    _, server, connection = serve()
    for value in (1, b"x" * 300_000, np.arange(1_000_000), [np.ones(50_000)] * 700):
        np.testing.assert_equal(ask(connection, value), value)
    assert server._calls == 0 and server._door.calls == 4 == server.calls
    connection.submit("echo", (1,), {}, PATIENCE).result(PATIENCE)
    assert server._calls == 1 and server.calls == 5


def test_without_a_door_there_is_the_long_way(serve):
    _, server, connection = serve()
    os.unlink(stream.door(server.address))
    assert ask(connection, 3) == 3
    assert server._door.calls == 0


def test_a_path_too_long_has_no_door():
    assert stream.door("ipc:///" + "x" * 105) is None
    assert stream.door("ipc:///" + "x" * 104) == "/" + "x" * 104 + ".s"
    assert stream.door("tcp://127.0.0.1:5") is None


# Strangers and broken messages.

HELLOS = {
    "nothing": b"",
    "half": b"launch-stream-1\n",
    "wrong token": b"launch-stream-1\n" + b"0" * 64 + b"12345678",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n".ljust(stream.HELLO_BYTES, b"\n"),
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS.keys())
def test_strangers_are_cut_off_before_anything_is_read(serve, hello):
    _, server, connection = serve()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(stream.door(server.address))
        sock.sendall(hello)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert ask(connection) == 1
    assert server._door.refused == 1 and server.calls == 1 and server.malformed == 0


def test_a_client_of_another_program_is_refused(serve):
    _, server, _ = serve()
    other = Connection(server.address, sockets.CurveKeys.generate(), name="thing")
    with pytest.raises((lp.LaunchError, TimeoutError)):
        ask(other, timeout=1.0)
    assert server.calls == 0
    other.close()


def message(kind=wire.CALL, count=0, number=1, size=None, data=b"", rest=b""):
    return struct.pack("<BxHxxxxQQ", kind, count, number, len(data) if size is None else size) + data + rest


BROKEN = {
    "unknown kind": message(99),
    "a reply": message(wire.REPLY),
    "a pickle that is too large": message(size=LIMIT + 1),
    "a buffer that is too large": message(count=1, rest=struct.pack("<Q", LIMIT + 1)),
    "an absurd length": message(size=2**64 - 1),
    "very many buffers": message(count=0xFFFF, rest=bytes(8 * 0xFFFF)),
    "two messages at a time": message() + message(),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_message_ends_its_connection_and_no_other(serve, keys, data):
    _, server, connection = serve()
    assert ask(connection) == 1
    with raw(server, keys) as sock:
        try:
            sock.sendall(data)
            assert sock.recv(1) == b""
        except ConnectionError:
            pass  # cut off while it was still talking
    assert ask(connection) == 1
    assert server.malformed == 1


def test_a_message_that_breaks_off_harms_nobody(serve, keys):
    _, server, connection = serve()
    with raw(server, keys) as sock:
        sock.sendall(message(size=1000, data=b"only this"))
    assert ask(connection) == 1
    assert server.malformed == 0


NOT_CALLS = {
    "no pickle": b"\x80\x05junk",
    "not a call": b"N.",
    "class that is not here": b"cnowhere_at_all\nThing\n.",
}


@pytest.mark.parametrize("data", NOT_CALLS.values(), ids=NOT_CALLS.keys())
def test_content_that_makes_no_sense_is_answered_with_an_error(serve, keys, data):
    _, server, _ = serve()
    here = knock(server, keys)
    for number in (7, 8):  # the connection goes on
        here.send(wire.CALL, number, data, ())
        kind, answered, _, _ = here.receive()
        assert (kind, answered) == (wire.ERROR, number)
    here.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=64),
            st.builds(
                message,
                st.integers(0, 255),
                st.integers(0, 3),
                st.integers(0, 2**64 - 1),
                st.one_of(st.none(), st.integers(0, 2**64 - 1)),
                st.binary(max_size=32),
                st.binary(max_size=32),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_bytes_leave_the_server_alive(fuzzed, pieces):
    server, connection, keys = fuzzed
    with raw(server, keys) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
        except ConnectionError:
            pass  # cut off
    assert ask(connection, len(pieces)) == len(pieces)


@pytest.fixture(scope="module")
def fuzzed():
    keys, directory = sockets.CurveKeys.generate(), sockets.make_private_directory()
    server = Server(Thing(), f"ipc://{directory}/n", keys, max_frame_bytes=LIMIT).start()
    connection = Connection(server.address, keys)
    yield server, connection, keys
    connection.close()
    server.close()
    sockets.remove_private_directory(directory)


# Waiting, losing, stopping.


@pytest.fixture
def impatient(monkeypatch):
    """Clients ask after a twentieth of a second whether the node has their call."""
    monkeypatch.setattr(client_module, "PROBE_INTERVAL", 0.05)


def test_a_call_that_takes_long_is_asked_after_and_answered(serve, impatient):
    thing, server, connection = serve()
    thread, outcomes = on_thread(connection.call, "block", (), {}, None)
    assert thing.entered.acquire(timeout=PATIENCE)
    thread.join(0.5)  # several questions
    assert not outcomes
    thing.release.set()
    thread.join(PATIENCE)
    assert outcomes == [True]
    assert server.calls == 1  # asking is no call


@pytest.mark.parametrize("timeout", [0.02, 0.3, 1.2])
def test_timeout(serve, impatient, timeout):
    _, _, connection = serve()
    for _ in range(2):
        with pytest.raises(lp.CallTimeout, match=rf"thing\.block was not answered within {timeout} s"):
            connection.call("block", (), {}, timeout)
    assert ask(connection, "later") == "later"
    assert ask(connection, "in time", 0.9) == "in time"


def test_a_call_whose_connection_is_not_noticed_for_a_while_is_not_lost(serve, impatient, monkeypatch):
    """The node is busy: the thread that is asked runs, the one that lets callers in does not yet."""
    asked = threading.Semaphore(0)
    answer, admit = Server._answer_probe, stream.admit

    def answers(*args):
        answer(*args)
        asked.release()

    def admits(*args):
        assert all(asked.acquire(timeout=PATIENCE) for _ in range(3))
        return admit(*args)

    monkeypatch.setattr(Server, "_answer_probe", answers)
    monkeypatch.setattr(stream, "admit", admits)
    _, server, connection = serve()
    assert ask(connection, 3) == 3
    assert server._door.calls == 1


@pytest.mark.parametrize("room", [0, 2])
def test_callers_for_whom_there_is_no_room_go_the_long_way(serve, monkeypatch, room):
    monkeypatch.setattr(door, "_MAX_CONNECTIONS", room)
    thing, server, connection = serve()
    callers = [on_thread(connection.call, "block", (), {}, PATIENCE) for _ in range(6)]
    for _ in range(6):
        assert thing.entered.acquire(timeout=PATIENCE)
    thing.release.set()
    for thread, outcomes in callers:
        thread.join(PATIENCE)
        assert outcomes == [True]
    assert server._door.calls == room and server._calls == 6 - room


def test_a_restart_loses_the_calls_under_way(serve, impatient):
    thing, server, connection = serve()
    thread, outcomes = on_thread(connection.call, "block", (), {}, None)
    assert thing.entered.acquire(timeout=PATIENCE)
    server.close()
    serve()
    thread.join(PATIENCE)
    assert isinstance(outcomes[0], lp.CallLost)
    assert ask(connection, 3) == 3


def test_idle_connections_to_a_former_life_are_replaced(serve):
    _, server, connection = serve()
    assert ask(connection) == 1
    server.close()
    thread, outcomes = on_thread(ask, connection, 2)  # waits for the next life
    thread.join(0.2)
    assert not outcomes
    serve()
    thread.join(PATIENCE)
    assert outcomes == [2]


def test_a_node_that_is_gone_is_not_waited_for_after_the_stop(keys, directory, impatient):
    thing, stopped = Thing(), threading.Event()
    server = Server(thing, f"ipc://{directory}/n", keys).start()
    connection = Connection(server.address, keys, stopped=stopped)
    thread, outcomes = on_thread(connection.call, "block", (), {}, None)
    assert thing.entered.acquire(timeout=PATIENCE)
    server.close()
    thread.join(0.5)
    assert not outcomes  # it may come back
    stopped.set()
    thread.join(PATIENCE)
    assert isinstance(outcomes[0], lp.ProgramStopped)
    thing.release.set()
    connection.close()


def test_a_call_that_still_runs_is_waited_for_after_the_stop(keys, directory, impatient):
    thing, stopped = Thing(), threading.Event()
    stopped.set()
    server = Server(thing, f"ipc://{directory}/n", keys).start()
    connection = Connection(server.address, keys, stopped=stopped)
    thread, outcomes = on_thread(connection.call, "block", (), {}, None)
    assert thing.entered.acquire(timeout=PATIENCE)
    thread.join(0.5)
    assert not outcomes
    thing.release.set()
    thread.join(PATIENCE)
    assert outcomes == [True]
    connection.close()
    server.close()


def test_a_node_that_does_not_read_is_a_timeout(keys, directory, impatient):
    address = f"ipc://{directory}/n"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(stream.door(address))
        deaf.listen()
        connection = Connection(address, keys, name="deaf")
        with pytest.raises(lp.CallTimeout, match=r"deaf\.echo"):
            ask(connection, np.zeros(LARGE, np.uint8), 0.3)
        connection.close()


def test_closing_the_client_ends_its_calls(serve, impatient):
    thing, _, connection = serve()
    thread, outcomes = on_thread(connection.call, "block", (), {}, None)
    assert thing.entered.acquire(timeout=PATIENCE)
    connection.close()
    thread.join(PATIENCE)
    assert isinstance(outcomes[0], lp.ClientClosed)
    with pytest.raises(lp.ClientClosed):
        ask(connection)


def test_more_callers_than_threads_wait_their_turn(serve):
    thing, _, connection = serve(max_threads=3)
    callers = [on_thread(connection.call, "block", (), {}, None) for _ in range(6)]
    for _ in range(3):
        assert thing.entered.acquire(timeout=PATIENCE)
    assert not thing.entered.acquire(timeout=0.1)
    thing.release.set()
    for thread, outcomes in callers:
        thread.join(PATIENCE)
        assert outcomes == [True]


def test_a_caller_that_does_not_read_holds_up_nobody(serve, keys):
    _, server, connection = serve()
    for method in ("large", "batched"):
        here = knock(server, keys, method.ljust(8).encode())
        data, _ = wire.encode((method, (LARGE,) if method == "batched" else (), {}))
        here.send(wire.CALL, 1, data, ())
        assert connection.call("batched", (5,), {}, PATIENCE).sum() in (5, LARGE)  # alone, or beside it
        assert connection.call("batched", (5,), {}, PATIENCE).sum() == 5
        assert ask(connection) == 1
        kind, _, body, frames = here.receive()  # late, but all of it
        assert kind == wire.REPLY and wire.load(body, frames).sum() == LARGE
        here.close()


def test_a_forked_child_does_not_read_its_parents_answers(serve):
    _, _, connection = serve()
    assert ask(connection) == 1
    assert len(connection._callers._stock) == 1
    child = os.fork()
    if child == 0:
        os._exit(len(connection._callers._stock))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(connection, 2) == 2
