"""One run from its start to its end: its folder, its display, its files, and what is said of it."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import launch
from framework.commands.plot import draw_run
from framework.loggers import ProgressDisplay
from framework.loggers.files import explained
from framework.runs.run_config import RunConfig
from framework.runs.run_folder import RunError, RunFolder
from launch.engines.base import Job
from launch.running import stopped_by_signals
from launch.texts import printable, rounded
from launch.view import NodesView

_POLL_S = 0.5  # Seconds between two updates of the display.


def begin(
    folder: RunFolder, program: launch.Program, lines: Sequence[str] = (), progress: bool = True
) -> Job:
    """Runs the program of `folder`, which is new or continues, in it; see `run`.

    Args:
      folder: the run.
      program: its program.
      lines: what to print before it starts.
      progress: whether to show how far the run is.
    """
    with folder.continuing() as lock, folder.begun():
        folder.save()
        (folder.path / "result.json").unlink(missing_ok=True)  # If this run is interrupted, it has no result.
        for line in lines:
            print(line)
        return run(folder, program, lock, progress)


def run(folder: RunFolder, program: launch.Program, lock: IO[str], progress: bool = True) -> Job:
    """Runs the program of `folder`, which `lock` locks, tells of its end, and returns its ended job.

    Raises:
      NodeError: A node failed.
      ProgramInterrupted: A signal stopped the program cleanly.
    """
    # The program's own, `continuing` and `begun`, would lock the folder.
    program.contexts = (lambda: contextlib.nullcontext(lock), *program.contexts[2:])
    in_words = f"{folder.agent} in {folder.environment_name}, engine {folder.engine}, folder {folder.path}"
    print(printable(in_words))
    job, stopped_by = _run(program, folder, progress)
    if stopped_by is None:
        result = job.result if isinstance(job.result, dict) else {}
        folder.write_json("result.json", result)
        print(describe_result(result, folder.config))
        print(f"Results are in {folder.path}. Look at them: repertory eval {folder.allowed}")
    else:
        latest = folder.checkpointer.latest()
        where = f"at {latest.name}" if latest else "before the first checkpoint"
        print(f"Stopped by {signal.Signals(stopped_by).name} {where}.")
        if latest:
            print(f"Go on with: repertory train --resume {folder.allowed}")
    draw_run(folder)  # Takes seconds.
    if stopped_by is not None:
        raise launch.ProgramInterrupted(stopped_by, job)
    return job


def _run(program: launch.Program, folder: RunFolder, progress: bool) -> tuple[Job, int | None]:
    """Returns the ended job, and the signal that ended it or None."""
    restarts = dict.fromkeys(program.groups, folder.restarts) if folder.restarts else None
    config = folder.config
    shown: dict[str, Any] = {"counts": {}, "labels": {}}
    with (
        launch.start(program, folder.engine, directory=folder.path, restarts=restarts) as job,
        stopped_by_signals(job) as received,
        ProgressDisplay(
            *(config.max_env_steps, config.target_return, config.max_learner_steps),
            below=NodesView(job.status),
        )
        if progress
        else contextlib.nullcontext() as display,
    ):
        try:
            while not job.over:
                try:
                    job.wait(timeout=_POLL_S)
                except TimeoutError:
                    if job.over:
                        raise
                    if display is not None:
                        newest = None if received else _snapshot(job)
                        shown = newest or shown
                        display.update(newest)
        finally:
            if display is not None:
                # Shows how the nodes ended, and the last numbers, which the result has.
                display.update(None if received else at_the_end(shown, job.result))
        return job, (received[0] if received else None)


def _snapshot(job: Any) -> Any:
    """Returns the monitor's newest numbers; None while the program starts or ends."""
    try:
        return job.client("monitor").with_timeout(5.0).snapshot()
    except (launch.LaunchError, ValueError):  # ValueError: its sockets are closed; wait() raises its error.
        return None


def at_the_end(snapshot: dict[str, Any], result: Any) -> dict[str, Any] | None:
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


def new_folder(agent: str, environment: str, seed: int) -> Path:
    """Makes a folder such as `runs/dqn-CartPole-v1-seed1-20260131-120000`.

    A run that begins in the same second gets another folder.
    """
    place = environment.partition(":")[2] or environment
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{agent.rpartition(':')[2]}-{place.replace('/', '-').replace(':', '-')}-seed{seed}-{now}"
    for ending in itertools.count(1):
        path = Path("runs", name if ending == 1 else f"{name}-{ending}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            advice = "Or choose another folder with --directory."
            raise RunError(f"{explained(error, error.filename or path).strerror} {advice}") from error
    raise AssertionError


@contextlib.contextmanager
def removed_if_empty(path: Path) -> Iterator[None]:
    """Removes a new folder after the block if errors before the first file leave it empty."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.removedirs(path)
