"""The run of `repertory train`: its display, its end, and what is said of it."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
from collections.abc import Iterator
from typing import IO, Any

import launch
from framework.checkpoints import CheckpointError
from framework.commands.options import CommandError
from framework.commands.plot import draw_run
from framework.loggers import ProgressDisplay
from framework.loggers.files import is_explained
from framework.runs.run_config import RunConfig
from framework.runs.run_folder import RunFolder
from framework.runs.run_lock import unwritable
from launch.running import stopped_by_signals
from launch.texts import printable, rounded
from launch.view import NodesView

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_POLL_S = 0.5  # Seconds between two updates of the display.


def run(folder: RunFolder, program: launch.Program, lock: IO[str]) -> int:
    """Runs the program of `folder`, which `lock` locks, and reports its end; returns the exit code."""
    program.contexts = (lambda: contextlib.nullcontext(lock),)  # The program's own would lock the folder.
    in_words = f"{folder.agent} in {folder.environment_name}, engine {folder.engine}, folder {folder.path}"
    print(printable(in_words))
    try:
        result, stopped_by = _run(program, folder)
    except launch.LaunchError as error:
        raise CommandError(_explain(error, folder)) from error
    _tell(folder, result, stopped_by)
    draw_run(folder)  # Takes seconds.
    return 0 if stopped_by is None else 128 + stopped_by


def _tell(folder: RunFolder, result: Any, stopped_by: int | None) -> None:
    """Prints how the run ended and what to do with it, and writes its result if it has one."""
    if stopped_by is not None:
        latest = folder.checkpointer.latest()
        where = f"at {latest.name}" if latest else "before the first checkpoint"
        print(f"Stopped by {signal.Signals(stopped_by).name} {where}.")
        if latest:
            print(f"Go on with: repertory train --resume {folder.allowed}")
        return
    result = dict(result or {})
    folder.write_json("result.json", result)
    print(describe_result(result, folder.config))
    best = "" if result.get("episode_return") is None else " --checkpoint best"
    print(f"Results are in {folder.path}. Look at them: repertory eval {folder.allowed}{best}")


def _run(program: launch.Program, folder: RunFolder) -> tuple[Any, int | None]:
    """Returns the result, and the signal that ended the run or None."""
    restarts = dict.fromkeys(program.groups, folder.restarts) if folder.restarts else None
    config = folder.config
    shown: dict[str, Any] = {"counts": {}, "labels": {}}
    with (
        launch.start(program, folder.engine, directory=folder.path, restarts=restarts) as job,
        stopped_by_signals(job) as received,
        ProgressDisplay(
            *(config.max_env_steps, config.target_return, config.max_learner_steps),
            below=NodesView(job.status),
        ) as display,
    ):
        try:
            while not job.over:
                try:
                    job.wait(timeout=_POLL_S)
                except TimeoutError:
                    if job.over:
                        raise
                    newest = None if received else _snapshot(job)
                    shown = newest or shown
                    display.update(newest)
        finally:
            # Shows how the nodes ended, and the last numbers, which the result has.
            display.update(None if received else _at_the_end(shown, job.result))
        return job.result, (received[0] if received else None)


def _snapshot(job: Any) -> Any:
    """Returns the monitor's newest numbers; None while the program starts or ends."""
    try:
        return job.client("monitor").with_timeout(5.0).snapshot()
    except (launch.LaunchError, ValueError):  # ValueError: its sockets are closed; wait() raises its error.
        return None


def _at_the_end(snapshot: dict[str, Any], result: Any) -> dict[str, Any] | None:
    """Returns the last snapshot with the newer numbers of the result; None without a result."""
    if not isinstance(result, dict):
        return None
    counts, labels = dict(snapshot["counts"]), dict(snapshot["labels"])
    for name in ("env_steps", "learner_steps"):
        if name in result:
            counts[name] = max(counts.get(name, 0), result[name])
    if "episode_return" in result:
        labels["evaluator"] = result
    return {**snapshot, "counts": counts, "labels": labels}


def describe_result(result: dict[str, Any], config: RunConfig) -> str:
    """Returns a sentence on why the run ended and what it reached."""
    reason, steps, reached = (result.get(name) for name in ("reason", "env_steps", "episode_return"))
    after = f" after {steps:,} env steps" if steps is not None else ""
    mean = ""
    if reached is not None:
        # The learner goes on while an evaluation is played, so these may not be the last parameters.
        version = result.get("variables_version")
        of = f" (parameters of learner step {version:,})" if version else ""
        mean = f"; greedy mean return over {result.get('episodes')} episodes{of}: {rounded(reached, 1)}"
    if reason == "target_return":
        return f"Reached the target return of {config.target_return:g}{after}{mean}."
    if reason == "max_env_steps":
        target = config.target_return
        missed = target is not None and (reached is None or reached < target)
        short = f" The target return of {target:g} was not reached." if missed else ""
        return f"The budget of {config.max_env_steps:,} env steps is spent{mean}.{short}"
    if reason == "max_learner_steps":
        return f"The budget of {config.max_learner_steps:,} learner steps is spent{after}{mean}."
    if reason == "plan_ended":
        return f"The plan has ended after {result['learner_steps']:,} learner steps."
    return f"The program ended{after}{f' ({reason})' if reason else ''}."


def _explain(error: Exception, folder: RunFolder) -> str:
    cause = error.__cause__
    node = getattr(error, "node", None)
    if isinstance(cause, CheckpointError):
        return str(cause)  # Names the file; the node that asked for the checkpoint did not fail.
    if node is not None and isinstance(cause, OSError) and is_explained(cause):
        return f"node {node!r}: {unwritable(folder.path, cause)}"
    reason, _, log = str(error).partition("\n\n")
    if shown := getattr(error, "frames", "") or log:
        print(printable(shown), file=sys.stderr)  # First, so that the reason is at the bottom.
    path = folder.path
    logs = f"; logs of its nodes are in {path / 'logs'}" if (path / "logs").is_dir() else ""
    return f"{reason}\nThe run ended in {path}{logs}."


@contextlib.contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """Turns errors of files into one clear error. Those of the nodes are of another kind."""
    try:
        yield
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        if error.filename is None and error.errno not in _OF_DISKS and not is_explained(error):
            raise
        raise CommandError(str(unwritable(folder.path, error))) from error
