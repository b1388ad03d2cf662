"""Calls per second between processes: ours beside what others have for it.

    python -m benchmarks.rpc.compare [--seconds 0.5] [--clients 8] [--runs 3] [--peers courier=PYTHON]

The server and every client are processes of their own. "64 futures" keeps a window of 64 open, the other
columns wait for every answer; with several clients the figures are what they get together. The peers are in
``peers.py``: pyzmq (a bare echo, the floor of what is built on it) and Launchpad's courier; ``--peers`` names
the interpreter of one that is not installed here.
Each figure is the median of the runs, in which the contenders take turns; ratios within one table are worth
more than the figures, which move with what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import launch as lp
from benchmarks.rpc.peers import CASES, KILOBYTE, MEGABYTE, PEERS, Service, rate, windowed


class Gather:
    """Has the clients begin each case together, and adds up their rates."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._barrier = threading.Barrier(clients)
        self._lock = threading.Lock()
        self._results: list[dict[str, float]] = []

    def meet(self) -> None:
        self._barrier.wait(120)

    def report(self, rates: dict[str, float]) -> None:
        with self._lock:
            self._results.append(rates)
            if len(self._results) == self._clients:
                lp.stop({case: sum(result[case] for result in self._results) for case in rates})


def client(service: Any, gather: Any, seconds: float) -> None:
    """Runs all cases."""
    futures = service.futures
    cases = {
        "empty": service.ping,
        "empty, 64 futures": windowed(futures.ping),
        "1 kB in": lambda: service.sink(KILOBYTE),
        "1 kB in, 64 futures": windowed(lambda: futures.sink(KILOBYTE)),
        "1 MB in": lambda: service.sink(MEGABYTE),
        "1 MB out": service.source,
    }
    rates = {}
    for case in CASES:
        gather.meet()
        rates[case] = rate(cases[case], seconds)
    gather.report(rates)


def measure_launch(clients: int, seconds: float) -> dict[str, float]:
    """The engine ``processes``."""
    program = lp.Program("rpc")
    service = program.add_node(lp.CourierNode(Service), label="service")
    gather = program.add_node(lp.CourierNode(Gather, clients), label="gather")
    with program.group("client"):
        for _ in range(clients):
            program.add_node(lp.PyNode(client, service, gather, seconds))
    return lp.launch(program)


def measure_peer(name: str, python: str, clients: int, seconds: float) -> dict[str, float] | str:
    """The rates, or why there are none."""
    script = Path(__file__).with_name("peers.py")
    command = [python, str(script), name, "--clients", str(clients), "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return "did not end within 180 s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a case")
    parser.add_argument("--clients", type=int, default=8, help="processes of the rows with many clients")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of contenders; default: all")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    interpreters = dict(peer.split("=", 1) for peer in arguments.peers)
    contenders = [name for name in ("launch", *PEERS) if not arguments.only or name in arguments.only]
    runs: dict[tuple[str, int], list[Any]] = {}
    for _ in range(arguments.runs):
        for clients in (1, arguments.clients):
            for name in contenders:
                if name == "launch":
                    result: Any = measure_launch(clients, arguments.seconds)
                else:
                    python = interpreters.get(name, sys.executable)
                    result = measure_peer(name, python, clients, arguments.seconds)
                runs.setdefault((name, clients), []).append(result)
    print("calls/s".ljust(20) + "".join(case.rjust(21) for case in CASES))
    for (name, clients), results in runs.items():
        label = f"{name}, {clients} client{'s' if clients > 1 else ''}".ljust(20)
        failed = [result for result in results if isinstance(result, str)]
        if failed:
            print(label + "  " + failed[0])
            continue
        cells = [
            f"{statistics.median(result[case] for result in results):,.0f}" if case in results[0] else "-"
            for case in CASES
        ]
        print(label + "".join(cell.rjust(21) for cell in cells))


if __name__ == "__main__":
    main()
