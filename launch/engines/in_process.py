"""The common part of the engines within one process, where nodes call each other directly."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from launch.context import Runtime, active, entered, here
from launch.engines.base import Job, Leaf, Record, Unit, ended_normally, node_error, unknown_node, unserved
from launch.engines.options import Options
from launch.errors import CallTimeout, LaunchError, ProgramStopped, message_of, without_exit
from launch.futures import CallThreads, expire, fulfil
from launch.handles import NodeClient, Target
from launch.nodes import CourierNode, ServerNode
from launch.process_state import OwnState, SharedSettings, shared_settings
from launch.program import Program

_log = logging.getLogger("launch")


class LocalInstance(Record):
    """A node of the program and its object.

    Attributes:
      object: the result of the constructor; None before that and for a `PyNode`.
      target: finds the methods of `object`; None before that, and if `object` is from a life that failed.
    """

    def __init__(self, leaf: Leaf, unit: Unit) -> None:
        super().__init__(unit, leaf.context.label)
        self.leaf = leaf
        self.pid = os.getpid()
        self.object: Any = None
        self.target: Target | None = None
        self.waits_for: LocalInstance | None = None  # the node whose constructor this one's waits for
        self.turns = 0  # number of steps, on the serial engine
        self.stop_handlers: list[Callable[[], Any]] = []  # those that its present life registered
        self.born = 0.0  # time at which its present life began, on the engine `threads`
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
        report_failure: Callable[..., None],
        *,
        concurrent: bool,
    ) -> None:
        super().__init__(job, request_stop, report_failure)
        leaves = ((leaf, unit) for unit in units for leaf in unit.leaves)
        self.instances = {leaf.node.node_id: LocalInstance(leaf, unit) for leaf, unit in leaves}
        self._concurrent = concurrent
        self.state: OwnState | SharedSettings = shared_settings
        self._changed = threading.Condition()
        self._building = threading.local()
        self._clients: dict[int, Any] = {}

    def begin_stop(self) -> None:
        super().begin_stop()
        with self._changed:
            self._changed.notify_all()

    def failure_handler(self, label: str) -> Callable[[BaseException], None]:
        life = next(each.restarts for each in self.instances.values() if each.label == label)
        return functools.partial(self.fail, label, life=life)

    def add_stop_handler(self, handler: Callable[[], Any]) -> None:
        super().add_stop_handler(handler)
        for instance in self.instances.values():
            if here.context is instance.leaf.context:
                instance.stop_handlers.append(handler)

    def forget(self, instance: LocalInstance) -> None:
        """Removes the stop handlers of a life that has failed, as the end of a process would."""
        handlers, instance.stop_handlers = instance.stop_handlers, []
        for handler in handlers:
            with contextlib.suppress(ValueError):  # It was unregistered, or has been called.
                self.stop_handlers.remove(handler)

    def build(self, instance: LocalInstance) -> None:
        """Calls the node's constructor on this thread."""
        before = getattr(self._building, "instance", None)
        self._building.instance = instance
        try:
            with self.state.entered(), entered(self, instance.leaf.context):
                node = instance.leaf.node
                if isinstance(node, ServerNode):
                    instance.object = node.serve(
                        embedded=True, concurrent=self._concurrent, address=None, curve=None
                    )
                elif not node.is_function:
                    instance.object = node.call()
            instance.target = Target(instance.object, instance.label)
        finally:
            self._building.instance = before
            with self._changed:
                self._changed.notify_all()

    def _wait_until_built(self, instance: LocalInstance) -> Target:
        """Returns the node's target once there is one.

        Raises:
          LaunchError: The node's constructor waits for the one that this thread is in.
        """
        caller: LocalInstance | None = getattr(self._building, "instance", None)
        if caller is not None:
            with self._changed:
                caller.waits_for = instance
                self._check_circle(caller)
        try:
            if not self._concurrent:
                self.build(instance)
            with self._changed:
                self._changed.wait_for(lambda: instance.target or self.stopped.is_set())
        finally:
            if caller is not None:
                caller.waits_for = None
        if instance.target is None:
            raise ProgramStopped(f"node {instance.label!r} has no object yet, and the program stops.")
        return instance.target

    def _check_circle(self, caller: LocalInstance) -> None:
        circle = [caller]
        while (instance := circle[-1].waits_for) is not None and instance is not caller:
            circle.append(instance)
        if instance is None:
            return
        first = next(i for p in self.instances.values() for i, member in enumerate(circle) if member is p)
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
        instance = self.instances.get(node_id)
        if instance is None:
            raise unknown_node(node_id)
        node = instance.leaf.node
        if isinstance(node, ServerNode):
            if instance.target is None:
                self._wait_until_built(instance)
            with entered(self, None):  # The client is for all nodes.
                return node.client_options(instance.object, None)
        if not isinstance(node, CourierNode):
            raise unserved(instance.label, node.description)
        call, submit = functools.partial(self._call, instance), functools.partial(self._submit, instance)
        return NodeClient(node_id, call, submit, node.client_options["call_timeout"])

    def _call(
        self, instance: LocalInstance, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        """Calls a method on this thread, or on another one if the caller waits for a limited time only."""
        if timeout is not None and self._concurrent:
            return self._begin(instance, name, args, kwargs, timeout).result()
        target = instance.target or self._wait_until_built(instance)
        before = here.runtime, here.context
        here.runtime, here.context = self, instance.leaf.context
        try:
            return target.method(name)(*args, **kwargs)
        except SystemExit as error:  # It is not for the caller.
            raise without_exit(error) from error
        finally:
            here.runtime, here.context = before

    def _submit(
        self, instance: LocalInstance, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Future:
        began = time.monotonic()
        # A call on its caller's thread is over at once. One that a thread carries out makes room for others.
        if not self._concurrent or instance.pool.is_mine():
            return self._begin(instance, name, args, kwargs, timeout)
        if not instance.room.acquire(timeout=timeout):
            late = f"was not sent within {timeout} s: too many open futures."
            raise CallTimeout(f"{instance.label}.{name} {late}")
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        future = self._begin(instance, name, args, kwargs, left)
        future.add_done_callback(lambda _: instance.room.release())
        return future

    def _begin(
        self, instance: LocalInstance, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Future:
        """Begins a call and returns its future. Without threads, the call is over when this returns."""
        future: Future = Future()
        work = functools.partial(fulfil, future, self._call, instance, name, args, kwargs, None)
        if self._concurrent:
            instance.pool.submit(work)
        else:
            work()
        if timeout is not None:
            expire(future, timeout, CallTimeout(f"{instance.label}.{name} was not answered in time."))
        return future


class LocalJob(Job):
    """A program in the launching process."""

    _runtime: LocalRuntime

    def __init__(self, program: Program, engine: str, options: Options, *, concurrent: bool) -> None:
        super().__init__(program, engine, options)
        self._runtime = LocalRuntime(
            self._job, self._units, self.stop, self._hear_failure, concurrent=concurrent
        )
        self._records = self._instances = list(self._runtime.instances.values())
        self._counting = threading.Lock()  # of failures, which threads may report at the same time
        options.at_end.enter_context(active(self._runtime))

    def stop(self, result: Any = None) -> None:
        self.outcome.offer_result(result)
        try:
            self._runtime.begin_stop()
        finally:
            self.outcome.notify()

    def _has_no_worker(self) -> bool:
        made = all(each.state in ("running", "returned") and not each.works for each in self._instances)
        return made and not self._runtime.stopped.is_set()

    def _hear_failure(self, label: str, error: BaseException, life: int) -> None:
        """Carries out `launch.make_failure_handler` on the thread that calls it."""
        instance = next(instance for instance in self._instances if instance.label == label)
        if life >= instance.restarts and not ended_normally(error, self._runtime.stopped.is_set()):
            self._has_failed(instance, error, life)

    @abc.abstractmethod
    def _has_failed(self, instance: LocalInstance, error: BaseException, life: int) -> None:
        """Restarts a node that reported its failure, or ends the program."""

    def _may_restart(self, instance: LocalInstance, error: BaseException, life: int) -> bool:
        """Records the failure of a life of a node; returns whether to restart the node.

        If it has no restart left, the program ends. Further failures of a life, as of its other threads or of
        what it left, change nothing.
        """
        with self._counting:
            if life < instance.restarts:
                return False
            instance.error = f"{type(error).__name__}: {message_of(error)}"
            if (
                instance.restarts < self._options.restarts.get(instance.unit.group, 0)
                and not self._runtime.stopped.is_set()
            ):
                instance.restarts += 1
                instance.target, instance.state = None, "restarting"
                return True
        self._fail(instance, error)
        return False

    def _close_failed(self, instance: LocalInstance) -> None:
        """Closes what the failed life of a node has left, before the next: the end of a process would."""
        if instance.target is not None:
            return
        self._runtime.forget(instance)
        if instance.object is None:
            return
        failed, instance.object = instance.object, None
        try:
            with entered(self._runtime, instance.leaf.context):
                instance.leaf.node.close(failed)
        except (Exception, SystemExit):  # The node has failed, and its failure is known.
            _log.warning("node %r: close() failed after a failure", instance.label, exc_info=True)

    def _fail(self, instance: LocalInstance, error: BaseException) -> None:
        self.outcome.fail(
            node_error(instance.label, error)
        )  # `wait` may wait for the state, which changes next.
        instance.state = "failed"
        self.stop()

    def _close(self, instances: list[LocalInstance]) -> None:
        """Closes the nodes in reverse order of addition and ends the run."""
        seconds = max(map(self._options.time_to_end, self._program.groups))
        if not self._runtime.finish_stop(seconds):  # Another thread asked for the stop, and calls them.
            self.outcome.fail(
                LaunchError(f"The stop handlers did not return within {seconds:g} s of the stop.")
            )
        for instance in reversed([each for each in instances if each.target or each.object is not None]):
            self._close_instance(instance)
        self._leave()

    def _close_instance(self, instance: LocalInstance) -> None:
        failed = instance.state == "failed"
        instance.state = "closing"
        try:
            with entered(self._runtime, instance.leaf.context):
                instance.leaf.node.close(instance.object)
            instance.state = "failed" if failed else "closed"
        except (Exception, SystemExit) as error:
            self.outcome.fail(node_error(instance.label, error))
            instance.state = "failed"
