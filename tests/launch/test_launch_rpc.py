"""Calls between processes, here with both ends in one: answers and losses."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import os
import socket
import sys
import threading

import numpy as np
import pytest
import slow_package
from background import until
from interrupts import interrupt
from served_thing import PATIENCE, Thing, Wordless, ask

import launch as lp
from launch.rpc import wire
from launch.rpc.client import Connection
from launch.rpc.server import RpcServer

VALUES = {
    "none": None,
    "scalars": [1, 2.5, "text", b"bytes", True],
    "empty array": np.zeros((0, 3)),
    "small array": np.arange(12).reshape(3, 4),
    "large array": np.arange(500_000, dtype=np.float32),
    "fortran order": np.asfortranarray(np.arange(200_000.0).reshape(400, 500)),
    "strided": np.arange(400_000)[::2],
    "strided small array": np.arange(6).reshape(2, 3)[:, ::2],
    "array of text": np.array("text"),
    "scalar of numpy": np.float32(2.5),
    "big bytes": os.urandom(300_000),
    "function": lambda x: x + 1,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_values_come_back_equal(served, value):
    _, _, connection = served
    for back in (ask(connection, value), connection.submit("echo", (value,), {}, PATIENCE).result(PATIENCE)):
        if callable(value):
            assert back(1) == value(1)
        else:
            np.testing.assert_equal(back, value)
        if isinstance(value, np.ndarray):
            assert back.dtype == value.dtype
            assert back.flags.writeable


def test_keyword_arguments(served):
    assert served[2].call("echo", (), {"a": 1}, PATIENCE) == {"a": 1}


def test_arguments_of_futures_are_taken_at_once(served):
    _, _, connection = served
    futures = []
    array = np.zeros(50_000)
    for i in range(20):
        array[:] = i
        futures.append(connection.submit("echo", (array,), {}, PATIENCE))
    array[:] = -1
    for i, future in enumerate(futures):
        assert (future.result(PATIENCE) == i).all()


def test_answers_are_taken_before_the_object_goes_on(served):
    for _ in range(20):
        answer = served[2].call("hand_out", (), {}, PATIENCE)
        assert len(np.unique(answer)) <= 2  # the copy may meet the first scribble, but never a later one
        before = answer.copy()
        ask(served[2], 0)
        np.testing.assert_array_equal(answer, before)


def test_answer_that_cannot_be_sent_is_an_error(served):
    with pytest.raises(TypeError, match="pickle"):
        served[2].call("unpicklable", (), {}, PATIENCE)


def throw_picky():
    class Picky(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} {two}")

    raise Picky("so", "picky")


def throw_unknown():
    class Odd(Exception):
        def __reduce__(self):
            return importlib.import_module, ("only_there",)

    raise Odd("a strange thing")


def throw_frozen():
    raise dataclasses.make_dataclass("Frozen", ["one"], bases=(Exception,), frozen=True)("as ice")


@pytest.mark.parametrize(
    ("throw", "text"),
    [
        (throw_picky, "Picky: so picky"),
        (throw_unknown, "Odd: a strange thing"),
        (throw_frozen, "Frozen: as ice"),
    ],
)
def test_an_error_that_cannot_be_made_again_is_told_as_text(served, throw, text):
    with pytest.raises(lp.RemoteError, match=text) as caught:
        served[2].call("do", (throw,), {}, PATIENCE)
    assert "in throw_" in str(caught.value.__cause__)


def throw_unprintable():
    raise SyntaxError("strange", ("file", 1, 2, 3))


def test_an_error_that_cannot_be_printed_is_an_answer(served):
    for method, args, kind in 2 * [("fail", (), Wordless), ("do", (throw_unprintable,), SyntaxError)]:
        with pytest.raises(kind) as error:
            served[2].call(method, args, {}, PATIENCE)
        assert "raise" in str(error.value.__cause__)


def test_a_call_whose_answer_fails_is_lost_and_costs_no_thread(keys, directory, monkeypatch, caplog):
    server = RpcServer(Thing(), f"ipc://{directory}/s", keys, name="thing", thread_pool_size=2).start()
    connection = Connection(server.address, keys, name="thing")
    describe = wire.describe_error

    def fail(error):
        raise MemoryError("no room for a description")

    try:
        monkeypatch.setattr(wire, "describe_error", fail)
        for _ in range(4):  # more than the server has threads, and than a mistake of ours may happen
            with pytest.raises(lp.CallLost):
                connection.call("fail", (), {}, PATIENCE)
        monkeypatch.setattr(wire, "describe_error", describe)
        assert ask(connection, 1) == 1
        assert "node 'thing': the answer to a message failed" in caplog.text
        assert "no room for a description" in caplog.text
    finally:
        connection.close()
        server.close()


def test_argument_that_cannot_be_sent_is_an_error_at_once(served):
    for call in (served[2].call, served[2].submit):
        with pytest.raises(TypeError, match="pickle"):
            call("echo", (threading.Lock(),), {}, PATIENCE)


def test_more_blocking_calls_than_threads_wait_their_turn(keys, directory):
    thing = Thing()
    server = RpcServer(thing, f"ipc://{directory}/s", keys, thread_pool_size=3).start()
    connection = Connection(server.address, keys)
    futures = [connection.submit("block", (), {}, None) for _ in range(6)]
    for _ in range(3):
        assert thing.entered.acquire(timeout=PATIENCE)
    thing.release.set()
    assert all(future.result(PATIENCE) for future in futures)
    assert ask(connection, 1) == 1
    connection.close()
    server.close()


HALF_MADE = """
import pathlib
seen = pathlib.Path(__file__).with_name("seen")
if not seen.exists():
    seen.touch()
    raise ERROR
