"""One thread per node in the launching process, with direct calls; for notebooks and debugging."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from launch.context import entered
from launch.engines.base import ended_normally
from launch.engines.in_process import LocalInstance, LocalJob
from launch.engines.options import Options
from launch.errors import LaunchError
from launch.process_state import shared_settings
from launch.program import Program


class ThreadsJob(LocalJob):
    """A program whose nodes have one thread each, which creates the node's object and runs it."""

    def __init__(self, program: Program, engine: str, options: Options) -> None:
        super().__init__(program, engine, options, concurrent=True)
        options.at_end.enter_context(shared_settings.entered())
        self._threads = {
            each.label: threading.Thread(target=self._run, args=(each,), name=each.label, daemon=True)
            for each in self._instances
        }
        threading.Thread(target=self._supervise, name=f"launch-{program.name}", daemon=True).start()

    def _supervise(self) -> None:
        try:
            for thread in self._threads.values():
                thread.start()
        except RuntimeError as error:  # The system gives no further thread.
            self.outcome.fail(error)
            self._begin_stop()
        with self.outcome.changed:
            self.outcome.changed.wait_for(lambda: self._runtime.stopped.is_set() or self._workers_returned())
        self._begin_stop()
        late = self._join()
        if late:
            self.outcome.fail(LaunchError(self._describe_late(late)))
        self._close([instance for instance in self._instances if instance.label not in late])

    def _workers_returned(self) -> bool:
        workers = [instance for instance in self._instances if instance.works]
        # A node whose constructor ended with `sys.exit()` has returned, and is no worker.
        known = all(each.works or each.state in ("running", "returned") for each in self._instances)
        return known and bool(workers) and all(instance.state == "returned" for instance in workers)

    def _run(self, instance: LocalInstance) -> None:
        """Runs a node: calls its constructor and, for a worker, does its work."""
        while True:
            instance.born, life = time.monotonic(), instance.restarts
            try:
                self._runtime.build(instance)
                instance.state = "running"
                if instance.works:
                    with entered(self._runtime, instance.leaf.context):
                        instance.leaf.node.work(instance.object)
                    instance.state = "returned"
                break
            except BaseException as error:
                if ended_normally(error, self._runtime.stopped.is_set()):
                    instance.state = "returned"
                    break
                if not self._may_restart(instance, error, life) or not self._pause(instance):
                    break
                self._close_failed(instance)
        self.outcome.notify()

    def _pause(self, instance: LocalInstance) -> bool:
        """Waits before a restart; returns False if the program stops."""
        return not self._runtime.stopped.wait(instance.back_off.after(time.monotonic() - instance.born))

    def _has_failed(self, instance: LocalInstance, error: BaseException, life: int) -> None:
        if instance.works:
            self._fail(instance, error)  # The node's thread may still run, and cannot be ended.
        elif self._may_restart(instance, error, life):
            before = self._threads[instance.label]
            thread = threading.Thread(
                target=self._run_again, args=(instance, before), name=instance.label, daemon=True
            )
            thread.start()
            self._threads[instance.label] = thread  # Only now: a stop joins the threads.

    def _run_again(self, instance: LocalInstance, before: threading.Thread) -> None:
        before.join()  # It may still be in the constructor.
        instance.target, instance.state = None, "restarting"
        if self._pause(instance):
            self._close_failed(instance)
            self._run(instance)
        self.outcome.notify()

    def _join(self) -> dict[str, threading.Thread]:
        """Waits for the threads; returns those that did not end."""
        stopped_at = time.monotonic()
        for instance in self._instances:
            deadline = stopped_at + self._options.time_to_end(instance.unit.group)
            if self._threads[instance.label].ident is not None:  # It was started.
                self._threads[instance.label].join(max(0.0, deadline - time.monotonic()))
        return {label: thread for label, thread in self._threads.items() if thread.is_alive()}

    def _close_instance(self, instance: LocalInstance) -> None:
        self._within_time(super()._close_instance, instance)

    def _close_failed(self, instance: LocalInstance) -> None:
        self._within_time(super()._close_failed, instance)

    def _within_time(self, close: Callable[[LocalInstance], None], instance: LocalInstance) -> None:
        """Closes a node on a thread of its own, for which the others do not wait without end."""
        thread = threading.Thread(target=close, args=(instance,), daemon=True)
        thread.start()
        thread.join(self._options.time_to_end(instance.unit.group))
        if thread.is_alive():
            self.outcome.fail(LaunchError(self._describe_late({instance.label: thread})))

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
