"""The common part of the engines within one process, where nodes call each other directly."""

from __future__ import annotations

import abc
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from launch.context import Runtime, active, entered, here
from launch.engines.base import (
    Job,
    Leaf,
    Options,
    Record,
    Unit,
    ended_normally,
    node_error,
    unknown_node,
    unserved,
)
from launch.errors import CallTimeout, LaunchError, ProgramStopped, message_of
from launch.futures import CallThreads, expire, settle
from launch.handles import NodeClient, Target
from launch.nodes import CourierNode, ServerNode
from launch.program import Program

_log = logging.getLogger("launch")


class LocalRecord(Record):
    """A node of the program and its object.

    Attributes:
      object: the result of the constructor; None before that and for a `PyNode`.
    """

    def __init__(self, leaf: Leaf, unit: Unit) -> None:
        super().__init__(unit, leaf.context.label)
        self.leaf = leaf
        self.pid = os.getpid()
        self.object: Any = None
        self.target: Target | None = None  # None until the object is made
        self.waits_for: LocalRecord | None = None  # the node whose constructor this one's waits for
        self.turns = 0  # number of steps, on the serial engine
        self.born = 0.0  # time at which its present life began, on the engine `threads`
        self.unclosed = False  # whether `object` is from a life that failed and was not closed
        if isinstance(leaf.node, CourierNode):
            self.room = threading.BoundedSemaphore(leaf.node.client_options["max_in_flight"])
            self.pool = CallThreads(leaf.node.server_options["thread_pool_size"])

    @property
    def works(self) -> bool:
        """Whether the node is a worker; a service only answers calls."""
        return self.leaf.node.is_function or self.leaf.node.runs(self.object)


