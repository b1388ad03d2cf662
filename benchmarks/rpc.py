"""Calls per second between two processes: ours beside a bare socket and what else is installed.

    python benchmarks/rpc.py [--seconds 0.5] [--clients 8]

The server is a process of its own. A plain column waits for every answer, "64 in flight" keeps a window of 64
futures; the row with many clients adds up what that many processes get at once. Each figure is the best of
two runs. Ratios within one table are worth more than the figures, which move with what else the machine does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.managers
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import launch as lp

MEGABYTE = np.zeros(1 << 18, np.float32)
KILOBYTE = np.zeros(1 << 8, np.float32)
WINDOW = 64


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
    """Calls per second, the best of two runs."""
    best = 0.0
    call()
    for _ in range(2):
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            for _ in range(10):
                call()
            count += 10
        best = max(best, count / elapsed)
    return best


def windowed(submit: Callable[[], Any]) -> Callable[[], Any]:
    """A call that keeps ``WINDOW`` futures open."""
    waiting: deque[Any] = deque()

    def call() -> None:
        waiting.append(submit())
        if len(waiting) >= WINDOW:
            waiting.popleft().result()

    return call


def wait() -> None:
    lp.wait_for_stop()


@contextmanager
def launch_job() -> Iterator[tuple[lp.Job, Any]]:
    program = lp.Program("rpc")
    program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(wait), label="wait")
    with lp.start(program) as job:
        yield job, job.client("service")


def measure_launch(seconds: float) -> dict[str, float]:
    with launch_job() as (_, client):
        futures = client.futures
        return {
            "empty": rate(client.ping, seconds),
            "empty, 64 in flight": rate(windowed(futures.ping), seconds),
            "1 kB in": rate(lambda: client.sink(KILOBYTE), seconds),
            "1 kB in, 64 in flight": rate(windowed(lambda: futures.sink(KILOBYTE)), seconds),
            "1 MB in": rate(lambda: client.sink(MEGABYTE), seconds),
            "1 MB out": rate(client.source, seconds),
        }


def _drive(client: Any, seconds: float, in_flight: bool) -> float:
    return rate(windowed(client.futures.ping) if in_flight else client.ping, seconds)


class Gather:
    """Adds the rates of clients that call at the same time."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._rates: list[float] = []

    def report(self, value: float) -> None:
        self._rates.append(value)
        if len(self._rates) == self._clients:
            lp.stop(sum(self._rates))


def _client(service: Any, gather: Any, seconds: float, in_flight: bool) -> None:
    gather.report(_drive(service, seconds, in_flight))


def measure_many(clients: int, seconds: float) -> dict[str, float]:
    rates = {}
    for in_flight in (False, True):
        program = lp.Program("rpc")
        service = program.add_node(lp.CourierNode(Service), label="service")
        gather = program.add_node(lp.CourierNode(Gather, clients), label="gather")
        with program.group("client"):
            for _ in range(clients):
                program.add_node(lp.PyNode(_client, service, gather, seconds, in_flight))
        name = "empty, 64 in flight" if in_flight else "empty"
        rates[name] = lp.launch(program)
    return rates


def _echo(address: str, keys: Any) -> None:
    from launch.rpc import sockets

    server = sockets.make_server_socket(address, keys)
    while True:
        frames = server.recv_multipart(copy=False)
        if frames[1].bytes == b"end":
            return
        answer = MEGABYTE if frames[1].bytes == b"source" else b""
        server.send(frames[0], 2, copy=False)  # 2: more follows
        server.send(answer, copy=False)


def measure_bare(seconds: float, curve: bool) -> dict[str, float]:
    """A socket that answers, with nothing around it; with CURVE over loopback TCP."""
    from launch.rpc import sockets

    keys = sockets.CurveKeys.generate()
    directory = sockets.make_private_directory()
    address = f"ipc://{directory}/echo"
    if curve:
        probe = sockets.make_server_socket("tcp://127.0.0.1:*", keys)
        address = sockets.bound_address(probe)
        probe.close(linger=0)
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(address, keys))
    process.start()
    client = sockets.make_client_socket(address, keys)

    def call(message: Any) -> Callable[[], Any]:
        def once() -> None:
            client.send(message, copy=False)
            client.recv(copy=False)

        return once

    def flight() -> Callable[[], Any]:
        open_calls = 0

        def once() -> None:
            nonlocal open_calls
            client.send(b"x")
            open_calls += 1
            if open_calls >= WINDOW:
                client.recv()
                open_calls -= 1

        return once

    result = {
        "empty": rate(call(b"x"), seconds),
        "1 kB in": rate(call(KILOBYTE), seconds),
        "1 MB in": rate(call(MEGABYTE), seconds),
        "1 MB out": rate(call(b"source"), seconds),
        "empty, 64 in flight": rate(flight(), seconds),
    }
    client.send(b"end")
    process.join()
    client.close(linger=0)
    sockets.remove_private_directory(directory)
    return result


