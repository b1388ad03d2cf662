"""The event loop and the client's connection, with a handler that has nothing to do with replay."""

import contextlib
import os
import resource
import socket
import threading
import time

import numpy as np
import pytest
from background import Background, until
from served_table import KEYS

from framework.replay import wire
from framework.replay.errors import DeadlineExceededError, ServerClosed
from framework.replay.remote.pool import ConnectionPool
from framework.replay.server import service
from launch.rpc import sockets

STRANGE = {"object": object(), "number": 1 << 70, "text": "\ud800", "objects": np.array([object()])}


class Gate:
    """Answers "echo" at once; "pass" waits at the gate for one token, or for as many as it says."""

    def __init__(self):
        self.tokens = self.late = 0
        self.ended = threading.Event()
        self.waiting = threading.Event()
        names = ("echo", "sync", "post", "pass", "crash", "strange", "defect at once", "defect later")
        self.operations = dict.fromkeys((*names, "field"), self.handle)

    def open(self, session, hello):
        return {"name": "gate"}

    def close(self, session):
        self.ended.set()

    def handle(self, session, message):
        match message["op"]:
            case "echo" | "sync":
                return {"value": message.get("value")}
            case "post":
                until(lambda: self.service._socket.poll(0) or not message.get("followed"))
                self.tokens += message["tokens"]
                self.service.wake()
                return {}
            case "pass":
                self.waiting.set()
                return self.steps(message["timeout"], message.get("tokens", 1))
            case "crash":
                raise SystemExit("the handler broke")
            case "strange":
                return {"value": STRANGE[message["kind"]]}
            case "defect at once":
                raise RuntimeError("a mistake of ours")
            case "defect later":
                return self.fail_later()
            case "field":
                return {"value": [][message["value"]]}

    def fail_later(self):
        yield service.Request("gate", None)
        yield None
        raise RuntimeError("a mistake of ours")

    def steps(self, timeout, tokens):
        yield service.Request("gate", timeout)
        while self.tokens < tokens:
            # They come when nobody waits, so nobody calls `wake`.
            self.tokens, self.late = self.tokens + self.late, 0
            self.service.has_room(1 << 16)
            yield None
        self.tokens -= tokens
        yield {"passed": True}


@pytest.fixture
def gate(tmp_path):
    handler = Gate()
    tmp_path.chmod(0o700)
    listener = sockets.make_server_socket(f"ipc://{tmp_path}/gate", None)
    handler.failures = []
    server = service.Service(handler, listener, handler.failures.append)
    handler.address = sockets.bound_address(listener)
    handler.service = server
    server.thread.start()
    yield handler
    server.stop()


@pytest.fixture
def channel(gate):
    channel = ConnectionPool(gate.address, reconnect_timeout=10)
    yield channel
    channel.close()


def wait_to_pass(channel, gate):
    """A request that the handler has taken and that waits for a token."""
    gate.waiting.clear()
    call = Background(lambda: channel.call({"op": "pass"}, wait=True))
    assert gate.waiting.wait(60)
    return call


def test_errors_come_back_and_the_server_goes_on(channel):
    with pytest.raises(ValueError, match="got 'dance', expected an operation"):
        channel.call({"op": "dance"})
    assert channel.call({"op": "echo", "value": 1})["value"] == 1


@pytest.mark.parametrize("kind", STRANGE)
def test_an_answer_that_cannot_be_sent_is_an_error_of_its_request_only(gate, channel, kind):
    other = ConnectionPool(gate.address)
    assert other.call({"op": "echo", "value": 1})["value"] == 1
    with pytest.raises(TypeError, match="cannot be sent"):
        channel.call({"op": "strange", "kind": kind}, timeout=10)
    for each in (channel, other):
        assert each.call({"op": "echo", "value": 2})["value"] == 2
    other.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "ipc"])
def test_the_address_is_free_when_stop_returns(address, tmp_path):
    tmp_path.chmod(0o700)
    keys = None if address == "ipc" else KEYS
    address = f"ipc://{tmp_path}/socket" if address == "ipc" else address
    client, bound = None, set()
    for _ in range(50):
        listener = sockets.make_server_socket(address, keys)
        address = sockets.bound_address(listener)
        bound.add(address)
        server = service.Service(Gate(), listener)
        server.thread.start()
        client = client or ConnectionPool(address, keys)
        with contextlib.suppress(ServerClosed):  # that the last one has stopped
            client.call({"op": "echo", "value": 1}, timeout=60)
        server.stop()
    client.close()
    assert len(bound) == 1


def test_timeouts(channel):
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        channel.call({"op": "pass"}, timeout=0, wait=True)
    assert time.monotonic() - begin < 20
    with pytest.raises(DeadlineExceededError):
        channel.call({"op": "pass"}, timeout=0.1, wait=True)
    assert 0.1 <= time.monotonic() - begin < 20


