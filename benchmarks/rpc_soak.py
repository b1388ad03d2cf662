"""A soak: clients send random payloads to a node that is killed and restarted again and again.

    python benchmarks/rpc_soak.py [--minutes 10] [--clients 8] [--kill-every 20]

Every call must be answered rightly, or end with an error that says it was lost; no client may hang, and
neither the memory nor the open files of the clients and of the launcher may grow. Memory is the median of the
readings in the 2nd, the 6th and the 10th tenth of the time, because it swings with the payloads; for the node
that is killed it is that of its lives just before their ends. Prints one table; the exit code is 1 if any of
that is violated.
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
from common import rss

import launch as lp

LARGEST = 4 << 20
PATIENCE = 30.0  # seconds in which a call must end, also across a restart


class Echo:
    """Answers with the checksum of what came, and what came."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def pid_and_memory(self) -> tuple[int, int]:
        return self._pid, rss()

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


class Readings:
    """Memory and open files of this process, in three windows of a run."""

    WINDOWS = ("start", "middle", "end")

    def __init__(self, seconds: float) -> None:
        self._begin = time.monotonic()
        self._tenth = seconds / 10
        self._memory: dict[str, list[float]] = {window: [] for window in self.WINDOWS}
        self._files: dict[str, int] = {}

    def take(self) -> None:
        """One reading, if this moment is in a window."""
        window = {1: "start", 5: "middle", 9: "end"}.get(int((time.monotonic() - self._begin) / self._tenth))
        if window is not None:
            self._memory[window].append(rss())
            self._files[window] = len(os.listdir("/proc/self/fd"))

    def row(self) -> dict[str, float]:
        """``start_mb``, ``middle_mb``, ``end_mb`` and the same of ``_files``; nan where nothing was read."""
        row: dict[str, float] = {}
        for window in self.WINDOWS:
            readings = self._memory[window]
            row[f"{window}_mb"] = float(np.median(readings)) / 1e6 if readings else np.nan
            row[f"{window}_files"] = self._files.get(window, np.nan)
        return row


def client(echo: Any, tally: Any, seed: int, seconds: float) -> None:
    """Calls, synchronously and with futures, until the time is over."""
    random = np.random.default_rng(seed)
    row: dict[str, Any] = {
        "who": f"client {seed}",
        "calls": 0,
        "lost": 0,
        "wrong": 0,
        "late": 0,
        "longest": 0.0,
    }
    patient = echo.with_timeout(PATIENCE)
    readings = Readings(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        size = int(2 ** random.uniform(0, np.log2(LARGEST)))
        payloads = [random.integers(0, 256, size, np.uint8) for _ in range(1 + random.integers(4))]
        begin = time.monotonic()
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
        row["longest"] = max(row["longest"], time.monotonic() - begin)
        readings.take()
    tally.report(row | readings.row())


def grown(row: dict[str, Any]) -> bool:
    """Whether the process of ``row`` held clearly more at the end than after its warm-up."""
    return row["end_mb"] > 1.2 * row["start_mb"] + 30 or row["end_files"] > row["start_files"] + 8


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
    launcher = Readings(seconds)
    lives: list[float] = []  # memory of each life of the killed node just before its end
    with lp.start(program, restarts={"echo": 10**6}) as job:
        over = threading.Event()
        begin = now = time.monotonic()
        victim = job.client("echo").with_timeout(PATIENCE)
        while not job.over and now < begin + seconds - 5.0:
            over.wait(min(1.0, arguments.kill_every))
            launcher.take()
            now = time.monotonic()
            if now > begin + arguments.kill_every * (len(lives) + 1):
                pid, size = victim.pid_and_memory()
                lives.append(size / 1e6)
                os.kill(pid, signal.SIGKILL)
        rows = job.wait(timeout=120 + PATIENCE)
    columns = {"calls": 0, "lost": 0, "late": 0, "wrong": 0, "longest": 1}
    columns |= {f"{window}_{what}": 0 for what in ("mb", "files") for window in Readings.WINDOWS}
    print("".ljust(10) + "".join(column.rjust(13) for column in columns))
    rows = sorted(rows, key=lambda row: row["who"])
    for row in [*rows, {"who": "launcher"} | launcher.row()]:
        cells = [f"{row[column]:,.{digits}f}" if column in row else "-" for column, digits in columns.items()]
        print(row["who"].ljust(10) + "".join(cell.rjust(13) for cell in cells))
    if lives:
        third = max(1, len(lives) // 3)
        parts = ", ".join(
            f"{np.median(part):.0f}" for part in (lives[:third], lives[third:-third] or lives, lives[-third:])
        )
        print(f"echo: memory at the end of its lives, first, middle and last third (median): {parts} MB")
    bad = [row for row in rows if row["wrong"] or row["late"] or grown(row)]
    calls, lost = (sum(row[what] for row in rows) for what in ("calls", "lost"))
    failed = bool(bad) or grown(launcher.row())
    print(f"{len(lives)} kills, {calls:,} calls, {lost:,} reported lost: {'FAILED' if failed else 'passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
