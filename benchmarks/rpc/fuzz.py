"""Fuzzed frames against a served node and a replay server while legitimate clients go on working.

    python -m benchmarks.rpc.fuzz [--seconds 20] [--seed 0]

Two nodes are served, one over TCP and one on this machine, and a replay server.
Peers with the program's key send random frames, proper messages with flipped bits (not inside of pickles),
missing frames and frames too many; peers without it send raw bytes, some behind a proper ZeroMQ greeting. One
client of each server checks all the time that it is answered rightly. Prints one table; the exit code is 1 if
an answer was wrong or missing, or a server failed with an error of the library.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from framework import replay
from framework.replay import wire as replay_wire
from launch import directories
from launch.rpc import sockets, wire
from launch.rpc.client import Connection
from launch.rpc.server import RpcServer

PATIENCE = 30.0  # seconds in which a legitimate call must be answered
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # of ZMTP 3


# The messages of replay, and values that no field expects.
MESSAGES: dict[str, dict[str, Any]] = {
    "hello": {"protocol": replay_wire.PROTOCOL},
    "lease": {"name": "s", "stream": None, "columns": {"x": [[], "<i8"]}, "n": 4},
    "insert": {
        "layouts": [[0, [[["s", 1, False]], [["x", 0, False]], [["dict", ["x"], [None]]]]]],
        "write": [["s", np.arange(2), {"x": np.arange(2)}]],
        "items": [["t", 0, np.array([[0]]), None, np.array([1], np.uint64), None, None]],
        "release": [["s", np.arange(1)]],
        "lease": {"s": 3},
    },
    "sample": {"table": "t", "n": 3, "least": 2, "timeout": 0.1, "local": False, "hold": True, "pad": False},
    "give_back": {"deliveries": [1], "used": 0},
    "mutate": {"table": "t", "arguments": [np.arange(2), np.ones(2), np.arange(0)]},
    "can_sample": {"table": "t", "arguments": [1]},
    "can_insert": {"table": "t", "arguments": [1]},
    "weight": {"table": "t", "arguments": []},
    "info": {},
    "sync": {},
    "cancel": {},
}
ODD: list[Any] = [
    *(None, True, -1, 1 << 40, float("nan"), float("inf"), 1e17, 1e300),
    *("", "t", b"\0", [], [[1]], {}, {"t": 1}),
    *(np.zeros(0), np.arange(3), np.array(np.nan), np.array([1 << 62], np.uint64), np.zeros((2, 2))),
]


def replay_message(random: np.random.Generator) -> dict[str, Any]:
    """A message of replay's protocol, mostly with an odd value in one of its fields."""
    op = "hello" if random.integers(3) == 0 else list(MESSAGES)[random.integers(len(MESSAGES))]
    message = {"op": op, "id": int(random.integers(9)), "done": [], **MESSAGES[op]}
    if random.integers(4):
        message[list(message)[random.integers(len(message))]] = ODD[random.integers(len(ODD))]
    return message


class Echo:
    def echo(self, x: Any) -> Any:
        return x


class Peer:
    """Repeats ``act`` on a thread of its own until the end; keeps its first error and its slowest turn."""

    def __init__(self, name: str, act: Callable[[], Any], end: threading.Event) -> None:
        self.name = name
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._act, self._end = act, end
        self.turns = 0
        self.slowest = 0.0
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                began = time.perf_counter()
                self._act()
                self.slowest = max(self.slowest, time.perf_counter() - began)
                self.turns += 1
        except BaseException as error:
            self.error = error


def mutated(
    frames: list[bytes], random: np.random.Generator, pickled: tuple[int, int] | None = None
) -> list[bytes]:
    """Bits flipped, ends cut off, frames lost, doubled or invented.

    Args:
      frames: of a proper message.
      pickled: ``(frame, byte)`` where a pickle begins, in which no bit is flipped: that would test Python's
        unpickler, which does crash of such things, and who has the key may send any pickle anyway.
    """
    frames = [bytes(frame) for frame in frames]
    kinds = sorted(
        random.integers(5, size=int(random.integers(1, 4)))
    )  # bits first: then frames are as named
    for kind in kinds:
        at = int(random.integers(len(frames))) if frames else 0
        if kind == 0:
            size = len(frames[at]) if pickled is None or at != pickled[0] else pickled[1]
            if size:
                changed = bytearray(frames[at])
                changed[int(random.integers(size))] ^= 1 << int(random.integers(8))
                frames[at] = bytes(changed)
        elif not frames or kind == 1:
            frames.insert(at, random.bytes(int(random.integers(200))))
        elif kind == 2:
            frames.append(frames[at])
        elif kind == 3 and len(frames) > 1:
            del frames[at]
        else:
            frames[at] = frames[at][: int(random.integers(len(frames[at]) + 1))]
    return frames