def test_a_change_between_the_first_look_and_the_wait_is_seen(gate, channel):
    gate.late = 1
    assert channel.call({"op": "pass"}, 10, wait=True)["passed"]


def test_waiting_requests_go_through_in_line(gate):
    order, waits = [], []
    for number in range(5):
        channel = ConnectionPool(gate.address)
        gate.waiting.clear()

        def wait(channel=channel, number=number):
            channel.call({"op": "pass"}, wait=True)
            order.append(number)
            with channel.borrow() as mine:
                mine.post({"op": "post", "tokens": 1})  # lets the next one in

        waits.append(Background(wait))
        assert gate.waiting.wait(60)
    gate.tokens += 1
    gate.service.wake()
    for call in waits:
        call.result()
    assert order == [0, 1, 2, 3, 4]


def test_a_request_waits_for_the_one_before_it_and_goes_on_when_that_is_canceled(gate, channel):
    gate.tokens = 1
    with channel.borrow() as first:
        first.open()
        first.post({"op": "pass", "tokens": 2, "timeout": None})
        assert gate.waiting.wait(60)
        with pytest.raises(DeadlineExceededError):
            channel.call({"op": "pass"}, timeout=0.2, wait=True)
        gate.waiting.clear()
        result = Background(channel.call, {"op": "pass"}, 60, True)
        assert gate.waiting.wait(60)
        first.post({"op": "cancel"})
        assert result.result()["passed"]
    assert not gate.service._deadlines


def test_a_request_that_can_be_carried_out_is_answered_before_a_later_sync(gate, channel):
    with channel.borrow() as mine:
        mine.open()
        passed = mine.post({"op": "pass", "timeout": None})
        assert gate.waiting.wait(60)
        mine.post({"op": "post", "tokens": 1, "followed": True})
        mine.request({"op": "sync"}, timeout=60)
        assert mine.answers[passed]["passed"]


def test_a_second_hello_ends_the_session_of_the_first(gate, channel):
    with channel.borrow() as mine:
        mine.open()
        mine.post({"op": "hello", "protocol": wire.PROTOCOL})
        assert gate.ended.wait(10)


def test_the_last_message_of_a_server_is_heard_after_the_end_of_the_connection(gate, channel):
    with channel.borrow() as mine:
        mine.open()
        gate.service.stop()
        until(lambda: mine._monitor.poll(0))
        with pytest.raises(ServerClosed, match="has stopped"):
            mine.receive(time.monotonic() + 10, True)


def test_interrupt_wakes_waits_but_not_calls_that_need_not_wait(gate, channel):
    call = wait_to_pass(channel, gate)
    channel.interrupt()
    with pytest.raises(ServerClosed, match="interrupted"):
        call.result()
    assert channel.call({"op": "echo", "value": 1})["value"] == 1
    with pytest.raises(ServerClosed, match="interrupted"):
        channel.call({"op": "pass"}, wait=True)


def test_the_end_of_a_connection_ends_its_session_alone(gate, channel):
    """Its descriptor soon is that of the next one."""
    with channel.borrow() as idle:
        idle.open()
        for _ in range(10):
            other = ConnectionPool(gate.address)
            for value in range(2):
                assert other.call({"op": "echo", "value": value}, timeout=60)["value"] == value
            other.close()
            assert gate.ended.wait(60)
            gate.ended.clear()
        assert not idle._socket.poll(0)
        assert idle.request({"op": "echo", "value": 1})["value"] == 1


def test_the_last_messages_of_a_connection_are_heard_after_its_end(gate, channel, monkeypatch):
    receive = gate.service._receive

    def late():
        until(lambda: gate.service._monitor.poll(0))
        gate.service._read_events()
        gate.service._receive = receive

    with channel.borrow() as mine:
        mine.open()
        monkeypatch.setattr(gate.service, "_receive", late)
        mine.post({"op": "post", "tokens": 5})
        mine.close()
    assert gate.ended.wait(10) and gate.tokens == 5


@pytest.mark.parametrize("how", ["canceled", "gone", "cut off at once", "cut off later"])
def test_a_waiting_request_that_is_not_wanted_any_more_takes_nothing(gate, channel, how):
    if how == "canceled":
        call = wait_to_pass(channel, gate)
        channel.interrupt()
        with pytest.raises(ServerClosed):
            call.result()
    else:
        with channel.borrow() as mine:
            mine.open()
            (slow,) = ((key, session.descriptor) for key, session in gate.service._sessions.items())
            if how == "cut off at once":  # in a step of its own request
                gate.service._unread.has_room = lambda size: (False, slow)
            mine.post({"op": "pass", "timeout": None})
            assert gate.waiting.wait(60)
            if how == "cut off later":
                gate.service._unread.has_room = lambda size: (False, slow)
                gate.service.wake()
            elif how == "gone":
                mine.close()
            assert gate.ended.wait(60)
    gate.tokens += 1
    gate.service.wake()
    other = ConnectionPool(gate.address)
    assert other.call({"op": "pass"}, timeout=60, wait=True)["passed"]