class _Manager(multiprocessing.managers.BaseManager):
    pass


_Manager.register("Service", Service)


def measure_manager(seconds: float) -> dict[str, float]:
    with _Manager(ctx=multiprocessing.get_context("spawn")) as manager:
        service = manager.Service()  # type: ignore[attr-defined]
        return {
            "empty": rate(service.ping, seconds),
            "1 kB in": rate(lambda: service.sink(KILOBYTE), seconds),
            "1 MB in": rate(lambda: service.sink(MEGABYTE), seconds),
            "1 MB out": rate(service.source, seconds),
        }


def measure_grpc(seconds: float) -> dict[str, float]:
    """Generic byte calls, so that no generated code is needed."""
    import grpc

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_grpc, args=(theirs,))
    process.start()
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{ours.recv()}", options=limits) as channel:
        sink, source = channel.unary_unary("/s/sink"), channel.unary_unary("/s/source")
        result = {
            "empty": rate(lambda: sink(b""), seconds),
            "empty, 64 in flight": rate(windowed(lambda: sink.future(b"")), seconds),
            "1 kB in": rate(lambda: sink(KILOBYTE.tobytes()), seconds),
            "1 MB in": rate(lambda: sink(MEGABYTE.tobytes()), seconds),
            "1 MB out": rate(lambda: np.frombuffer(source(b""), np.float32), seconds),
        }
    ours.send("end")
    process.join()
    return result


def _serve_grpc(pipe: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(16), options=limits)
    handlers = {
        "sink": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
        "source": grpc.unary_unary_rpc_method_handler(lambda request, context: MEGABYTE.tobytes()),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", handlers)])
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    pipe.recv()
    server.stop(None)


def measure_ray(seconds: float) -> dict[str, float]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        actor = ray.remote(Service).remote()
        return {
            "empty": rate(lambda: ray.get(actor.ping.remote()), seconds),
            "1 kB in": rate(lambda: ray.get(actor.sink.remote(KILOBYTE)), seconds),
            "1 MB in": rate(lambda: ray.get(actor.sink.remote(MEGABYTE)), seconds),
            "1 MB out": rate(lambda: ray.get(actor.source.remote()), seconds),
        }
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one of the two runs of a case")
    parser.add_argument("--clients", type=int, default=8, help="processes of the row with many clients")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    seconds, clients = arguments.seconds, arguments.clients
    contenders: dict[str, Callable[[], dict[str, float]]] = {
        "launch": lambda: measure_launch(seconds),
        f"launch, {clients} clients": lambda: measure_many(clients, seconds),
        "bare pyzmq, ipc": lambda: measure_bare(seconds, curve=False),
        "bare pyzmq, tcp + CURVE": lambda: measure_bare(seconds, curve=True),
        "multiprocessing manager": lambda: measure_manager(seconds),
        "gRPC": lambda: measure_grpc(seconds),
        "Ray actor": lambda: measure_ray(seconds),
    }
    columns = ["empty", "empty, 64 in flight", "1 kB in", "1 kB in, 64 in flight", "1 MB in", "1 MB out"]
    print("calls/s".ljust(26) + "".join(column.rjust(23) for column in columns))
    for name, measure in contenders.items():
        try:
            result = measure()
        except ImportError as error:
            print(f"{name.ljust(26)}  not installed ({error.name})")
            continue
        cells = [f"{result[column]:,.0f}" if column in result else "-" for column in columns]
        print(name.ljust(26) + "".join(cell.rjust(23) for cell in cells), flush=True)


if __name__ == "__main__":
    main()