def with_the_key(
    address: str,
    keys: sockets.CurveKeys,
    message: Callable[[], list[bytes]],
    random: np.random.Generator,
    pickled: tuple[int, int] | None = None,
) -> Callable[[], None]:
    """Sends ``message()`` a few times over a connection of its own, every other time mutated."""

    def act() -> None:
        peer = sockets.make_client_socket(address, keys)
        peer.sndtimeo = 1000
        try:
            for _ in range(20):
                frames = message()
                peer.send_multipart(mutated(frames, random, pickled) if random.integers(2) else frames)
            while peer.poll(5):
                peer.recv_multipart()
        except zmq.Again:
            return  # it was turned away
        finally:
            peer.close(linger=50)

    return act


def without_the_key(address: str, random: np.random.Generator) -> Callable[[], None]:
    """Writes random bytes to the port itself."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")

    def act() -> None:
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            greeting = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) if random.integers(2) else b""
            try:
                peer.sendall(greeting + random.bytes(int(random.integers(2000))))
                peer.settimeout(0.01)
                peer.recv(1000)
            except (ConnectionError, TimeoutError):
                return

    return act


def caller(address: str, keys: sockets.CurveKeys, random: np.random.Generator) -> Callable[[], None]:
    connection = Connection(address, keys, name="fuzzed")

    def act() -> None:
        sent = random.integers(0, 255, int(random.integers(50_000)), np.uint8)
        back = connection.call("echo", (sent,), {}, PATIENCE)
        assert np.array_equal(back, sent), "another answer than what was sent"

    return act


def reader_and_writer(
    address: str, keys: sockets.CurveKeys, random: np.random.Generator
) -> Callable[[], None]:
    client = replay.ServedClient(address, keys)
    writer = client.batch_writer()

    def act() -> None:
        value = int(random.integers(1 << 40))
        rows = writer.append("s", {"x": np.full(4, value), "twice": np.full(4, 2 * value)})
        item = {"x": writer.slice("s", "x", rows), "twice": writer.slice("s", "twice", rows)}
        writer.create_items("t", item)
        writer.release("s", rows)
        writer.flush(PATIENCE)
        sample = client.sample_batch("t", 32, timeout=PATIENCE)
        assert np.array_equal(2 * sample.data["x"], sample.data["twice"]), "a torn item"

    return act


def run(seconds: float, seed: int) -> int:
    """Fuzzes for so long; prints the table and returns the exit code."""
    generators = iter(np.random.default_rng(seed).spawn(12))
    keys = sockets.CurveKeys.generate()
    end = threading.Event()
    node = RpcServer(Echo(), "tcp://127.0.0.1:*", keys, name="fuzzed").start()
    table = replay.Table(
        "t", replay.selectors.Uniform(), replay.selectors.Fifo(), 1000, replay.rate_limiters.MinSize(1)
    )
    folder = directories.make_private_directory()
    local = RpcServer(Echo(), f"ipc://{folder}/node", keys, name="local", max_frame_bytes=1 << 24).start()
    with replay.Server([table], address="tcp://127.0.0.1:*", curve=keys) as server:
        assert server.address is not None

        def call() -> list[bytes]:
            data, buffers = wire.encode(("echo", (np.arange(5000),), {}))
            return [wire.head(wire.CALL, 1, len(buffers)) + data, *[bytes(b.raw()) for b in buffers]]

        def hello() -> list[bytes]:
            return [bytes(frame) for frame in replay_wire.encode(replay_message(random))]

        random = next(generators)
        peers = [
            Peer("caller of the node", caller(node.address, keys, next(generators)), end),
            Peer("client of replay", reader_and_writer(server.address, keys, next(generators)), end),
            Peer("caller on this machine", caller(local.address, keys, next(generators)), end),
            Peer(
                "node, with the key",
                with_the_key(node.address, keys, call, next(generators), (0, wire.HEAD.size)),
                end,
            ),
            Peer("replay, with the key", with_the_key(server.address, keys, hello, next(generators)), end),
            Peer("node, without the key", without_the_key(node.address, next(generators)), end),
            Peer("replay, without the key", without_the_key(server.address, next(generators)), end),
            Peer(
                "node, on this machine",
                with_the_key(local.address, keys, call, next(generators), (0, wire.HEAD.size)),
                end,
            ),
        ]
        for peer in peers:
            peer.thread.start()
        end.wait(seconds)
        end.set()
        for peer in peers:
            peer.thread.join(PATIENCE)
        hung = [peer.name for peer in peers if peer.thread.is_alive()]
        print(f"{'peer':<26}{'turns':>8}{'slowest ms':>12}  error")
        for peer in peers:
            error = "" if peer.error is None else repr(peer.error)
            print(f"{peer.name:<26}{peer.turns:>8}{1000 * peer.slowest:>12.1f}  {error}")
        print(f"malformed messages counted by the node: {node.malformed}, on this machine: {local.malformed}")
        assert server._service is not None
        of_replay = server._service.defects.count
        defects = {"node": node.defects, "local": local.defects, "replay": of_replay}
        print(f"messages that failed with errors of the library: {defects}")
        failed = [name for name, count in defects.items() if count]
        failed += [peer.name for peer in peers if peer.error is not None] + hung
        failed += [peer.name for peer in peers[:3] if peer.turns == 0]
        if hung:
            print(f"still waiting: {hung}")
    node.close()
    local.close()
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    faulthandler.enable()
    logging.disable(logging.WARNING)  # there will be thousands
    return run(arguments.seconds, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
