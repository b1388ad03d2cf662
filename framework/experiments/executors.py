"""Where the runs of a sweep run: processes of this machine, or jobs of Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import psutil

from framework.experiments.slots import Slot
from framework.experiments.sweep import SweepFolder
from framework.runs.run_lock import RunError, RunLock
from launch import extras, platforms

#: Exit codes of a run that has stopped and can go on: after SIGHUP, SIGINT or SIGTERM, at whatever point.
STOPPED = (129, 130, 143, -signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM)
PARENT = "REPERTORY_SWEEP"  # The variable with the process that a run ends with.


def run(arguments: Sequence[str], log: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts `repertory` with these arguments in a process that ends, with a checkpoint, after this one.

    Ctrl-C does not reach it: who started it asks it to stop, once.
    """
    own = {PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1", **variables}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [platforms.interpreter(), "-m", "framework.commands", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own},
            start_new_session=True,
        )


class LocalRun:
    """A run as a process of this machine.

    Args:
      folder: of the sweep.
      name: of the run.
      arguments: of `repertory`.
      slot: its cores and devices. The calling thread is bound to them, and has to live as long as the run.
    """

    def __init__(self, folder: SweepFolder, name: str, arguments: Sequence[str], slot: Slot):
        self._process = run(arguments, str(folder.log(name)), slot.variables())

    def wait(self) -> int:
        """Waits for the end of the run; returns its exit code."""
        return self._process.wait()

    def stop(self, at_once: bool = False) -> None:
        """Asks the run to save a checkpoint and to end, or kills it."""
        self._process.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)

    def cpu_seconds(self) -> float | None:
        """CPU seconds of its processes so far; None if they are not known."""
        try:
            own = psutil.Process(self._process.pid)
            return sum(sum(each.cpu_times()[:4]) for each in (own, *own.children(recursive=True)))
        except psutil.NoSuchProcess:
            return None


class SlurmRun:
    """A run as a job of Slurm, or of the `cluster` in the sweep's `slurm`, which submitit knows.

    It does not end with the sweep's process. The arguments are `LocalRun`'s.
    """

    def __init__(self, folder: SweepFolder, name: str, arguments: Sequence[str]):
        try:
            import submitit
        except ImportError as error:
            advice = extras.install("slurm")
            raise RunError(f"executor 'slurm' needs a package that is not installed: {advice}") from error
        parameters = {"name": "repertory", "timeout_min": 24 * 60, **folder.sweep.slurm}
        self._lock, self._log, self._is_stopped = RunLock(folder.run(name)), str(folder.log(name)), False
        try:
            executor = submitit.AutoExecutor(folder.path / "jobs", cluster=parameters.pop("cluster", "slurm"))
            executor.update_parameters(**parameters)
            self._job = executor.submit(_Job(), arguments, self._log)
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise RunError(
                f"executor 'slurm': {error} Correct slurm, or use the executor 'local'."
            ) from error

    def wait(self) -> int:
        """Waits for the end of the job; returns the exit code of the run."""
        try:
            return int(self._job.result())
        except Exception as error:  # Submitit has kinds of its own, with the traceback as the text.
            with open(self._log, "a", encoding="utf-8") as log:
                log.write(f"{error}\n")
            return STOPPED[0] if self._is_stopped else 1

    def stop(self, at_once: bool = False) -> None:
        """Asks the run to save a checkpoint and to end, on whatever host; or takes the job away."""
        self._is_stopped = True
        if self._lock.pid() is not None and not at_once:
            self._lock.ask_to_stop()
        else:
            self._job.cancel()

    def cpu_seconds(self) -> None:
        """None: it runs elsewhere."""


class _Job:
    """What a job calls. Submitit submits it again after a preemption, or at the end of its time."""

    def __call__(self, arguments: Sequence[str], log: str) -> int:
        process = run(arguments, log, {})
        try:
            return process.wait()
        finally:
            if process.poll() is None:  # The job is taken away: the run has as long as the cluster gives it.
                process.terminate()
                process.wait()

    def checkpoint(self, *arguments: Any) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, *arguments)
