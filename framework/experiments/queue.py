"""The queue of a sweep: a thread for each slot, which runs one variant after the other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.experiments.executors import STOPPED, LocalRun, SlurmRun
from framework.experiments.slots import Slot
from framework.experiments.sweep import SweepFolder, Variant
from launch.texts import how_it_ended, printable, why_killed

Execution = LocalRun | SlurmRun


@dataclass
class Trial:
    """Variants that one slot runs in turn; subclasses look at their numbers."""

    variants: Sequence[Variant]

    def prunes(self, variant: Variant, row: dict[str, Any], cpu_seconds: float | None) -> bool:
        """Looks at the row of an evaluation; returns whether the run is to end."""
        return False

    def end(self, states: Sequence[str]) -> None:
        """Called at the end, with the states of the variants: of all, or up to one without a result."""


@dataclass
class Running:
    """A run that a slot runs now; `newest` has its env steps and its newest return."""

    trial: Trial
    variant: Variant
    execution: Execution
    rows: Tail
    is_pruned: bool = False
    begin: float = field(default_factory=time.monotonic)
    newest: dict[str, Any] = field(default_factory=dict)


class RunQueue:
    """Runs variants in slots, within its `with` block, until all have ended or `stop` is called.

    Args:
      folder: of the sweep.
      trials: the variants. The next one is drawn when a slot is free.
      slots: parts of the machine.
      execute: starts the run of this name in a slot.
      again: whether runs that have failed are repeated.
      tell: called with a name and its state when a run begins or ends.
    """

    def __init__(
        self,
        folder: SweepFolder,
        trials: Iterable[Trial],
        slots: Sequence[Slot],
        execute: Callable[[str, Slot], Execution],
        again: bool = False,
        tell: Callable[[str, str], None] = lambda name, state: None,
    ):
        self._folder, self._trials, self._execute = folder, iter(trials), execute
        self._again, self._tell = again, tell
        self._lock, self._drawing, self._looking = (threading.Lock() for _ in range(3))
        self._asked = 0  # How often it was asked to stop.
        self._errors: list[BaseException] = []
        self._running: dict[str, Running] = {}
        self._threads = [threading.Thread(target=self._work, args=(slot,)) for slot in slots]

    def __enter__(self) -> RunQueue:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if any(thread.is_alive() for thread in self._threads):
            self.stop()
        for thread in self._threads:
            thread.join()

    def wait(self, timeout: float) -> bool:
        """Waits until all has ended, and looks at what runs; raises the error of a slot, if one has failed.

        Returns:
          False after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for running in self.running():
            self._look(running)
        is_over = not any(thread.is_alive() for thread in self._threads)
        if is_over and self._errors:
            raise self._errors[0]
        return is_over

    def running(self) -> list[Running]:
        """What runs now."""
        with self._lock:
            return list(self._running.values())

    def stop(self) -> None:
        """Asks all runs to save a checkpoint and to end; then to end at once; then it kills them."""
        with self._lock:
            self._asked += 1
            for running in self._running.values():
                running.execution.stop(at_once=self._asked > 2)

    kill = stop

    def _work(self, slot: Slot) -> None:
        try:
            slot.bind()
            while not self._asked:
                with self._drawing:
                    trial = next(self._trials, None)
                if trial is None:
                    return
                states: list[str] = []
                for variant in trial.variants:
                    states.append(self._run(trial, variant, slot))
                    if states[-1] != "finished":
                        break
                trial.end(states)
        except BaseException as error:  # `wait` raises it.
            self._errors.append(error)
            self.stop()

    def _run(self, trial: Trial, variant: Variant, slot: Slot) -> str:
        """Runs one variant, if it is not done already; returns its state."""
        folder, name = self._folder, variant.name
        known = folder.states.get(name, {}).get("state")
        if folder.outcome(name) is not None:
            return "finished"
        if known == "pruned" or (known == "failed" and not self._again):
            return known
        with self._lock:
            if self._asked:
                return "stopped"
            folder.record(name, state="stopped")  # If this process is killed.
            begin = folder.log(name).stat().st_size if folder.log(name).exists() else 0
            tail = Tail(folder.run(name) / "metrics.jsonl")
            running = Running(trial, variant, self._execute(name, slot), tail)
            self._running[name] = running
        self._tell(name, "running")
        code = running.execution.wait()
        self._look(running)
        with self._lock:
            del self._running[name]
        state, error = "failed", ""
        if code == 0 and folder.outcome(name) is not None:
            state = "finished"
        elif code in STOPPED:
            state = "pruned" if running.is_pruned else "stopped"
        else:
            error = _last_error(folder.log(name), begin) or f"It {how_it_ended(code)}.{why_killed(code)}"
        folder.record(
            name, state=state, seconds=time.monotonic() - running.begin, **({"error": error} if error else {})
        )
        self._tell(name, state)
        return state

    def _look(self, running: Running) -> None:
        """Reads the new rows of a run, and ends it if its trial prunes it."""
        with self._looking:
            rows = running.rows.new()
            running.newest.update(newest(rows))
            for row in rows:
                if row.get("label") == "evaluator" and row.get("episode_return") is not None:
                    seconds = running.execution.cpu_seconds()
                    if not running.is_pruned and running.trial.prunes(running.variant, row, seconds):
                        running.is_pruned = True
                        running.execution.stop()


def newest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last env steps and the last return of an evaluation in rows of metrics, where they have them."""
    found: dict[str, Any] = {}
    for row in rows:
        names = ("env_steps", "episode_return") if row.get("label") == "evaluator" else ("env_steps",)
        found.update({name: row[name] for name in names if row.get(name) is not None})
    return found


class Tail:
    """The rows that a file of metrics gets; it may be replaced by a shorter one."""

    def __init__(self, path: Path):
        self._path, self._at = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The rows since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            self._at = self._at if file.seek(0, 2) >= self._at else 0
            file.seek(self._at)
            lines = file.read().split(b"\n")
        self._at += sum(len(line) + 1 for line in lines[:-1])  # The last one is not whole yet.
        rows = []
        for line in lines[:-1]:
            try:
                rows.append(json.loads(line))
            except ValueError:  # The end of a run that was killed.
                continue
        return [row for row in rows if isinstance(row, dict)]


def _last_error(log: Path, begin: int) -> str:
    """The last error in a log, or its last line, from the byte `begin` on."""
    with open(log, "rb") as file:
        file.seek(max(begin, file.seek(0, 2) - 100_000))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return printable((errors or lines or [""])[-1].removeprefix("error: "))
