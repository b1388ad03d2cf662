"""`launch` and `start`: run a program and return its result."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launch import platforms
from launch.engines.base import ENGINES, Job
from launch.engines.options import Options, Resources, make_options
from launch.program import Program
from launch.texts import check_known


class ProgramInterrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP asked the program to stop, and it has stopped cleanly.

    It is a `KeyboardInterrupt`, so that a script that does not catch it ends with a non-zero exit code.

    Attributes:
      signal: the first signal.
      job: the ended job; `job.result` is a node's argument to `stop`, `job.outcome.error` a node's failure.
    """

    def __init__(self, signal_number: int, job: Job) -> None:
        self.signal = signal.Signals(signal_number)
        self.job = job
        super().__init__(f"stopped by {self.signal.name}")


def start(
    program: Program,
    engine: str = "processes",
    *,
    resources: Mapping[str, Resources | Mapping[str, Any]] | None = None,
    restarts: Mapping[str, int] | None = None,
    min_nodes: Mapping[str, int] | None = None,
    min_nodes_timeout: float | None = None,
    stop_timeout: float = 10.0,
    heartbeat_timeout: float | None = 60.0,
    directory: str | os.PathLike[str] | None = None,
    preload: Sequence[str] | None = None,
) -> Job:
    """Starts a program and returns at once; see `launch` for the arguments.

    ```python
    with launch.start(program) as job:
        result = job.wait()
    ```
    """
    if not isinstance(program, Program):
        raise TypeError(
            f"program: got {program!r}, expected a Program. Give an instance: launch.Program(NAME), or what "
            "make_program(agent, environment) returns."
        )
    check_known("engine", [engine], ENGINES, "one of")
    module, name = ENGINES[engine]
    options = make_options(
        program,
        resources,
        min_nodes,
        restarts=dict(restarts or {}),
        min_nodes_timeout=program.min_nodes_timeout if min_nodes_timeout is None else min_nodes_timeout,
        stop_timeout=stop_timeout,
        heartbeat_timeout=heartbeat_timeout,
        directory=None if directory is None else os.path.abspath(os.fspath(directory)),
        preload=program.preload if preload is None else preload,
    )
    return begin(program, engine, getattr(importlib.import_module(f"launch.engines.{module}"), name), options)


def begin(program: Program, engine: str, make_job: Callable[..., Job], options: Options) -> Job:
    """Starts a program whose options are checked, with the job that `make_job` makes; see `start`."""
    for check in program.checks:
        check(engine, options)
    platforms.open_standard_streams()
    try:
        files = []
        for context in program.contexts:
            given = options.at_end.enter_context(context())
            with contextlib.suppress(AttributeError, OSError):  # It is no file, or one in memory.
                files.append(given.fileno())
        job = make_job(program, engine, dataclasses.replace(options, files=files))
    except BaseException:
        options.at_end.close()
        raise
    for function in program.when_started:
        function(job)
    return job


def launch(
    program: Program,
    engine: str = "processes",
    *,
    resources: Mapping[str, Resources | Mapping[str, Any]] | None = None,
    restarts: Mapping[str, int] | None = None,
    min_nodes: Mapping[str, int] | None = None,
    min_nodes_timeout: float | None = None,
    stop_timeout: float = 10.0,
    heartbeat_timeout: float | None = 60.0,
    directory: str | os.PathLike[str] | None = None,
    preload: Sequence[str] | None = None,
) -> Any:
    """Runs a program and returns when it has ended and everything is cleaned up.

    Args:
      program: the program.
      engine: name of the engine: "serial", "threads", "processes", "ray", "launchpad" or "launchpad_mt".
      resources: by group, `Resources` or a dict of its fields, instead of the program's.
      restarts: by group, how often each of its nodes may fail and be restarted, with a growing pause; 0 for
        other groups.
      min_nodes: by group, the number of its nodes that the program needs to continue, instead of the
        program's. The others may be lost, or missing at the start: they are restarted, however often, with
        the same pauses. Needs an engine with processes; within one process nothing can be lost.
      min_nodes_timeout: seconds for which such a group may have fewer nodes before the program fails. None
        is the program's value, 300 by default.
      stop_timeout: seconds that the workers have to return after a stop began, and each node to close; more
        for the groups in the program's `stop_timeouts`. After that, processes are killed (with a
        `StopTimeoutWarning`) and threads are reported as an error.
      heartbeat_timeout: seconds after which a process without a sign of life is killed and counts as failed
        (a stopped process, or native code that does not release the interpreter); half as long for groups
        with `min_nodes`; None never checks.
      directory: folder of the run, for `logs/<group>-<index>.log` and `status.json`.
      preload: modules that the fork server imports once for all processes, instead of the program's;
        None in both means torch if the launching process has imported it. They must not use a GPU. Without
        effect if they start threads or where processes are not forked (see `launch.platforms`): each node
        is then a fresh interpreter.

    Returns:
      The first result that a node gave to `launch.stop(result)`, else None.

    Raises:
      NodeError: A node failed. The error is the first one's, with the traceback of its process.
      ProgramInterrupted: A SIGINT, SIGTERM or SIGHUP (on the main thread only) stopped the program cleanly. A
        second signal ends the nodes at once.
    """
    job = start(
        program,
        engine,
        resources=resources,
        restarts=restarts,
        min_nodes=min_nodes,
        min_nodes_timeout=min_nodes_timeout,
        stop_timeout=stop_timeout,
        heartbeat_timeout=heartbeat_timeout,
        directory=directory,
        preload=preload,
    )
    with job, stopped_by_signals(job) as received:
        try:
            result = job.wait()
        except Exception:
            if not received:
                raise
    if received:
        raise ProgramInterrupted(received[0], job) from job.outcome.error
    return result


@contextlib.contextmanager
def stopped_by_signals(job: Job) -> Iterator[list[int]]:
    """Makes a first SIGINT, SIGTERM or SIGHUP stop the job cleanly and a second one kill it.

    The list holds the received signals. Has no effect on threads other than the main one.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handler(number: int, frame: Any) -> None:
        received.append(number)
        # On a separate thread, because the interrupted main thread may hold a lock that the stop needs.
        threading.Thread(target=job.stop if len(received) == 1 else job.kill, daemon=True).start()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
