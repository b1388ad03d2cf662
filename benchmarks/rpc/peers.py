"""Calls per second of what others have for calls between processes; for ``compare.py``.

    PYTHON benchmarks/rpc/peers.py NAME [--clients 1] [--seconds 0.5]

It needs numpy and what NAME needs, nothing of ours but this file: each peer can have an environment of its
own. Prints one line of JSON: case to calls per second of all clients together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

KILOBYTE = np.zeros(1 << 8, np.float32)
MEGABYTE = np.zeros(1 << 18, np.float32)
WINDOW = 64
CASES = ("empty", "empty, 64 futures", "1 kB in", "1 kB in, 64 futures", "1 MB in", "1 MB out")
Cases = dict[str, Callable[[], Any]]


class Service:
    """What every contender serves."""

    def ping(self) -> None:
        """An empty call."""

    def sink(self, array: np.ndarray) -> int:
        """Takes an array."""
        return len(array)

    def source(self) -> np.ndarray:
        """Gives 1 MB."""
        return MEGABYTE


def rate(call: Callable[[], Any], seconds: float) -> float:
    """Calls per second, after a warm-up of a tenth of the time."""
    end = time.perf_counter() + seconds / 10
    while time.perf_counter() < end:
        call()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(10):
            call()
        count += 10
    return count / elapsed


def windowed(submit: Callable[[], Any]) -> Callable[[], Any]:
    """A call that keeps ``WINDOW`` futures open."""
    waiting: deque[Any] = deque()

    def call() -> None:
        waiting.append(submit())
        if len(waiting) >= WINDOW:
            waiting.popleft().result()

    return call


# Each contender: ``serve_*(pipe)`` says its address and ends when told; ``*_clients(address)`` gives cases.


def serve_pyzmq(pipe: Any) -> None:
    import os
    import tempfile

    import zmq

    with tempfile.TemporaryDirectory(prefix="z") as folder:
        address = f"ipc://{os.path.join(folder, 'echo')}"
        server = zmq.Context().socket(zmq.ROUTER)
        server.bind(address)
        pipe.send(address)
        poller = zmq.Poller()
        poller.register(server, zmq.POLLIN)
        poller.register(pipe.fileno(), zmq.POLLIN)
        while True:
            if pipe.fileno() in dict(poller.poll()):
                server.close(linger=0)
                return
            while True:
                try:
                    identity, message = server.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                answer = MEGABYTE if message.buffer.nbytes == 6 else b""
                server.send(identity, zmq.SNDMORE, copy=False)
                server.send(answer, copy=False)


def pyzmq_clients(address: str) -> Cases:
    import zmq

    context = zmq.Context()

    class Connection:
        """One for each case, as a window leaves answers in it."""

        def __init__(self) -> None:
            self._socket = context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.connect(address)

        def send(self, message: Any) -> Connection:
            self._socket.send(message, copy=False)
            return self

        def result(self) -> Any:
            return self._socket.recv(copy=False)

    def waiting(message: Any) -> Callable[[], Any]:
        connection = Connection()
        return lambda: connection.send(message).result()

    def flying(message: Any) -> Callable[[], Any]:
        connection = Connection()
        return windowed(lambda: connection.send(message))

    return {
        "empty": waiting(b"x"),
        "empty, 64 futures": flying(b"x"),
        "1 kB in": waiting(KILOBYTE),
        "1 kB in, 64 futures": flying(KILOBYTE),
        "1 MB in": waiting(MEGABYTE),
        "1 MB out": waiting(b"source"),
    }


def serve_courier(pipe: Any) -> None:
    """Arguments are pickled, because a call of Courier with a numpy argument never returns."""
    import courier

    server = courier.Server()
    server.Bind("ping", lambda: None)
    server.Bind("sink", lambda data: len(pickle.loads(data)))
    server.Bind("source", lambda: MEGABYTE)
    server.Start()
    pipe.send(server.port)
    pipe.recv()
    server.Stop()


def courier_clients(port: int) -> Cases:
    import courier

    client = courier.Client(f"localhost:{port}")
    return {
        "empty": client.ping,
        "empty, 64 futures": windowed(client.futures.ping),
        "1 kB in": lambda: client.sink(pickle.dumps(KILOBYTE, 5)),
        "1 kB in, 64 futures": windowed(lambda: client.futures.sink(pickle.dumps(KILOBYTE, 5))),
        "1 MB in": lambda: client.sink(pickle.dumps(MEGABYTE, 5)),
        "1 MB out": client.source,
    }


def _client(make: Callable[[Any], Cases], address: Any, barrier: Any, seconds: float, queue: Any) -> None:
    cases = make(address)
    rates = {}
    for name in CASES:
        if name in cases:
            barrier.wait(60)
            rates[name] = rate(cases[name], seconds)
    queue.put(rates)


def measure(
    serve: Callable[[Any], None], make: Callable[[Any], Cases], clients: int, seconds: float
) -> dict[str, float]:
    """What ``clients`` processes get together of one server, case by case at the same time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    address = ours.recv()
    barrier, queue = context.Barrier(clients), context.Queue()
    workers = [
        context.Process(target=_client, args=(make, address, barrier, seconds, queue)) for _ in range(clients)
    ]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60 + 20 * seconds) for _ in workers]
    for worker in workers:
        worker.join()
    ours.send("end")
    server.join(10)
    if server.is_alive():
        server.kill()
    return {name: sum(result[name] for result in results) for name in results[0]}


PEERS: dict[str, Callable[[int, float], dict[str, float]]] = {
    "pyzmq": lambda clients, seconds: measure(serve_pyzmq, pyzmq_clients, clients, seconds),
    "courier": lambda clients, seconds: measure(serve_courier, courier_clients, clients, seconds),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    print(json.dumps(PEERS[arguments.name](arguments.clients, arguments.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
