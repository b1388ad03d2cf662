"""Clients of nodes that come back elsewhere, and calls that are made again."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

import pytest

from launch import CallLost, CallTimeout, ClientClosed, ProgramStopped
from launch.rpc import moving
from launch.rpc.moving import MovingConnection
from launch.rpc.repeating import repeating
from launch.rpc.server import Server
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

    def serve(name):
        service = Service(name)
        servers.append((Server(service, "tcp://127.0.0.1:*", keys, name=name).start(), service))
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
    connection = MovingConnection(None, keys, name="node", max_in_flight=8, stopped=stopped)
    yield connection
    connection.close()


def in_background(fn, *args):
    """A future of ``fn(*args)`` on a thread of its own."""
    future: Future = Future()

    def run():
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_calls_wait_until_the_node_is_somewhere(connection, serve):
    waiting = in_background(connection.call, "name", (), {}, None)
    future = connection.submit("name", (), {}, None)
    assert not future.done() and not waiting.done()
    connection.move(serve("first")[0].address)
    assert waiting.result(PATIENCE) == future.result(PATIENCE) == "first"


def test_arguments_of_a_call_that_waits_are_copied(connection, serve):
    values = [1]
    future = connection.submit("keep", (values,), {}, None)
    values.append(2)
    connection.move(serve("first")[0].address)
    assert future.result(PATIENCE) == [1]


def test_futures_that_wait_for_the_node_are_bounded(connection, serve, stopped):
    futures = [connection.submit("name", (), {}, None) for _ in range(8)]
    ninth = in_background(connection.submit, "name", (), {}, None)
    with pytest.raises(CallTimeout):
        connection.submit("name", (), {}, 0.05)
    assert not ninth.done()
    connection.move(serve("first")[0].address)
    assert {future.result(PATIENCE) for future in [*futures, ninth.result(PATIENCE)]} == {"first"}


def test_futures_that_waited_count_when_the_node_has_them(connection, serve):
    """Who waits for room is not let in by the node's coming, only by an answer."""
    server, service = serve("first")
    held = [connection.submit("hold", (), {}, None) for _ in range(8)]
    ninth = in_background(connection.submit, "name", (), {}, None)
    connection.move(server.address)
    assert service.entered.wait(PATIENCE)
    with pytest.raises(CallTimeout):
        connection.submit("name", (), {}, 0.3)
    assert not ninth.done()
    assert not held[0].cancel(), "the node has it"
    service.release.set()
    assert ninth.result(PATIENCE).result(PATIENCE) == "first"


def test_calls_that_come_with_the_node_do_not_overtake_those_that_waited(connection, monkeypatch):
    numbers = []

    class Slow:
        """A node whose first call lets another thread make one at that moment."""

        def __init__(self, *args, **options):
            pass

        def submit(self, method, args, kwargs, timeout):
            numbers.append(args[0])
            if len(numbers) == 1:
                late.append(in_background(connection.submit, method, (9,), {}, None))
                wait(late, 0.2)
            future: Future = Future()
            future.set_result(None)
            return future

        def close(self):
            pass

    late: list = []
    monkeypatch.setattr(moving, "Connection", Slow)
    for number in range(4):
        connection.submit("note", (number,), {}, None)
    connection.move("somewhere")
    late[0].result(PATIENCE).result(PATIENCE)
    assert numbers == [0, 1, 2, 3, 9]


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
    ninth = in_background(connection.submit, "name", (), {}, None)
    stopped.set()
    connection.stop()
    with pytest.raises(ProgramStopped):
        raise ninth.exception(PATIENCE) or ninth.result().exception(PATIENCE)


def test_a_move_loses_what_was_under_way_and_serves_what_comes(connection, serve):
    server, service = serve("first")
    connection.move(server.address)
    called = in_background(connection.call, "hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    future = connection.submit("hold", (), {}, None)
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
    called = in_background(connection.call, "hold", (), {}, None)
    assert service.entered.wait(PATIENCE)
    connection.move(None)
    connection.move(server.address)
    service.release.set()
    assert called.result(PATIENCE) == "first"


def test_nobody_waits_for_ever(connection, stopped):
    with pytest.raises(CallTimeout, match=r"node\.name"):
        connection.call("name", (), {}, 0.05)
    assert isinstance(connection.submit("name", (), {}, 0.05).exception(PATIENCE), CallTimeout)
    waiting = in_background(connection.call, "name", (), {}, None)
    future = connection.submit("name", (), {}, None)
    stopped.set()
    connection.stop()
    assert isinstance(waiting.exception(PATIENCE), ProgramStopped)
    assert isinstance(future.exception(PATIENCE), ProgramStopped)


def test_closing_ends_calls_that_wait(connection):
    waiting = in_background(connection.call, "name", (), {}, None)
    future = connection.submit("name", (), {}, None)
    connection.close()
    assert isinstance(waiting.exception(PATIENCE), ClientClosed)
    assert isinstance(future.exception(PATIENCE), ClientClosed)
    with pytest.raises(ClientClosed):
        connection.submit("name", (), {}, None)


class Losing:
    """A node that loses so many calls before it answers."""

    def __init__(self, losses, then="answer"):
        self.calls = []
        self._losses, self._then = losses, then

    def call(self, method, args, kwargs, timeout):
        self.calls.append((method, args, kwargs, timeout))
        if len(self.calls) <= self._losses:
            raise CallLost("lost")
        if isinstance(self._then, Exception):
            raise self._then
        return self._then

    def submit(self, *call):
        future: Future = Future()
        try:
            future.set_result(self.call(*call))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_lost_calls_are_made_again(losses):
    node = Losing(losses)
    call, submit = repeating(node.call, node.submit)
    assert call("add", (1,), {"b": 2}, 5.0) == "answer"
    assert node.calls == [("add", (1,), {"b": 2}, 5.0)] * (losses + 1)
    node = Losing(losses)
    call, submit = repeating(node.call, node.submit)
    assert submit("add", (1,), {}, None).result(PATIENCE) == "answer"
    assert len(node.calls) == losses + 1


def test_other_errors_are_not_repeated():
    node = Losing(1, then=ValueError("no"))
    call, submit = repeating(node.call, node.submit)
    with pytest.raises(ValueError, match="no"):
        call("add", (), {}, None)
    assert isinstance(submit("add", (), {}, None).exception(PATIENCE), ValueError)
    assert len(node.calls) == 3
