"""Steps the workers on one thread in the order of their addition, for debugging and exactly repeatable runs.

Within a group, the worker with the fewest turns goes first.

Each pass calls `step()` of every worker whose `ready()` is true. Replay and services are called directly. No
decision depends on a clock. A worker may have `finished()`; then the worker gets no further turns.
If no worker was ready in a pass, none can become ready, because nothing else runs. The engine then raises a
`DeadlockError` that names every worker, with the result of its `why_not_ready()` if it has one.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from launch.context import entered, here
from launch.engines.base import ended_normally, no_worker
from launch.engines.in_process import LocalInstance, LocalJob
from launch.engines.options import Options
from launch.errors import DeadlockError, LaunchError, StopTimeoutWarning
from launch.handles import Target
from launch.process_state import OwnState
from launch.program import Program, ProgramSnapshot, ProgramState

_ENDLESS_S = 30.0  # after which a worker that nothing can end is named
_log = logging.getLogger("launch")


class SerialJob(LocalJob):
    """A program that runs on the thread that calls `wait()`; it is over when `wait()` returns."""

    def __init__(self, program: Program, engine: str, options: Options) -> None:
        super().__init__(program, engine, options, concurrent=False)
        self._state = self._runtime.state = OwnState(program.seed)
        self._runtime.stopped = _StopEvent()
        self._workers: list[LocalInstance] = []  # the nodes that take turns
        self._due: collections.deque[LocalInstance] = collections.deque()  # to take a turn in this pass
        self._in_turn = False
        self._interrupted = False  # whether a stop without a result waits for the end of the turn
        self._groups: list[str] = []  # the workers' groups
        self._tells_at = time.monotonic() + _ENDLESS_S
        self._started = False
        self._runs = False  # whether wait() is running nodes
        self._thread = threading.get_ident()  # which runs them

    def stop(self, result: Any = None) -> None:
        saves = self._program.snapshot is not None and self.outcome.error is None
        if result is None and saves and not self._interrupted:
            # Handlers change objects: the state is saved before they are called, between two turns.
            self._interrupted = True
            if self._started and not self._runs and threading.get_ident() == self._thread:
                self._end()  # No wait() runs that would do it.
                return
            # A turn may wait for something.
            expire = threading.Timer(self._options.stop_timeout, super().stop)
            expire.daemon = True
            expire.start()
            return
        super().stop(result)

    def wait(self, labels: Sequence[str] | None = None, *, timeout: float | None = None) -> Any:
        """Runs the program. With `labels` or `timeout` it may return between passes; call it to continue."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.over:
            self._runs, self._thread = True, threading.get_ident()
            try:
                with self._state.entered():
                    self._run(self.ended(labels), deadline)
            except TimeoutError:
                raise
            except BaseException as error:
                self.outcome.fail(error)
                self._end()
                raise
            finally:
                self._runs = False
        return super().wait(labels, timeout=0)

    def _run(self, ended: Callable[[], bool], deadline: float | None) -> None:
        if not self._started:
            self._started = True
            if not self._continue():
                for instance in self._instances:
                    self._begin(instance)
                self._workers = [each for each in self._instances if each.works and each.state == "running"]
            self._groups = list(dict.fromkeys(instance.leaf.context.group for instance in self._workers))
        if self._has_no_worker():
            raise no_worker(self._program)
        with entered(None, None):  # a pass assigns this thread to one node after the other
            while not self._is_stopped():
                if ended():
                    return
                if not self._pass():
                    break
                if time.monotonic() >= self._tells_at:
                    self._tell_endless()
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError("The program is not over. Call wait() again to continue.")
        self._end()

    def _tell_endless(self) -> None:
        """Tells, once, which workers this engine steps without end: a program may end in a `run()` only."""
        self._tells_at = math.inf
        endless = [each for each in self._workers if not callable(getattr(each.object, "finished", None))]
        if endless:
            turns = ", ".join(f"{each.label} ({each.turns:,} steps)" for each in endless)
            _log.warning(
                "program %r: the serial engine calls step(), never run(), and %s cannot end: got no "
                "finished(). Call launch.stop() in step(), add finished(), or use the engine threads.",
                *(self._program.name, turns),
            )

    def _begin(self, instance: LocalInstance) -> None:
        """Creates a node's object or calls its function, and tries again while it has restarts left."""
        node = instance.leaf.node
        while not self._runtime.stopped.is_set():
            self._close_failed(instance)
            try:
                if instance.target is None:
                    self._runtime.build(instance)
                instance.state = "running"
                if node.is_function:
                    with entered(self._runtime, instance.leaf.context):
                        node.call()
                    instance.state = "returned"
                elif node.runs(instance.object) and not callable(getattr(instance.object, "step", None)):
                    raise LaunchError(
                        f"node {instance.label!r}: {type(instance.object).__name__} has run() but no step(), "
                        "so one thread cannot alternate between it and other nodes. Add step() (one unit of "
                        "work) and ready() (whether step() would not block), or use another engine."
                    )
                return
            except (Exception, SystemExit) as error:
                if not self._recovers(instance, error):
                    return

    def _has_failed(self, instance: LocalInstance, error: BaseException, life: int) -> None:
        if self._may_restart(instance, error, life):
            self._begin(instance)

    def _recovers(self, instance: LocalInstance, error: BaseException) -> bool:
        """Whether to restart a node that raised `error`; False if it ended normally or the program ends."""
        if ended_normally(error, self._runtime.stopped.is_set()):
            instance.state = "returned"
            return False
        return self._may_restart(instance, error, instance.restarts)

    def _pass(self) -> bool:
        """Gives each worker one turn; returns False if all have finished.

        Raises:
          DeadlockError: No worker was ready.
        """
        working, moved = [], bool(self._due)
        if not self._due:
            # In a group, the worker with the fewest turns goes first. The first actor would take all the
            # room in replay.
            if len(self._groups) < len(self._workers):
                self._workers.sort(key=lambda each: (self._groups.index(each.leaf.context.group), each.turns))
            self._due.extend(self._workers)
        while self._due:
            instance = self._due.popleft()
            if instance.state != "running":
                continue
            worker = instance.object
            finished, ready = getattr(worker, "finished", None), getattr(worker, "ready", None)
            here.runtime, here.context = self._runtime, instance.leaf.context
            self._in_turn = True
            try:
                if finished is not None and finished():
                    instance.state, moved, self._in_turn = "returned", True, False
                    continue
                working.append(instance)
                if ready is None or ready():
                    worker.step()
                    instance.turns += 1
                    moved = True
            except (Exception, SystemExit) as error:
                moved = True
                if self._recovers(instance, error):
                    self._begin(instance)
            self._in_turn = False
            if self._is_stopped():
                return True
        if working and not moved:
            raise DeadlockError(self._deadlock(working))
        return bool(working)

    def _deadlock(self, working: list[LocalInstance]) -> str:
        reasons = []
        for instance in working:
            why = getattr(instance.object, "why_not_ready", None)
            reasons.append(f"  {instance.label}: " + (str(why()) if why is not None else "ready() is false"))
        return "No worker is ready, and nothing else runs that could change that:\n" + "\n".join(reasons)

    def _is_stopped(self) -> bool:
        return self._interrupted or self._runtime.stopped.is_set()

    def _continue(self) -> bool:
        """Takes the nodes' objects from the program's snapshot; returns whether it has any."""
        if self._program.snapshot is None:
            return False
        with entered(self._runtime, None):
            state = self._program.snapshot.load()
        if state is None:
            return False
        by_label = {instance.label: instance for instance in self._instances}
        for label, instance in by_label.items():
            instance.object, instance.state = state.objects[label], state.states[label]
            instance.turns = state.turns[label]
            instance.target = Target(instance.object, label)
        self._workers = [by_label[label] for label in state.order]
        self._due.extend(by_label[label] for label in state.due)
        for handler in state.stop_handlers:
            self._runtime.add_stop_handler(handler)
        return True

    def _save(self, snapshot: ProgramSnapshot) -> None:
        state = ProgramState(
            objects={instance.label: instance.object for instance in self._instances},
            states={instance.label: instance.state for instance in self._instances},
            turns={instance.label: instance.turns for instance in self._instances},
            order=[instance.label for instance in self._workers],
            due=[instance.label for instance in self._due],
            stop_handlers=list(self._runtime.stop_handlers),
        )
        with entered(self._runtime, None):
            snapshot.save(state)

    def _end(self) -> None:
        if not self.over:
            with self._state.entered():
                self._end_here()

    def _end_here(self) -> None:
        between_turns = self._started and not self._in_turn and not self._runtime.stopped.is_set()
        snapshot = self._program.snapshot
        if snapshot is not None and self._interrupted and self.outcome.error is None:
            if between_turns:
                self._save(snapshot)
            elif self._started:
                warnings.warn(
                    f"{self._program.name}: a turn did not end within stop_timeout="
                    f"{self._options.stop_timeout:g} s of the stop, so that the program's exact state "
                    "was not saved.",
                    StopTimeoutWarning,
                )
        self._begin_stop()
        self._close(self._instances)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self._interrupted:
            self.stop()
        self._end()
        if error is None and self.outcome.error is not None:
            raise self.outcome.error


class _StopEvent(threading.Event):
    """An event whose `wait` without a timeout raises, because no other thread could stop the program."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None and not self.is_set():
            raise DeadlockError(
                "A node waits for the stop, and the serial engine has no other thread. Return from the "
                "function, or use another engine."
            )
        return super().wait(timeout)