class LocalRuntime(Runtime):
    """One process that holds all nodes.

    Args:
      job: random name of the run.
      units: the program's units.
      request_stop: see `Runtime`.
      report_failure: see `Runtime`.
      concurrent: whether nodes run on several threads. If not, the first call to a node creates its object.
    """

    def __init__(
        self,
        job: str,
        units: list[Unit],
        request_stop: Callable[..., None],
        report_failure: Callable[[str, BaseException], None],
        *,
        concurrent: bool,
    ) -> None:
        super().__init__(job, request_stop, report_failure)
        self.places = {leaf.node.node_id: LocalRecord(leaf, unit) for unit in units for leaf in unit.leaves}
        self._concurrent = concurrent
        self._changed = threading.Condition()
        self._building = threading.local()
        self._clients: dict[int, Any] = {}

    def begin_stop(self) -> None:
        super().begin_stop()
        with self._changed:
            self._changed.notify_all()

    def build(self, place: LocalRecord) -> None:
        """Calls the node's constructor on this thread."""
        before = getattr(self._building, "place", None)
        self._building.place = place
        try:
            with entered(self, place.leaf.context):
                node = place.leaf.node
                if isinstance(node, ServerNode):
                    place.object = node.serve(
                        embedded=True, concurrent=self._concurrent, address=None, curve=None
                    )
                elif not node.is_function:
                    place.object = node.call()
            place.target = Target(place.object, place.label)
        finally:
            self._building.place = before
            with self._changed:
                self._changed.notify_all()

    def _wait_until_built(self, place: LocalRecord) -> Target:
        """Returns the node's target once there is one.

        Raises:
          LaunchError: The node's constructor waits for the one that this thread is in.
        """
        caller: LocalRecord | None = getattr(self._building, "place", None)
        if caller is not None:
            with self._changed:
                caller.waits_for = place
                self._check_circle(caller)
        try:
            if not self._concurrent:
                self.build(place)
            with self._changed:
                self._changed.wait_for(lambda: place.target or self.stopped.is_set())
        finally:
            if caller is not None:
                caller.waits_for = None
        if place.target is None:
            raise ProgramStopped(f"node {place.label!r} has no object yet, and the program stops.")
        return place.target

    def _check_circle(self, caller: LocalRecord) -> None:
        circle = [caller]
        while (place := circle[-1].waits_for) is not None and place is not caller:
            circle.append(place)
        if place is None:
            return
        first = next(i for p in self.places.values() for i, member in enumerate(circle) if member is p)
        labels = [member.label for member in [*circle[first:], *circle[: first + 1]]]
        raise LaunchError(
            f"Constructors wait for each other in a cycle: {' -> '.join(labels)}. Make the call in run() or "
            "at first use instead of in the constructor."
        )

    def client(self, node_id: int) -> Any:
        client = self._clients.get(node_id)
        if client is None:
            client = self._clients[node_id] = self._make_client(node_id)
        return client

    def _make_client(self, node_id: int) -> Any:
        place = self.places.get(node_id)
        if place is None:
            raise unknown_node(node_id)
        node = place.leaf.node
        if isinstance(node, ServerNode):
            if place.target is None:
                self._wait_until_built(place)
            return node.client_options(place.object, None)
        if not isinstance(node, CourierNode):
            raise unserved(place.label, node.description)
        call, submit = functools.partial(self._call, place), functools.partial(self._submit, place)
        return NodeClient(node_id, call, submit, node.client_options["call_timeout"])

    def _call(
        self, place: LocalRecord, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        """Calls a method on this thread, or on another one if the caller waits for a limited time only."""
        if timeout is not None and self._concurrent:
            return self._begin(place, name, args, kwargs, timeout).result()
        target = place.target or self._wait_until_built(place)
        before = here.runtime, here.context
        here.runtime, here.context = self, place.leaf.context
        try:
            return target.method(name)(*args, **kwargs)
        finally:
            here.runtime, here.context = before

    def _submit(
        self, place: LocalRecord, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Future:
        began = time.monotonic()
        # A call on its caller's thread is over at once. One that a thread carries out makes room for others.
        if not self._concurrent or place.pool.is_mine():
            return self._begin(place, name, args, kwargs, timeout)
        if not place.room.acquire(timeout=timeout):
            raise CallTimeout(f"{place.label}.{name} was not sent within {timeout} s: too many open futures.")
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        future = self._begin(place, name, args, kwargs, left)
        future.add_done_callback(lambda _: place.room.release())
        return future

    def _begin(
        self, place: LocalRecord, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Future:
        """Begins a call and returns its future. Without threads, the call is over when this returns."""
        future: Future = Future()

        def work() -> None:
            try:
                settle(future, self._call(place, name, args, kwargs, None))
            except BaseException as error:
                settle(future, error=error)

        if self._concurrent:
            place.pool.submit(work)
        else:
            work()
        if timeout is not None:
            expire(future, timeout, CallTimeout(f"{place.label}.{name} was not answered in time."))
        return future


class LocalJob(Job):
    """A program in the launching process."""

    _runtime: LocalRuntime

    def __init__(self, program: Program, engine: str, options: Options, *, concurrent: bool) -> None:
        super().__init__(program, engine, options)
        self._runtime = LocalRuntime(
            self._job, self._units, self.stop, self._hear_failure, concurrent=concurrent
        )
        self._records = self._places = list(self._runtime.places.values())
        options.at_end.enter_context(active(self._runtime))

    def stop(self, result: Any = None) -> None:
        self.outcome.offer_result(result)
        try:
            self._runtime.begin_stop()
        finally:
            self.outcome.notify()

    def _has_no_worker(self) -> bool:
        made = all(place.state in ("running", "returned") and not place.works for place in self._places)
        return made and not self._runtime.stopped.is_set()

    def _hear_failure(self, label: str, error: BaseException) -> None:
        """Carries out `launch.make_failure_handler` on the thread that calls it."""
        place = next(place for place in self._places if place.label == label)
        if not ended_normally(error, self._runtime.stopped.is_set()):
            self._has_failed(place, error)

    @abc.abstractmethod
    def _has_failed(self, place: LocalRecord, error: BaseException) -> None:
        """Restarts a node that reported its failure, or ends the program."""

    def _may_restart(self, place: LocalRecord, error: BaseException) -> bool:
        """Records a failure; returns whether the node has a restart left. If not, the program ends."""
        place.error = f"{type(error).__name__}: {message_of(error)}"
        if (
            place.restarts < self._options.restarts.get(place.unit.group, 0)
            and not self._runtime.stopped.is_set()
        ):
            place.restarts += 1
            place.unclosed, place.target = place.target is not None, None
            place.state = "restarting"
            return True
        self._fail(place, error)
        return False

    def _close_failed(self, place: LocalRecord) -> None:
        """Closes what the failed life of a node has left, before the next: the end of a process would."""
        if not place.unclosed:
            return
        place.unclosed = False
        try:
            with entered(self._runtime, place.leaf.context):
                place.leaf.node.close(place.object)
        except (Exception, SystemExit):  # The node has failed, and its failure is known.
            _log.warning("node %r: close() failed after a failure", place.label, exc_info=True)

    def _fail(self, place: LocalRecord, error: BaseException) -> None:
        self.outcome.fail(node_error(place.label, error))  # Before the state, for which `wait` may wait.
        place.state = "failed"
        self.stop()

    def _close(self, places: list[LocalRecord]) -> None:
        """Closes the nodes in reverse order of addition and ends the run."""
        for place in reversed([place for place in places if place.target or place.unclosed]):
            self._close_place(place)
        self._leave()

    def _close_place(self, place: LocalRecord) -> None:
        failed = place.state == "failed"
        place.state = "closing"
        try:
            with entered(self._runtime, place.leaf.context):
                place.leaf.node.close(place.object)
            place.state = "failed" if failed else "closed"
        except (Exception, SystemExit) as error:
            self.outcome.fail(node_error(place.label, error))
            place.state = "failed"
