"""Calls between processes: strangers, unsafe addresses, and broken messages from a peer that has the key."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import stat

import numpy as np
import pytest
import zmq
from served_thing import PATIENCE, Thing, ask

import launch as lp
from launch.rpc import sockets, wire
from launch.rpc.client import Connection
from launch.rpc.server import RpcServer

# Strangers.


@pytest.mark.parametrize("stranger", ["no keys", "other keys"])
def test_strangers_are_not_heard(served, stranger):
    _, server, connection = served
    if stranger == "no keys":
        socket = sockets.context().socket(zmq.DEALER)
        socket.connect(server.address)
    else:
        socket = sockets.make_client_socket(server.address, sockets.CurveKeys.generate())
    with contextlib.suppress(zmq.Again):  # refused already: there is nowhere to send to
        socket.send(call_frames()[0], zmq.NOBLOCK)
    assert not socket.poll(300)
    assert ask(connection, 1) == 1
    assert server.calls == 1
    assert server.malformed == 0
    socket.close(linger=0)


def test_client_with_the_public_key_only_is_refused(keys):
    """Knowing the server is not enough: the program's own key has to be shown."""
    server = RpcServer(Thing(), "tcp://127.0.0.1:*", keys).start()
    public, secret = zmq.curve_keypair()
    socket = sockets.context().socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys.public, public, secret
    socket.connect(server.address)
    with contextlib.suppress(zmq.Again):
        socket.send(call_frames()[0], zmq.NOBLOCK)
    assert not socket.poll(300)
    assert server.calls == 0
    socket.close()
    server.close()


def test_server_wants_keys(directory):
    with pytest.raises(ValueError, match="keys"):
        RpcServer(Thing(), f"ipc://{directory}/s", None)


def test_keys_do_not_show(keys):
    assert keys.secret.decode() not in repr(keys)
    assert keys.public.decode() not in repr(keys)
    assert pickle.loads(pickle.dumps(keys)) == keys


ADDRESSES = {
    "open interface without keys": ("tcp://0.0.0.0:*", None, "keys"),
    "any interface without keys": ("tcp://*:*", None, "keys"),
    "loopback without keys": ("tcp://127.0.0.1:*", None, "other users can reach tcp"),
    "unknown transport": ("udp://127.0.0.1:1", True, "expected ipc"),
    "no transport": ("127.0.0.1:1", True, "expected ipc"),
    "relative path": ("ipc://socket", True, "absolute"),
    "long path": ("ipc:///" + "x" * 200, True, "107"),
    "directory is not there": ("ipc:///nonexistent/s", True, "does not exist"),
}


@pytest.mark.parametrize("address, with_keys, message", ADDRESSES.values(), ids=ADDRESSES.keys())
def test_unsafe_addresses_are_errors(keys, address, with_keys, message):
    with pytest.raises(ValueError, match=message):
        sockets.make_server_socket(address, keys if with_keys else None)


def test_private_directory(directory, keys):
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    os.chmod(directory, 0o755)
    for make in (sockets.make_server_socket, sockets.make_client_socket):
        with pytest.raises(PermissionError, match="0755"):
            make(f"ipc://{directory}/s", keys)


# Broken messages from a peer that has the key.


def call_frames(value=1):
    data, buffers = wire.encode(("echo", (value,), {}))
    return [wire.head(wire.CALL, 1, len(buffers)) + data, *[bytes(b.raw()) for b in buffers]]


BROKEN = {
    "empty": [b""],
    "short": [b"abc"],
    "unknown kind": [wire.head(99, 1)],
    "reply to a server": [wire.head(wire.REPLY, 1) + pickle.dumps(1)],
    "fewer buffers than said": [wire.head(wire.CALL, 1, 3) + pickle.dumps(("echo", (1,), {}))],
    "more frames than said": [*call_frames(), b"more"],
}


@pytest.mark.parametrize("frames", BROKEN.values(), ids=BROKEN.keys())
def test_broken_message_is_counted_and_its_sender_ignored(served, keys, frames):
    _, server, connection = served
    socket = sockets.make_client_socket(server.address, keys)
    socket.send_multipart(frames)
    socket.send_multipart(call_frames())  # proper, but the server no longer listens
    assert not socket.poll(200)
    assert ask(connection, 5) == 5
    assert server.malformed == 1
    socket.close(linger=0)


NOT_CALLS = {
    "no pickle": b"\x80\x05junk",
    "truncated pickle": pickle.dumps(("echo", (1,), {}), 5)[:-4],
    "not a call": pickle.dumps(7),
    "strange method": pickle.dumps((b"echo", (1,), {})),
    "arguments of the wrong kind": pickle.dumps(("echo", 5, 5)),
    "class that is not here": b"cnowhere_at_all\nThing\n.",
}


@pytest.mark.parametrize("data", NOT_CALLS.values(), ids=NOT_CALLS.keys())
def test_content_that_makes_no_sense_is_answered_with_an_error(served, keys, data):
    _, server, connection = served
    socket = sockets.make_client_socket(server.address, keys)
    socket.send(wire.head(wire.CALL, 1) + data)
    assert socket.poll(int(PATIENCE * 1000))
    kind, number, _, _ = wire.parse(socket.recv_multipart(copy=False))
    assert (kind, number) == (wire.ERROR, 1)
    assert ask(connection, 5) == 5
    socket.close(linger=0)


def test_oversized_frame_ends_the_connection(keys, directory):
    server = RpcServer(Thing(), f"ipc://{directory}/s", keys, max_frame_bytes=100_000).start()
    connection = Connection(server.address, keys)
    with pytest.raises((lp.CallTimeout, lp.CallLost)):
        ask(connection, np.zeros(200_000, np.uint8), timeout=0.5)
    assert ask(connection, np.zeros(50_000, np.uint8)).nbytes == 50_000
    connection.close()
    server.close()


# Mistakes of our own.


class Batches:
    @lp.batched_handler(batch_size=1)
    def echo(self, x):
        return x


def broken(*args):
    raise AttributeError("a mistake of ours")


@pytest.mark.parametrize("obj, where", [(Thing(), "_parse"), (Thing(), "_handle"), (Batches(), "_send")])
def test_a_mistake_of_ours_is_logged_and_ends_the_server_if_it_repeats(keys, directory, caplog, obj, where):
    failures = queue.SimpleQueue()
    server = RpcServer(obj, f"ipc://{directory}/s", keys, on_failure=failures.put)
    setattr(server, where, broken)
    server.start()
    socket = sockets.make_client_socket(server.address, keys)
    for _ in range(3):
        assert failures.empty()
        socket.send_multipart(call_frames())
    assert failures.get(timeout=PATIENCE) is server.error
    assert str(server.error) == "a mistake of ours"
    assert (server.defects, server.malformed) == (3, 0)
    assert caplog.text.count("in broken") >= 3
    socket.close(linger=0)
    server.close()
