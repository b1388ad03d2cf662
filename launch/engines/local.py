"""What the engines within one process share: objects made on demand and clients that call them directly."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from launch import context
from launch.batching import BatchedMethod
from launch.context import Runtime, entered
from launch.engines.base import BackOff, Leaf, Unit, unserved
from launch.errors import CallTimeout, LaunchError
from launch.handles import Client, Target
from launch.nodes import ReplayNode, connect_replay
from launch.pool import DaemonPool


class Place:
    """Where a node's object is.

    Attributes:
      object: what the constructor made; None before that and for a `PyNode`.
      state: as in ``Job.status()``.
    """

    def __init__(self, leaf: Leaf, unit: Unit) -> None:
        self.leaf = leaf
        self.unit = unit
        self.object: Any = None
        self.target: Target | None = None
        self.built = False
        self.building = False
        self.state = "starting"
        self.restarts = 0
        self.back_off = BackOff()
        self.error: str | None = None

    @property
    def label(self) -> str:
        return self.leaf.context.label


class LocalRuntime(Runtime):
    """One process that holds all nodes. ``concurrent`` is False where there may be one thread only."""

    def __init__(self, units: Sequence[Unit], request_stop: Any, *, concurrent: bool) -> None:
        super().__init__()
        self.places = {leaf.node.node_id: Place(leaf, unit) for unit in units for leaf in unit.leaves}
        self._request_stop = request_stop
        self._concurrent = concurrent
        self._build_lock = threading.RLock()
        self._stack: list[str] = []
        self._clients: dict[int, Any] = {}
        self._pool = DaemonPool("launch-call", limit=1024)

    def request_stop(self, result: Any = None) -> None:
        self._request_stop(result)

    def build(self, place: Place) -> None:
        """Makes the object, once. LaunchError if its constructor needs an answer of the object itself."""
        if place.built:
            return
        with self._build_lock:
            if place.built:
                return
            if place.building:
                circle = [*self._stack[self._stack.index(place.label) :], place.label]
                raise LaunchError(
                    "constructors wait for each other in a circle: "
                    + " -> ".join(circle)
                    + "; make the call "
                    "in run() or at first use instead of in the constructor"
                )
            place.building = True
            self._stack.append(place.label)
            try:
                with entered(self, place.leaf.context):
                    place.object = self._make(place)
                place.target = Target(place.object, place.label)
                place.built = True
            finally:
                place.building = False
                self._stack.pop()

    def _make(self, place: Place) -> Any:
        node = place.leaf.node
        if isinstance(node, ReplayNode):
            return node.serve(embedded=True, concurrent=self._concurrent, address=None, port=None, curve=None)
        return None if node.is_function else node.call()

    def client(self, node_id: int) -> Any:
        client = self._clients.get(node_id)
        if client is None:
            client = self._clients[node_id] = self._make_client(node_id)
        return client

    def _make_client(self, node_id: int) -> Any:
        place = self.places.get(node_id)
        if place is None:
            raise LaunchError(f"the program has no node {node_id}: was the node of this handle added to it?")
        node = place.leaf.node
        if isinstance(node, ReplayNode):
            self.build(place)
            return connect_replay(node.backend, place.object, None, None, None)
        if node.serves is None:
            raise unserved(place.leaf)

        def call(name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
            if timeout is not None and self._concurrent:
                return submit(name, args, kwargs, timeout).result()
            return self._invoke(place, self._method(place, name), args, kwargs)

        def submit(name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Future:
            future: Future = Future()
            try:
                method = self._method(place, name)
            except Exception as error:
                future.set_exception(error)
                return future
            if isinstance(method, BatchedMethod) and self._concurrent and timeout is None:
                with entered(self, place.leaf.context):
                    return method.submit(args, kwargs)

            def work() -> None:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    result, error = self._invoke(place, method, args, kwargs), None
                except BaseException as failure:
                    result, error = None, failure
                with contextlib.suppress(InvalidStateError):  # its time had run out
                    future.set_result(result) if error is None else future.set_exception(error)

            if not self._concurrent:
                work()
                return future
            self._pool.submit(work)
            if timeout is not None:
                _expire(future, timeout, f"{place.label}.{name}")
            return future

        return Client(node_id, call, submit, getattr(node, "client_options", {}).get("call_timeout"))

    def _method(self, place: Place, name: str) -> Any:
        self.build(place)
        assert place.target is not None
        return place.target.method(name)

    def _invoke(self, place: Place, method: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        here = context._here
        before = here.runtime, here.context
        here.runtime, here.context = self, place.leaf.context
        try:
            return method(*args, **kwargs)
        finally:
            here.runtime, here.context = before

    def close(self, place: Place) -> None:
        """Calls ``close()`` of the object (``stop()`` of a replay server), if it has one."""
        if not place.built:
            return
        place.state = "closing"
        node_is_replay = isinstance(place.leaf.node, ReplayNode)
        closing = getattr(place.object, "close", None)
        if closing is None and node_is_replay:
            closing = getattr(place.object, "stop", None)
        if callable(closing) and not place.leaf.node.is_function:
            with entered(self, place.leaf.context):
                closing()
        place.state = "closed"

    def end(self) -> None:
        """Lets go of the threads; nothing is called any more."""
        self._pool.close()

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "label": place.label,
                "group": place.unit.group,
                "index": place.unit.index,
                "state": place.state,
                "restarts": place.restarts,
                "pid": os.getpid(),
                "cpu_seconds": None,
                "memory_bytes": None,
                "calls": None,
                "error": place.error,
            }
            for place in self.places.values()
        ]


def _expire(future: Future, timeout: float, what: str) -> None:
    """Has the future fail with `CallTimeout` unless it is done in time."""

    def fail() -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(CallTimeout(f"{what} was not answered within {timeout} s"))

    timer = threading.Timer(timeout, fail)
    timer.daemon = True
    timer.start()
    future.add_done_callback(lambda _: timer.cancel())
