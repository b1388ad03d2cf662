"""What the benchmarks share: rates per CPU-second and per second on the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Rate(NamedTuple):
    """Items per CPU-second of all processes that take part, and per second on the clock."""

    cpu: float
    wall: float


def cpu_seconds(pid: int | None = None) -> float:
    """CPU time of a process, all its threads; this one's if None."""
    if pid is None or pid == os.getpid():
        return time.process_time()
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


def measure(
    call: Callable[[], Any], items: int, seconds: float, runs: int = 3, pids: Iterable[int] = ()
) -> Rate:
    """The best of ``runs``, each of at least ``seconds`` of the caller's time; ``call`` handles ``items``.

    Args:
      pids: other processes whose CPU time counts as well.
    """
    others = list(pids)
    started = time.perf_counter()
    call()
    block = max(1, min(64, int(seconds / 20 / max(1e-7, time.perf_counter() - started))))
    cpu = wall = 0.0
    for _ in range(runs):
        calls = 0
        begin = [cpu_seconds(pid) for pid in (None, *others)]
        started = time.perf_counter()
        elapsed = 0.0
        while elapsed < seconds:
            for _ in range(block):
                call()
            calls += block
            elapsed = time.perf_counter() - started
        spent = sum(cpu_seconds(pid) - at for pid, at in zip((None, *others), begin, strict=True))
        cpu = max(cpu, calls * items / max(spent, 1e-9))
        wall = max(wall, calls * items / elapsed)
    return Rate(cpu, wall)


def rss() -> int:
    """Resident memory of this process in bytes, shared memory included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