class Thing:
    pass
"""


@pytest.mark.parametrize(
    "error", [ImportError("from partially initialized module"), KeyError("half_made")], ids=repr
)
def test_a_module_that_another_thread_was_just_importing_is_there_at_the_second_look(
    tmp_path, monkeypatch, error
):
    """Threads that import parts of one package at the same time get such errors."""
    monkeypatch.delitem(sys.modules, "half_made", raising=False)
    (tmp_path / "half_made.py").write_text(HALF_MADE.replace("ERROR", repr(error)))
    monkeypatch.syspath_prepend(tmp_path)
    assert wire.load(b"chalf_made\nThing\n.", ()).__name__ == "Thing"


def test_threads_whose_imports_want_each_others_locks(tmp_path, monkeypatch):
    """One of them gets an error of Python's, at the first look."""
    package, module = slow_package.pickles(tmp_path, monkeypatch)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(wire.load, pickled, ()) for pickled in (package, module)]
        assert [load.result(PATIENCE).leaves for load in loads] == [("package",), ("module",)]


def test_addresses_of_ipv6(keys):
    """As a node on Ray has them whose machine has no other."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("This machine has no IPv6.")
    server = RpcServer(Thing(), "tcp://[::1]:*", keys).start()
    connection = Connection(server.address, keys)
    assert ask(connection, 5) == 5
    connection.close()
    server.close()


def test_the_limit_of_a_frame_holds_for_answers(keys, directory):
    node = lp.CourierNode(Thing, courier_kwargs={"max_frame_bytes": 100_000})
    limit = {"max_frame_bytes": node.client_options["max_frame_bytes"]}

    class Zeros:
        def zeros(self, count):
            return np.zeros(count, np.uint8)

    server = RpcServer(Zeros(), f"ipc://{directory}/s", keys).start()
    connection = Connection(server.address, keys, **limit)
    assert connection.call("zeros", (90_000,), {}, PATIENCE).nbytes == 90_000
    with pytest.raises(lp.LaunchError, match="max_frame_bytes=100000"):
        connection.call("zeros", (200_000,), {}, PATIENCE)
    connection.close()
    server.close()


@pytest.mark.parametrize(
    "ask_again",
    [
        lambda client: client.call("echo", (2,), {}, None),
        lambda client: client.submit("echo", (2,), {}, None),  # while other threads take all the room
        lambda client: client.submit("echo", (2,), {}, None).result(PATIENCE),
    ],
    ids=["call", "submit", "result"],
)
def test_a_callback_of_a_future_may_use_the_client(served, ask_again):
    _, server, connection = served
    client = Connection(server.address, connection.curve, max_in_flight=1)
    done, stop = threading.Semaphore(0), threading.Event()

    def then(_):
        until(lambda: client._futures)
        ask_again(client)
        done.release()

    def take_room():
        while not stop.is_set():
            client.submit("echo", (1,), {}, None)

    taking = [threading.Thread(target=take_room, daemon=True) for _ in range(2)]
    for thread in taking:
        thread.start()
    for _ in range(20):
        client.submit("echo", (1,), {}, None).add_done_callback(then)
        assert done.acquire(timeout=PATIENCE)
    stop.set()
    for thread in taking:
        thread.join(PATIENCE)
    client.close()


@pytest.mark.parametrize("make", ["call", "submit", "close"])
def test_an_interrupt_anywhere_leaves_the_client_to_others(keys, directory, make):
    server = RpcServer(Thing(), f"ipc://{directory}/node", keys).start()
    array = np.zeros(wire.IN_BAND_BYTES, np.uint8)  # in a frame of its own
    uses = {
        "call": lambda: client.call("echo", (array,), {}, None),
        "submit": lambda: client.submit("echo", (array,), {}, None).result(PATIENCE),
        "close": lambda: client.close(),
    }
    client, at = Connection(server.address, keys, max_in_flight=1), 0
    files = (
        "rpc/client.py",
        "locks.py",
        "futures.py",
        "futures/_base.py",
        "zmq/sugar/socket.py",
    )
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        while interrupt(uses[make], at, *files):
            at += 1
            if make == "close":
                other.submit(client.close).result(PATIENCE)
                client = Connection(server.address, keys)
            future = other.submit(client.submit, "echo", (at,), {}, PATIENCE).result(PATIENCE)
            assert future.result(PATIENCE) == other.submit(client.call, "echo", (at,), {}, PATIENCE).result(
                PATIENCE
            )
    assert at > 20
    client.close()
    server.close()


def test_a_repeated_call_is_carried_out_once_however_long_the_node_was_away(keys, directory):
    address = f"ipc://{directory}/node"
    first = Thing()
    server = RpcServer(first, address, keys).start()
    client = Connection(address, keys, repeat_lost=True)
    client.probe_interval_s = 0.1
    future = client.submit("block", (), {}, None)
    assert first.entered.acquire(timeout=PATIENCE)
    server.close()
    threading.Event().wait(0.5)  # several probes wait for the next life of the node
    second = Thing()
    server = RpcServer(second, address, keys).start()
    assert second.entered.acquire(timeout=PATIENCE)
    assert not second.entered.acquire(timeout=0.5), "the call came twice"
    second.release.set()
    assert future.result(PATIENCE)
    first.release.set()
    client.close()
    server.close()
