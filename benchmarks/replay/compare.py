"""Replay beside its peers, as many of them as are installed: one table, every row in one run.

    python -m benchmarks.replay.compare [--quick] [--only sample prioritized] [--seconds 0.5]

Two figures a row: items per CPU-second of all processes that take part, and items per second on the clock;
each is the best of three runs. The figures move with what else the machine does, ratios within one run less.
A transition is observation and next observation, action, reward and discount; peers get arrays that are
ready to be stored. ``--quick`` shortens the runs and shrinks what is large (5M items, 1 GB).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Rate, measure
from benchmarks.replay import ours, peers


class Row(NamedTuple):
    """One line of the table.

    ``make`` makes what is measured: a ``Run``, or something with ``measure(seconds)`` where several processes
    take part.
    """

    case: str
    contender: str
    make: Callable[[], Any]
    unit: str = "items/s"


def rows(quick: bool) -> list[Row]:
    """Every row, ours first in each case."""
    big = 300_000 if quick else 5_000_000
    frames = 1_000 if quick else 4_000
    megabytes = 64 if quick else 1_000
    n = 100_000

    table = [
        Row("append + item, 1 env", "Repertory TrajectoryWriter", ours.trajectory_writer),
        Row("append + item, 1 env", "Repertory batch writer", lambda: ours.batch_writer(1)),
        Row("append + item, 1 env", "dm-reverb TrajectoryWriter", lambda: peers.reverb_writer(2)),
        Row("append + items, 64 envs", "Repertory batch writer", lambda: ours.batch_writer(64)),
    ]
    for name, module in (("Repertory", ours), *peers.BUFFERS.items()):
        table.append(Row("append + items, 256 envs", name, lambda m=module: m.batch_writer(256)))
    for name, module in (("Repertory", ours), *peers.BUFFERS.items()):
        table.append(Row("sample 256, float32[4]", name, lambda m=module: m.uniform((4,), "float32", n)))
    for name, module in (("Repertory", ours), *peers.BUFFERS.items()):
        case = "sample 256, uint8[4, 84, 84]"
        table.append(Row(case, name, lambda m=module: m.uniform((4, 84, 84), "uint8", frames)))
    table += [
        Row("sample 32 x 80 x uint8[84, 84]", "Repertory", lambda: ours.sequences(frames)),
        Row("sample 32 x 80 x uint8[84, 84]", "numpy.take alone", lambda: ours.sequences(frames, bare=True)),
    ]
    for size in (n, big):
        case = f"prioritized sample 256 + update, {size // 1000}k"
        table.append(Row(case, "Repertory", lambda size=size: ours.prioritized(size)))
        for name, module in peers.BUFFERS.items():
            if hasattr(module, "prioritized") and (size == n or module.FILLS_FAST):
                table.append(Row(case, name, lambda m=module, size=size: m.prioritized(size)))
    for clients in (1, 4):
        s = "" if clients == 1 else "s"
        for way in ("local", "remote"):
            name = {"local": "Repertory, shared memory", "remote": "Repertory, TCP with CURVE"}[way]
            for kind in ("sample", "insert"):
                case = f"{kind} 256, server, {clients} client{s}"
                table.append(Row(case, name, lambda a=(kind, way, clients): ours.Served(*a)))
        for kind in ("sample", "insert"):
            case = f"{kind} 256, server, {clients} client{s}"
            table.append(Row(case, "dm-reverb", lambda a=(kind, clients): peers.ReverbServed(*a)))
    for clients in (4, 8):
        for kind, verb in (("fetch", "sample"), ("sample", "sample_batch"), ("insert", "insert")):
            for shards in (1, 4):
                name = f"Repertory, {shards} server{'s' if shards > 1 else ''}"
                case = f"{verb} 256, shards, {clients} clients"
                table.append(Row(case, name, lambda a=(kind, "local", clients, shards): ours.Served(*a)))
    table += [
        Row("checkpoint", "Repertory", lambda: ours.checkpoint(megabytes, "save"), "MB/s"),
        Row("restore", "Repertory", lambda: ours.checkpoint(megabytes, "load"), "MB/s"),
        Row("checkpoint", "dm-reverb", lambda: peers.reverb_checkpoint(megabytes // 8), "MB/s"),
    ]
    order = list(dict.fromkeys(row.case for row in table))
    return sorted(table, key=lambda row: order.index(row.case))


MEMORY = {
    "float32[4] transition": ["ours:memory_small", "peers:reverb_memory"],
    "stacked Atari transition": ["ours:memory_atari"],
}


def memory(case: str, probe: str) -> str:
    """Bytes of resident memory for each stored item, seen in a process of its own."""
    module, function = probe.split(":")
    code = f"from benchmarks.replay.{module} import {function}; print({function}())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1].replace("ModuleNotFoundError: No module named", "needs")
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one of the three runs of a row")
    parser.add_argument("--quick", action="store_true", help="short runs, small stores")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names contain one of these")
    arguments = parser.parse_args()
    seconds = min(arguments.seconds, 0.15) if arguments.quick else arguments.seconds
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores")
    print(f"{'case':<40}{'contender':<32}{'per CPU-second':>16}{'per second':>14}")

    def show(case: str, contender: str, *cells: str) -> None:
        print(f"{case:<40}{contender:<32}" + "".join(cell.rjust(15) for cell in cells), flush=True)

    for row in rows(arguments.quick):
        if not any(part in row.case for part in arguments.only):
            continue
        try:
            made = row.make()
            try:
                rate = made.measure(seconds) if hasattr(made, "measure") else of_run(made, seconds)
            finally:
                made.close()
        except ImportError as error:
            show(row.case, row.contender, f"   not installed ({error.name})")
            continue
        except RuntimeError as error:  # a peer's extension that does not fit the versions here
            show(row.case, row.contender, f"   does not run: {str(error)[:60]}")
            continue
        show(row.case, row.contender, f"{rate.cpu:,.0f}", f"{rate.wall:,.0f}", row.unit)
    for case, probes in MEMORY.items():
        if any(part in f"memory of a {case}" for part in arguments.only):
            for probe in probes:
                name = "dm-reverb" if "peers" in probe else "Repertory"
                show(f"memory of a {case}", name, "", memory(case, probe), "bytes")


def of_run(run: ours.Run, seconds: float) -> Rate:
    """A run in this process."""
    return measure(run.call, run.items, seconds, runs=run.runs, pids=run.pids)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