def test_garbage_is_counted_and_ignored(gate, channel):
    stranger = sockets.make_client_socket(gate.address, None)
    stranger.send_multipart([b"\xc1garbage"])
    stranger.send_multipart(wire.encode({"op": "echo", "value": 1, "id": 1}))  # no hello before
    assert stranger.poll(5000)
    assert wire.decode(stranger.recv_multipart())["notice"] == "lost"
    assert gate.service.malformed == 1
    assert channel.call({"op": "echo", "value": 1})["value"] == 1
    stranger.close(linger=0)


def test_a_process_without_files_refuses_connections_says_so_once_and_serves_on(gate, channel, caplog):
    assert channel.call({"op": "echo", "value": 1})["value"] == 1
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as peers:
        unused = sorted({*range(limits[0])} - {*map(int, os.listdir("/dev/fd"))})
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused[400], limits[1]))
        peers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while gate.service.refused < 20:
            stranger = peers.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect(gate.address.removeprefix("ipc://"))
            time.sleep(0.001)  # not all at once
        assert channel.call({"op": "echo", "value": 2})["value"] == 2
    assert caplog.text.count("New connections are refused") == 1 and gate.service.error is None
    other = ConnectionPool(gate.address)
    assert other.call({"op": "echo", "value": 3}, timeout=60)["value"] == 3
    other.close()


@pytest.mark.parametrize("op", ["defect at once", "defect later"])
def test_a_mistake_of_ours_is_logged_answered_and_ends_the_service_if_it_repeats(gate, channel, op, caplog):
    for time_of_it in range(1, 3):
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            channel.call({"op": op}, timeout=60, wait=True)
        assert channel.call({"op": "echo", "value": 1})["value"] == 1
        assert gate.service.defects.count == time_of_it
    assert gate.service.error is None
    with pytest.raises((RuntimeError, ServerClosed)):
        channel.call({"op": op}, timeout=60, wait=True)
    gate.service.thread.join(60)
    assert "a mistake of ours" in str(gate.service.error)
    assert gate.failures == [gate.service.error]
    assert gate.service.malformed == 0
    assert caplog.text.count("Traceback") == 4  # each time, and at the end
    assert "in fail_later" in caplog.text or "in handle" in caplog.text


def test_a_mistake_of_ours_that_no_request_gets_is_not_malformed_either(gate, channel, caplog):
    """The session ends when its client says hello again."""
    gate.close = {}.__getitem__  # KeyError: a client's message may cause it only in its own fields
    for _ in range(3):
        channel.call({"op": "echo", "value": 1}, timeout=60)
        with channel.borrow() as mine:
            mine.post({"op": "hello"})
    gate.service.thread.join(60)
    assert isinstance(gate.service.error, KeyError)
    assert gate.service.malformed == 0
    assert "in _close" in caplog.text


def test_no_request_with_invalid_fields_is_a_defect(gate, channel):
    for value in [0, "text", None, 1 << 70, [], {}]:
        with pytest.raises((IndexError, TypeError)):
            channel.call({"op": "field", "value": value}, timeout=60)
    assert gate.service.defects.count == 0
    assert channel.call({"op": "echo", "value": 1})["value"] == 1


def test_an_error_of_the_loop_reaches_every_client(gate, channel):
    waiting = ConnectionPool(gate.address)
    call = wait_to_pass(waiting, gate)
    with pytest.raises(ServerClosed):
        channel.call({"op": "crash"}, timeout=60)
    with pytest.raises(ServerClosed, match="the handler broke"):
        call.result()
    gate.service.thread.join(60)
    assert isinstance(gate.service.error, SystemExit)


def test_a_restarted_server_is_found_again(gate, channel):
    assert channel.call({"op": "echo", "value": 1})["value"] == 1
    gate.service.stop()
    with pytest.raises(ServerClosed):
        channel.call({"op": "echo", "value": 1})
    again = service.Service(Gate(), sockets.make_server_socket(gate.address, None))
    again.thread.start()

    def answers():
        with contextlib.suppress(ServerClosed):  # until the socket has found it
            return channel.call({"op": "echo", "value": 2})["value"] == 2

    try:
        until(answers, timeout=10)
    finally:
        again.stop()


def test_nobody_there(tmp_path):
    tmp_path.chmod(0o700)
    channel = ConnectionPool(f"ipc://{tmp_path}/nobody", reconnect_timeout=0.2)
    with pytest.raises(ServerClosed, match="no replay server answered"):
        channel.call({"op": "echo", "value": 1})
