"""Nodes as Ray actors, on one machine or a cluster.

Ray finds a machine for each node by its group's resources and carries the messages between the launcher and
the node. Nodes call each other over this project's transport: every node serves at `tcp://<its machine>:<a
free port>`, encrypted and authenticated with the program's keys (CURVE). Ray carries the keys and the
addresses. A restarted node may run on another machine; the other nodes receive its new address.
`launch.engines.supervised.job` supervises the nodes, as it does processes.

```python
import ray
ray.init(address="auto")       # optional; by default the cluster of `ray start` or a new one for this program
launch.launch(program, engine="ray", resources={"learner": {"num_gpus": 1}, "actor": {"num_cpus": 1}})
```
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import itertools
import logging
import os
import socket
import sys
import threading
from typing import Any

from launch import extras, platforms
from launch.engines.base import Unit
from launch.engines.options import Options, Resources
from launch.engines.ray import actor, placement
from launch.engines.supervised.job import SupervisedJob
from launch.engines.supervised.process import Process, ProcessHost, Report
from launch.errors import LaunchError

_SILENCE_S = 1.0  # timeout of one read from a node, in seconds
_PATIENCE_S = 15.0  # seconds after which a log message says that a node waits for a machine
_PLACES = 3  # how often a node is placed again because its machine was lost before the node started
_HEAD_PERIOD_S = 2.0  # seconds between two checks of the head of the cluster
_HEAD_FAILURES = 3  # number of failed checks in a row after which the head counts as dead
_LOCAL_OBJECT_STORE = 100 << 20  # bytes; nodes do not use Ray's object store

_log = logging.getLogger("launch")


class RayJob(SupervisedJob):
    """A program of Ray actors."""

    _host: RayHost | None = None

    def _open(self) -> tuple[None, ProcessHost]:
        ray = _import_ray()
        if not ray.is_initialized():
            _connect(ray)
            self._options.at_end.callback(self._shut_down, ray)
        if os.environ.get("LAUNCH_AUTOSCALING", "0") == "0":
            self._check_placement(placement.hosts_of(ray))
        self._host = RayHost(ray, self._job, self._units, self._options, self._report)
        return None, self._host

    def _shut_down(self, ray: Any) -> None:
        if self._host is None or not self._host.head_is_dead:  # It would wait a minute for a dead head.
            ray.shutdown()

    def _check_placement(self, hosts: dict[str, dict[str, float]]) -> None:
        counts = {**collections.Counter(unit.group for unit in self._units), **self._options.min_nodes}
        groups = {
            group: (self._options.resources.get(group, Resources()), count) for group, count in counts.items()
        }
        placement.check(groups, hosts)


class RayHost(ProcessHost):
    """Creates Ray actors; one thread of the launcher per actor carries its messages."""

    def __init__(self, ray: Any, job: str, units: list[Unit], options: Options, report: Report) -> None:
        self._ray = ray
        self._job = job
        self._head = ray.get_runtime_context().gcs_address
        self.report = report
        self._lives: dict[int, _Life] = {}
        self._names = itertools.count(1)
        self._closed = threading.Event()
        self.head_is_dead = False
        self.leaving: list[Any] = []  # the calls of `HostActor.leave`
        self._groups: dict[str, Any] = {}
        self._actor_class = ray.remote(
            concurrency_groups=actor.CONCURRENCY_GROUPS, max_restarts=0, max_task_retries=0
        )(actor.HostActor)
        self._members: dict[str, list[str]] = {}
        for unit in units:
            self._members.setdefault(unit.group, []).append(unit.label)
        for group, resources in options.resources.items():
            if placement.has_bundles(resources):
                self._groups[group] = ray.util.placement_group(
                    [placement.needs(resources)] * len(self._members[group]), strategy=resources.strategy
                )
        threading.Thread(target=self._watch_head, name="ray-head", daemon=True).start()

    def fork(self, process: Process, line: socket.socket, resources: Resources) -> None:
        self._lives[process.number] = _Life(self, process, line, resources)

    def kill(self, number: int) -> None:
        self._lives[number].kill()

    def close(self) -> None:
        self._closed.set()
        for life in self._lives.values():
            life.kill()
        if self.head_is_dead:  # further calls to Ray, and its shutdown, would wait for a minute
            if self.leaving:
                self._ray.wait(self.leaving, num_returns=len(self.leaving), timeout=_SILENCE_S)
            atexit.unregister(self._ray.shutdown)
            if sys.excepthook.__module__.startswith("ray."):  # tells the head
                sys.excepthook = sys.__excepthook__
            if platforms.has("on_exit"):
                # Ray's threads go on, and end this process with SIGSEGV when it destroys what they use.
                libc = ctypes.CDLL(None)
                libc.on_exit(libc._exit, None)
            return
        for life in self._lives.values():
            life.thread.join()
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)

    def _watch_head(self) -> None:
        """Detects a dead head early: Ray waits for it for a minute and then ends this process."""
        failures = 0
        while failures < _HEAD_FAILURES:
            if self._closed.wait(_HEAD_PERIOD_S):
                return
            host, _, port = self._head.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
                failures = 0
            except OSError:
                failures += 1
        self.head_is_dead = True
        text = f"The head of the Ray cluster at {self._head} does not answer: it died or cannot be reached"
        # Calls of the actors still arrive: the nodes stop in order.
        self.report({"lost": f"{text}. Start a head and launch again."})

    # Called by _Life.

    def place(self, unit: Unit, resources: Resources) -> Any:
        """Asks Ray for the actor of a node and returns it without waiting for its process."""
        options: dict[str, Any] = {"name": f"launch-{self._job}-{unit.label}-{next(self._names)}"}
        group = self._groups.get(unit.group)
        needs = placement.needs(resources)
        if needs:  # otherwise Ray's default holds: one core to place it, none while it runs
            options["num_cpus"] = needs.pop("CPU", 0)
        if "GPU" in needs:
            options["num_gpus"] = needs.pop("GPU")
        options["resources"] = needs
        if group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=self._members[unit.group].index(unit.label)
            )
        elif resources.strategy is not None:
            options["scheduling_strategy"] = resources.strategy
        env = resources.environment()
        return self._actor_class.options(**options).remote(unit.label, self._job, sys.path, env)

    def end_process(self, born: dict[str, Any]) -> None:
        """Kills a node's process through another actor on its machine."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(born["machine"], soft=False)
        task = self._ray.remote(actor.end_process)
        task.options(num_cpus=0, scheduling_strategy=there, max_retries=0).remote(
            born["pid"], born["created"]
        )


