"""A thread per worker in the launching process, and direct calls; for notebooks and debugging."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import Any

from launch.context import activate, deactivate, entered
from launch.engines.base import (
    Job,
    Options,
    Outcome,
    ended_normally,
    find_leaf,
    node_error,
    plan,
)
from launch.engines.local import LocalRuntime, Place
from launch.errors import LaunchError
from launch.program import Program


def start(program: Program, options: Options) -> ThreadsJob:
    """Starts the program on threads of its own."""
    return ThreadsJob(program, options)


class ThreadsJob(Job):
    """The objects are made one after another, then every worker gets a thread."""

    def __init__(self, program: Program, options: Options) -> None:
        self.outcome = Outcome()
        self._program = program
        self._options = options
        self._job, self._units = plan(program, "threads", options)
        self._runtime = LocalRuntime(self._units, self.stop, concurrent=True)
        self._places = list(self._runtime.places.values())
        self._changed = threading.Condition()
        self._threads: dict[str, threading.Thread] = {}
        activate(self._runtime)
        threading.Thread(target=self._supervise, name=f"launch-{program.name}", daemon=True).start()

    def stop(self, result: Any = None) -> None:
        self.outcome.offer_result(result)
        try:
            self._runtime.begin_stop()
        finally:
            with self._changed:
                self._changed.notify_all()

    def _supervise(self) -> None:
        try:
            if self._build_all():
                self._run_workers()
        except Exception as error:
            self.outcome.fail(error)
        finally:
            self._end()

    def _build_all(self) -> bool:
        for place in self._places:
            if self._runtime.stopped.is_set():
                return False
            while True:
                try:
                    self._runtime.build(place)
                    break
                except (Exception, SystemExit) as error:
                    if not self._forgive(place, error, lived=0.0):
                        return False
            place.state = "running"
        return True

    def _run_workers(self) -> None:
        for place in self._places:
            node = place.leaf.node
            if node.is_function or node.runs(place.object):
                thread = threading.Thread(target=self._work, args=(place,), name=place.label, daemon=True)
                self._threads[place.label] = thread
        for thread in self._threads.values():
            thread.start()
        with self._changed:
            while not self._runtime.stopped.is_set():
                if self._threads and all(
                    p.state == "returned" for p in self._places if p.label in self._threads
                ):
                    return
                self._changed.wait()

    def _work(self, place: Place) -> None:
        node = place.leaf.node
        while True:
            born = time.monotonic()
            try:
                with entered(self._runtime, place.leaf.context):
                    self._runtime.build(place)
                    place.state = "running"
                    if node.is_function:
                        node.call()
                    else:
                        place.object.run()
                break
            except BaseException as error:
                if ended_normally(error, self._runtime.stopped.is_set()):
                    break
                if not self._forgive(place, error, time.monotonic() - born):
                    return
        with self._changed:
            place.state = "returned"
            self._changed.notify_all()

    def _forgive(self, place: Place, error: BaseException, lived: float) -> bool:
        """Prepares a restart if the node has one left; else ends the program. Returns whether to go on."""
        place.error = f"{type(error).__name__}: {error}"
        allowed = self._options.restarts.get(place.unit.group, 0)
        if place.restarts < allowed and not self._runtime.stopped.is_set():
            place.state = "restarting"
            place.restarts += 1
            place.built = False
            if not self._runtime.stopped.wait(place.back_off.after(lived)):
                return True
        place.state = "failed"
        self.outcome.fail(node_error(place.label, error))
        self.stop()
        return False

    def _end(self) -> None:
        try:
            self._runtime.begin_stop()
        except Exception as error:
            self.outcome.fail(error)
        deadline = time.monotonic() + self._options.stop_timeout
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        late = {label: thread for label, thread in self._threads.items() if thread.is_alive()}
        if late:
            self.outcome.fail(LaunchError(self._describe_late(late)))
        for place in reversed(self._places):
            if place.label in late:
                continue
            failed = place.state == "failed"
            try:
                self._runtime.close(place)
            except Exception as error:
                self.outcome.fail(node_error(place.label, error))
            if failed:
                place.state = "failed"
        self._runtime.end()
        deactivate(self._runtime)
        self.outcome.over.set()

    def _describe_late(self, late: dict[str, threading.Thread]) -> str:
        frames = sys._current_frames()
        text = (
            f"nodes {sorted(late)} did not end within stop_timeout={self._options.stop_timeout} s of the "
            "stop, and a thread cannot be ended by force; let run() return when launch.stop_event() is set"
        )
        for label, thread in late.items():
            frame = frames.get(thread.ident or 0)
            if frame is not None:
                text += f"\n\nnode {label!r} is at:\n" + "".join(traceback.format_stack(frame)).rstrip()
        return text

    def status(self) -> dict[str, Any]:
        state = "stopping" if self._runtime.stopped.is_set() else "running"
        if self.outcome.over.is_set():
            state = "failed" if self.outcome.error is not None else "finished"
        return {
            "program": self._program.name,
            "engine": "threads",
            "job": self._job,
            "state": state,
            "nodes": self._runtime.status(),
        }

    def client(self, label: str, index: int = 0) -> Any:
        return self._runtime.client(find_leaf(self._units, label, index).node.node_id)
