"""What the benchmarks share: CPU seconds, rates, and the window of a program in which they are counted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_TICK = os.sysconf("SC_CLK_TCK")


class Rate(NamedTuple):
    """Items per CPU-second of all processes that take part, and per second on the clock."""

    cpu: float
    wall: float


def cpu_seconds(pid: int | None = None) -> float:
    """CPU time of a process, all its threads; this one's if None."""
    if pid is None or pid == os.getpid():
        return time.process_time()
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


def tree_cpu_seconds(root: int | None = None) -> float:
    """CPU time of a process (this one if None), of all that it started and they started, ended or not."""
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked; its parent has its time
        children.setdefault(int(fields[1]), []).append(int(entry))
        spent[int(entry)] = sum(map(int, fields[11:15])) / _TICK  # user, system, and of children waited for
    total, todo = 0.0, [os.getpid() if root is None else root]
    while todo:
        process = todo.pop()
        total += spent.get(process, 0.0)
        todo += children.get(process, [])
    return total


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


class Mark(NamedTuple):
    """How far a program was at some time."""

    steps: int
    time: float
    cpu: float


class Window:
    """Told how far a program is, says when it may end::

        window = Window(seconds=15, warm_up=3)
        while window.at(steps):     # the window opens warm_up seconds after the first steps
            steps += work()
        window.result()

    Args:
      seconds: from its beginning to its end, at least.
      warm_up: seconds from the first steps until it opens.
    """

    def __init__(self, seconds: float, warm_up: float):
        self._seconds, self._warm_up = seconds, warm_up
        self._first: float | None = None
        self._marks: list[Mark] = []

    def at(self, steps: int) -> bool:
        """Whether to go on, ``steps`` having been made since the start."""
        now = time.perf_counter()
        if steps == 0:
            return True
        if self._first is None:
            self._first = now
        if len(self._marks) == 2:
            return False
        opened = bool(self._marks)
        if not opened and now - self._first >= self._warm_up:
            self._marks.append(Mark(steps, now, tree_cpu_seconds()))
        elif opened and now - self._marks[0].time >= self._seconds and steps > self._marks[0].steps:
            self._marks.append(Mark(steps, now, tree_cpu_seconds()))
            return False
        return True

    def result(self) -> dict[str, float]:
        """``steps``, ``seconds`` and ``cpu`` of the window; RuntimeError if the program ended before it."""
        if len(self._marks) < 2:
            raise RuntimeError(
                f"The program ended with {len(self._marks)} of 2 marks; it must run for at least "
                f"{self._warm_up + self._seconds:g} s behind its first steps."
            )
        begin, end = self._marks
        return {
            "steps": end.steps - begin.steps,
            "seconds": end.time - begin.time,
            "cpu": end.cpu - begin.cpu,
        }