class _Life:
    """One life of a node: its actor, and the threads that carry its messages."""

    def __init__(self, host: RayHost, process: Process, line: socket.socket, resources: Resources) -> None:
        self._host, self._line, self._resources = host, line, resources
        self._number, self._unit = process.number, process.unit
        self._ray = host._ray
        self._actor: Any = None
        self._born: dict[str, Any] | None = None
        self._killed = threading.Event()
        self._undelivered: Exception | None = None
        self._over = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"ray-{process.unit.label}", daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Kills the node, even if it hangs."""
        with self._lock:
            if self._over:
                return
            self._killed.set()
            if self._actor is None:
                return
            self._end(self._actor)
            if self._host.head_is_dead:  # The supervisor takes the broken channel for the end of the node.
                self._line.shutdown(socket.SHUT_RDWR)
            elif self._born is not None:
                self._host.end_process(self._born)

    def _end(self, actor: Any) -> None:
        if self._host.head_is_dead:  # Ray asks the head to end an actor.
            self._host.leaving.append(actor.leave.options(concurrency_group="in").remote())
        else:
            self._ray.kill(actor)

    def _run(self) -> None:
        code, reason = -9, None
        try:
            code = self._carry()
        except self._ray.exceptions.RayError as error:  # the actor died, or its machine
            text = str(error).strip()
            reason = "The node's Ray actor ended: " + " ".join(text.split())
        except Exception as error:
            reason = f"Ray could not run it: {type(error).__name__}: {error}"
        with self._lock:
            self._over = True
        if self._actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._end(self._actor)
        self._host.report({"exit": self._number, "code": code, "reason": reason if code else None})
        self._line.close()

    def _carry(self) -> int:
        ray = self._ray
        actor = self._find_place()
        if actor is None:
            return -9
        assert self._born is not None
        self._host.report({"forked": self._number, "pid": self._born["pid"]})
        life = actor.live.options(concurrency_group="life").remote()
        threading.Thread(target=self._give, args=(actor,), daemon=True).start()
        while True:
            data = ray.get(actor.take.options(concurrency_group="out").remote(_SILENCE_S))
            if data:
                self._line.sendall(data)
            elif ray.wait([life], timeout=0)[0]:
                return ray.get(life)
            if self._undelivered is not None:
                raise self._undelivered

    def _find_place(self) -> Any:
        """Waits for the actor's process and returns the actor; None if the node was killed before that."""
        ray = self._ray
        for left in reversed(range(_PLACES)):
            with self._lock:
                if self._killed.is_set():
                    return None
                actor = self._actor = self._host.place(self._unit, self._resources)
            born = actor.born.remote()
            while not ray.wait([born], timeout=_PATIENCE_S)[0]:
                _log.warning(
                    "node %r waits for a machine with %s; free in the cluster: %s",
                    self._unit.label,
                    placement.needs(self._resources) or "a place",
                    ray.available_resources(),
                )
            try:
                self._born = ray.get(born)
                return actor
            except ray.exceptions.RayActorError:
                # The machine was lost before the node started, so the node did not fail.
                if not left and not self._killed.is_set():
                    raise
        return None

    def _give(self, actor: Any) -> None:
        """Sends the supervisor's messages to the node, in order, until the channel is closed."""
        with contextlib.suppress(OSError):  # closed: this life is over
            while data := self._line.recv(1 << 16):
                try:
                    self._ray.get(actor.give.options(concurrency_group="in").remote(data))
                except self._ray.exceptions.RayError as error:
                    self._undelivered = error  # the node misses an order: `_carry` ends this life
                    return


def _import_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ImportError(f'engine "ray" requires Ray. Run {extras.install("ray")}.') from error
    return ray


def _connect(ray: Any) -> None:
    """Joins the cluster of RAY_ADDRESS or of `ray start` on this machine; starts one if there is neither.

    Address "auto" would also join the cluster that another program has started for itself and ends with it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    address = os.environ.get("RAY_ADDRESS") or None
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _LOCAL_OBJECT_STORE}
    try:
        if address is None:
            with contextlib.suppress(ValueError):  # there is a cluster, for which these are not to be set
                ray.init(logging_level=logging.WARNING, **own)
                return
        ray.init(address=address, logging_level=logging.WARNING)
    except ray.exceptions.AuthenticationError as error:
        raise LaunchError(
            "RAY_AUTH_MODE: the Ray cluster expects a token. Set RAY_AUTH_MODE=token for this program and "
            "for `ray start` on every machine, with the same token in ~/.ray/auth_token."
        ) from error
    except ConnectionError:
        if address is not None:
            raise
        # `ray start` left the address of a cluster that has ended.
        ray.init(address="local", logging_level=logging.WARNING, **own)
