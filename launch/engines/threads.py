"""One thread per node in the launching process, with direct calls; for notebooks and debugging."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from launch.context import entered
from launch.engines.base import Options, ended_normally
from launch.engines.in_process import LocalJob, LocalRecord
from launch.errors import LaunchError
from launch.program import Program


class ThreadsJob(LocalJob):
    """A program whose nodes have one thread each, which creates the node's object and runs it."""

    def __init__(self, program: Program, engine: str, options: Options) -> None:
        super().__init__(program, engine, options, concurrent=True)
        self._threads = {
            place.label: threading.Thread(target=self._live, args=(place,), name=place.label, daemon=True)
            for place in self._places
        }
        threading.Thread(target=self._supervise, name=f"launch-{program.name}", daemon=True).start()

    def _supervise(self) -> None:
        for thread in self._threads.values():
            thread.start()
        with self.outcome.changed:
            self.outcome.changed.wait_for(lambda: self._runtime.stopped.is_set() or self._workers_returned())
        self._begin_stop()
        late = self._join()
        if late:
            self.outcome.fail(LaunchError(self._describe_late(late)))
        self._close([place for place in self._places if place.label not in late])

    def _workers_returned(self) -> bool:
        workers = [place for place in self._places if place.works]
        # A node whose constructor ended with `sys.exit()` has returned, and is no worker.
        known = all(place.works or place.state in ("running", "returned") for place in self._places)
        return known and bool(workers) and all(place.state == "returned" for place in workers)

    def _live(self, place: LocalRecord) -> None:
        """Runs a node: calls its constructor and, for a worker, does its work."""
        while True:
            place.born = time.monotonic()
            try:
                self._runtime.build(place)
                place.state = "running"
                if place.works:
                    with entered(self._runtime, place.leaf.context):
                        place.leaf.node.call() if place.leaf.node.is_function else place.object.run()
                    place.state = "returned"
                break
            except BaseException as error:
                if ended_normally(error, self._runtime.stopped.is_set()):
                    place.state = "returned"
                    break
                if not self._may_restart(place, error) or not self._pause(place):
                    break
                self._close_failed(place)
        self.outcome.notify()

    def _pause(self, place: LocalRecord) -> bool:
        """Waits before a restart; returns False if the program stops."""
        return not self._runtime.stopped.wait(place.back_off.after(time.monotonic() - place.born))

    def _has_failed(self, place: LocalRecord, error: BaseException) -> None:
        if place.works:
            self._fail(place, error)  # Its thread may still run, and cannot be ended.
        elif self._may_restart(place, error):
            before = self._threads[place.label]
            thread = threading.Thread(
                target=self._live_again, args=(place, before), name=place.label, daemon=True
            )
            thread.start()
            self._threads[place.label] = thread  # Only now: a stop joins the threads.

    def _live_again(self, place: LocalRecord, before: threading.Thread) -> None:
        before.join()  # It may still be in the constructor.
        place.unclosed, place.target = place.unclosed or place.target is not None, None
        place.state = "restarting"
        if self._pause(place):
            self._close_failed(place)
            self._live(place)
        self.outcome.notify()

    def _join(self) -> dict[str, threading.Thread]:
        """Waits for the threads; returns those that did not end."""
        stopped_at = time.monotonic()
        for place in self._places:
            deadline = stopped_at + self._options.time_to_end(place.unit.group)
            self._threads[place.label].join(max(0.0, deadline - time.monotonic()))
        return {label: thread for label, thread in self._threads.items() if thread.is_alive()}

    def _close_place(self, place: LocalRecord) -> None:
        self._within_time(super()._close_place, place)

    def _close_failed(self, place: LocalRecord) -> None:
        self._within_time(super()._close_failed, place)

    def _within_time(self, close: Callable[[LocalRecord], None], place: LocalRecord) -> None:
        """Closes a node on a thread of its own, for which the others do not wait without end."""
        thread = threading.Thread(target=close, args=(place,), daemon=True)
        thread.start()
        thread.join(self._options.time_to_end(place.unit.group))
        if thread.is_alive():
            self.outcome.fail(LaunchError(self._describe_late({place.label: thread})))

    def _describe_late(self, late: dict[str, threading.Thread]) -> str:
        frames = sys._current_frames()
        text = (
            f"Nodes {sorted(late)} did not end within stop_timeout={self._options.stop_timeout:g} s of the "
            "stop, and a thread cannot be killed. Let run() return when launch.stop_event() is set, and let "
            "close() return sooner."
        )
        for label, thread in late.items():
            frame = frames.get(thread.ident or 0)
            if frame is not None:
                text += f"\n\nnode {label!r} is at:\n" + "".join(traceback.format_stack(frame)).rstrip()
        return text
