"""A soak: clients send random payloads to a node that is killed and restarted again and again.

    python benchmarks/rpc_soak.py [--minutes 10] [--clients 8] [--kill-every 20]

Every call must be answered rightly, or end with an error that says it was lost; no client may hang, and the
memory of the clients must not grow. Prints one table; the exit code is 1 if any of that is violated.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import zlib
from typing import Any

import numpy as np

import launch as lp

LARGEST = 4 << 20
PATIENCE = 30.0  # seconds in which a call must end, also across a restart


class Echo:
    """Answers with the checksum of what came, and what came."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def pid(self) -> int:
        return self._pid

    def echo(self, payload: np.ndarray) -> tuple[int, np.ndarray]:
        return zlib.crc32(payload), payload


class Tally:
    """Collects what the clients report."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._reports: list[dict[str, Any]] = []

    def report(self, row: dict[str, Any]) -> None:
        self._reports.append(row)
        if len(self._reports) == self._clients:
            lp.stop(self._reports)


def memory() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def client(echo: Any, tally: Any, seed: int, seconds: float) -> None:
    """Calls, synchronously and with futures, until the time is over."""
    random = np.random.default_rng(seed)
    row = {"client": seed, "calls": 0, "lost": 0, "wrong": 0, "late": 0, "start_mb": 0.0, "end_mb": 0.0}
    patient = echo.with_timeout(PATIENCE)
    end = time.monotonic() + seconds
    warm = time.monotonic() + seconds * 0.2
    while time.monotonic() < end:
        size = int(2 ** random.uniform(0, np.log2(LARGEST)))
        payloads = [random.integers(0, 256, size, np.uint8) for _ in range(1 + random.integers(4))]
        futures = [patient.futures.echo(payload) for payload in payloads[1:]]
        for number, payload in enumerate(payloads):
            row["calls"] += 1
            try:
                checksum, back = patient.echo(payload) if number == 0 else futures[number - 1].result()
            except lp.CallLost:
                row["lost"] += 1
            except lp.CallTimeout:
                row["late"] += 1
            else:
                row["wrong"] += checksum != zlib.crc32(payload) or not np.array_equal(back, payload)
        if row["start_mb"] == 0.0 and time.monotonic() > warm:
            row["start_mb"] = memory() / 1e6
    row["end_mb"] = memory() / 1e6
    tally.report(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    arguments = parser.parse_args()
    seconds = arguments.minutes * 60
    program = lp.Program("soak")
    echo = program.add_node(lp.CourierNode(Echo), label="echo")
    tally = program.add_node(lp.CourierNode(Tally, arguments.clients), label="tally")
    with program.group("client"):
        for seed in range(arguments.clients):
            program.add_node(lp.PyNode(client, echo, tally, seed, seconds))
    kills = 0
    with lp.start(program, restarts={"echo": 10**6}) as job:
        over = threading.Event()
        end = time.monotonic() + seconds - 5.0
        while not job.over and time.monotonic() < end and not over.wait(arguments.kill_every):
            os.kill(job.client("echo").with_timeout(PATIENCE).pid(), signal.SIGKILL)
            kills += 1
        rows = job.wait(timeout=120 + PATIENCE)
    columns = ["client", "calls", "lost", "late", "wrong", "start_mb", "end_mb"]
    print("".join(column.rjust(10) for column in columns))
    for row in sorted(rows, key=lambda row: row["client"]):
        print("".join(f"{row[column]:10.0f}" for column in columns))
    bad = [row for row in rows if row["wrong"] or row["late"] or row["end_mb"] > 1.3 * row["start_mb"] + 50]
    print(f"{kills} kills, {sum(row['calls'] for row in rows)} calls: {'FAILED' if bad else 'passed'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
