"""Steps the workers on one thread in the order of their addition; for debugging and exact repetition.

Within a group, the worker with the fewest turns goes first.

Each pass calls `step()` of every worker whose `ready()` is true. Replay and services are called directly. No
decision depends on a clock. A worker may have `finished()`; once it is true, the worker gets no more turns.
If no worker was ready in a pass, none can become ready, because nothing else runs. The engine then raises a
`DeadlockError` that names every worker, with the result of its `why_not_ready()` if it has one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.context import entered
from launch.engines.base import Options, ended_normally
from launch.engines.in_process import LocalJob, Place
from launch.errors import DeadlockError, LaunchError
from launch.program import Program


def start(program: Program, options: Options) -> SerialJob:
    """Returns a job that runs inside of `wait()`, on the thread that calls it."""
    return SerialJob(program, options)


class SerialJob(LocalJob):
    """A program that runs on the thread that calls `wait()`; it is over when `wait()` returns."""

    def __init__(self, program: Program, options: Options) -> None:
        super().__init__(program, "serial", options, concurrent=False)
        self._runtime.stopped = _StopEvent()
        self._workers: list[Place] = []  # the nodes that take turns
        self._groups: list[str] = []  # the workers' groups
        self._started = False

    def stop(self, result: Any = None) -> None:
        self.outcome.offer_result(result)
        self._runtime.begin_stop()

    def wait(self, labels: Sequence[str] | None = None, *, timeout: float | None = None) -> Any:
        """Runs the program. With `labels` or `timeout` it may return between passes; call it to continue."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.over:
            try:
                self._run(self.ended(labels), deadline)
            except TimeoutError:
                raise
            except BaseException as error:
                self.outcome.fail(error)
                self._end()
                raise
        return super().wait(labels, timeout=0)

    def _run(self, ended: Callable[[], bool], deadline: float | None) -> None:
        if not self._started:
            self._started = True
            for place in self._places:
                self._guard(place, self._begin)
            self._workers = [place for place in self._places if place.works and place.state == "running"]
            self._groups = list(dict.fromkeys(place.leaf.context.group for place in self._workers))
        while not self._runtime.stopped.is_set():
            if ended():
                return
            if not self._pass():
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("The program is not over. Call wait() again to continue.")
        self._end()

    def _begin(self, place: Place) -> bool:
        if self._runtime.stopped.is_set():
            return True
        if not place.built:
            self._runtime.build(place)
        place.state = "running"
        node = place.leaf.node
        if node.is_function:
            with entered(self._runtime, place.leaf.context):
                node.call()
            place.state = "returned"
        elif node.runs(place.object) and not callable(getattr(place.object, "step", None)):
            raise LaunchError(
                f"node {place.label!r}: {type(place.object).__name__} has run() but no step(), so one thread "
                "cannot alternate between it and other nodes. Add step() (one unit of work) and ready() "
                "(whether step() would not block), or use another engine."
            )
        return True

    def _pass(self) -> bool:
        """Gives each worker one turn; returns False if all have finished.

        Raises:
          DeadlockError: No worker was ready.
        """
        working, moved = [], False
        # In a group, the worker with the fewest turns goes first. Otherwise the first actor takes all the
        # room in replay.
        self._workers.sort(key=lambda place: (self._groups.index(place.leaf.context.group), place.turns))
        for place in self._workers:
            if place.state != "running":
                continue
            finished = getattr(place.object, "finished", None)
            if finished is not None and finished():
                place.state = "returned"
                moved = True
                continue
            working.append(place)
            moved |= bool(self._guard(place, self._turn))
            if self._runtime.stopped.is_set():
                return True
        if working and not moved:
            raise DeadlockError(self._deadlock(working))
        return bool(working)

    def _turn(self, place: Place) -> bool:
        with entered(self._runtime, place.leaf.context):
            ready = getattr(place.object, "ready", None)
            if ready is not None and not ready():
                return False
            place.object.step()
            place.turns += 1
            return True

    def _guard(self, place: Place, action: Any) -> Any:
        """Calls `action(place)`; restarts the node or ends the program if it raises."""
        while True:
            try:
                return action(place)
            except (Exception, SystemExit) as error:
                if ended_normally(error, self._runtime.stopped.is_set()):
                    place.state = "returned"
                    return True
                if not self._may_restart(place, error):
                    return True
                action = self._begin

    def _deadlock(self, working: list[Place]) -> str:
        reasons = []
        for place in working:
            why = getattr(place.object, "why_not_ready", None)
            reasons.append(f"  {place.label}: " + (str(why()) if why is not None else "ready() is false"))
        return "No worker is ready, and nothing else runs that could change that:\n" + "\n".join(reasons)

    def _end(self) -> None:
        if not self.over:
            self._begin_stop()
            self._close(self._places)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
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
