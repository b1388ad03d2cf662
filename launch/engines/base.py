"""The interface of engines: a module of `launch.engines` with a subclass of `Job`.

These rules hold for every engine:

- An object with `run()` is a *worker*, any other object a *service*. A `PyNode` is a worker.
- The program is over when all workers have returned, when a node asks for a stop, or when a node fails.
- It stops in this order: (1) the stop event is set, and the stop handlers are called in every node; (2) all
  workers return, within `stop_timeout`; (3) the nodes are closed in reverse order of addition, with `close()`
  of objects that have it, so that a node may still call those that were added before it.
- A node that fails is restarted while its group has restarts left; otherwise the program ends with its
  `NodeError`. A group with `min_nodes` may lose nodes: `launch.engines.supervised.elastic`.
"""

from __future__ import annotations

import abc
import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.context import NodeContext, Runtime, entered
from launch.engines.options import Options
from launch.errors import LaunchError, NodeError, ProgramStopped, describe
from launch.nodes import MultiProcessingColocation, ProgramNode
from launch.program import Program

FIRST_BACK_OFF_S = 0.1  # seconds before the first restart of a node; doubles with each restart
LONGEST_BACK_OFF_S = 5.0
#: By name, in alphabetical order: a module of `launch.engines` and its subclass of `Job`.
ENGINES = {
    "launchpad": ("launchpad", "LaunchpadJob"),
    "launchpad_mt": ("launchpad", "LaunchpadJob"),
    "processes": ("processes", "ProcessesJob"),
    "ray": ("ray", "RayJob"),
    "serial": ("serial", "SerialJob"),
    "threads": ("threads", "ThreadsJob"),
}
ENDED = ("returned", "closed", "failed", "killed")  # states of a node whose work is over
LONG_LIFE_S = 60.0  # seconds; after a life this long, the pause before a restart starts over


@dataclass(frozen=True)
class Leaf:
    """One node that makes an object: a node of the program, or one inside of a colocation."""

    node: ProgramNode
    context: NodeContext


@dataclass(frozen=True)
class Unit:
    """Nodes that start and end together: one process, on engines with processes."""

    label: str
    group: str
    index: int
    leaves: tuple[Leaf, ...]


def plan(program: Program, engine: str, options: Options) -> tuple[str, list[Unit]]:
    """Returns a new random name for this run, and its units in order of addition."""
    job = secrets.token_hex(6)
    units = []
    for group, index, node in program.members():
        name = f"{group}-{index}"
        parts = list(node.parts())
        together = (
            [[part] for part in parts] if isinstance(node, MultiProcessingColocation) else [parts or [node]]
        )
        for number, nodes in enumerate(together):
            unit = f"{name}.{number}" if len(together) > 1 else name
            leaves = []
            for position, part in enumerate(nodes):
                label = f"{unit}.{position}" if len(nodes) > 1 else unit
                leaves.append(
                    Leaf(part, NodeContext(program.name, group, index, label, engine, options.directory, job))
                )
            units.append(Unit(unit, group, index, tuple(leaves)))
    if not units:
        raise ValueError(f"program {program.name!r}: got no nodes, expected at least one.")
    return job, units


class BackOff:
    """The pause before a node's restart: doubles after each short life, and starts over after a long one.

    A node that fails at its start must not keep the machine busy. A node that ran for hours should be back
    soon, even after its seventh failure.
    """

    def __init__(self) -> None:
        self._short_lives = 0

    def after(self, life: float) -> float:
        """Returns the seconds to wait after a life of `life` seconds."""
        if life >= LONG_LIFE_S:
            self._short_lives = 0
        # A larger exponent is not needed, and 2 ** 1024 does not fit into a float.
        seconds = FIRST_BACK_OFF_S * 2 ** min(self._short_lives, 30)
        self._short_lives += 1
        return min(LONGEST_BACK_OFF_S, seconds)


def ended_normally(error: BaseException, stopping: bool) -> bool:
    """Returns whether a node's exception is a normal end: a wait that a stop ended."""
    return stopping and isinstance(error, ProgramStopped)


def node_error(label: str, error: BaseException) -> NodeError:
    """Returns the `NodeError` for an exception of a node in this process."""
    wrapped = NodeError(label, **describe(error))
    wrapped.__cause__ = error
    return wrapped


class Outcome:
    """The end of a run: the first result, the first error, and whether it is over. Safe from any thread.

    Attributes:
      changed: notified when a node's state changes and when the run is over.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = threading.Event()

    def offer_result(self, result: Any) -> None:
        if isinstance(result, Exception):
            self.fail(result)
            return
        with self.changed:
            if self.result is None:
                self.result = result

    def fail(self, error: BaseException) -> None:
        with self.changed:
            if self.error is None:
                self.error = error

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def end(self) -> None:
        """Records that everything has ended and is cleaned up."""
        with self.changed:
            self.over.set()
            self.changed.notify_all()


class Record:
    """The record of a node, which `Job.status` shows, across its restarts.

    Attributes:
      usage: `cpu_seconds`, `memory_bytes` and `calls` of its process, as far as they are known.
    """

    def __init__(self, unit: Unit, label: str) -> None:
        self.unit = unit
        self.label = label
        self.state = "starting"
        self.restarts = 0
        self.back_off = BackOff()
        self.pid: int | None = None
        self.usage: dict[str, Any] = dict.fromkeys(("cpu_seconds", "memory_bytes", "calls"))
        self.error: str | None = None

    def status(self) -> dict[str, Any]:
        """Returns the entry, as plain data."""
        unit, own = self.unit, {name: getattr(self, name) for name in ("state", "restarts", "pid")}
        node = {"label": self.label, "group": unit.group, "index": unit.index}
        return {**node, **own, **self.usage, "error": self.error}


class Job(abc.ABC):
    """A running program.

    ```python
    with launch.start(program) as job:      # stopped and cleaned up at the end of the block
        print(job.status())
        job.client("counter").get_counts()
        result = job.wait()
    ```
    """

    _runtime: Runtime  # of the launching process
    _records: Sequence[Record]  # of the nodes, in order of addition

    def __init__(self, program: Program, engine: str, options: Options) -> None:
        self.outcome = Outcome()
        self._program = program
        self._engine = engine
        self._options = options
        self._job, self._units = plan(program, engine, options)

    @property
    def result(self) -> Any:
        """The first result given to `stop`, so far."""
        return self.outcome.result

    @property
    def over(self) -> bool:
        """Whether everything has ended and is cleaned up."""
        return self.outcome.over.is_set()

    def wait(self, labels: Sequence[str] | None = None, *, timeout: float | None = None) -> Any:
        """Waits for the end, or until all nodes of the groups `labels` have ended; returns the result.

        Raises:
          NodeError: A node failed; the error is the first one's.
          LaunchError: No node is a worker, so that the program would never end. It is stopped.
          TimeoutError: The program or the groups still run after `timeout` seconds. The program
            continues.
          ValueError: There is no such group.
        """
        ended = self.ended(labels)

        def reached() -> bool:
            return self.over or ended() or self._has_no_worker()

        with self.outcome.changed:
            if not self.outcome.changed.wait_for(reached, timeout):
                raise TimeoutError(f"The program is not over after {timeout} seconds.")
        if self._has_no_worker():
            self.outcome.fail(no_worker(self._program))
            self.stop()
            self.outcome.over.wait()
        if self.outcome.error is not None:
            raise self.outcome.error
        return self.outcome.result

    @abc.abstractmethod
    def _has_no_worker(self) -> bool:
        """Whether all nodes have their objects, none of which is a worker, and nothing has stopped them."""

    def ended(self, labels: Sequence[str] | None) -> Callable[[], bool]:
        """Returns a function that tells whether all nodes of the groups have ended; False for None."""
        if labels is None:
            return lambda: False
        if isinstance(labels, (str, int, float)) or set(labels) - set(self._program.groups):
            groups = list(self._program.groups)
            raise ValueError(f"labels: got {labels!r}, expected groups of {groups}. A timeout is timeout=.")
        return lambda: all(node["state"] in ENDED for node in self.nodes() if node["group"] in labels)

    @abc.abstractmethod
    def stop(self, result: Any = None) -> None:
        """Asks the program to stop and returns at once; `wait` returns when it has stopped."""

    def kill(self) -> None:
        """Ends the program without waiting for its nodes if the engine can; otherwise the same as `stop`."""
        self.stop()

    def status(self) -> dict[str, Any]:
        """Returns the state of the program and of every node, as plain data.

        `{"program", "engine", "job", "state", "nodes": [{"label", "group", "index", "state", "restarts",
        "pid", "cpu_seconds", "memory_bytes", "calls", "error"}]}`. States of the program: running,
        stopping, finished, failed. States of a node: starting, running, returned, restarting,
        closing, closed, failed, killed.
        """
        return self._status(self.over)

    def _status(self, over: bool) -> dict[str, Any]:
        state = "stopping" if self._runtime.stopped.is_set() else "running"
        if over:
            state = "finished" if self.outcome.error is None else "failed"
        return {
            "program": self._program.name,
            "engine": self._engine,
            "job": self._job,
            "state": state,
            "nodes": self.nodes(),
        }

    def nodes(self) -> list[dict[str, Any]]:
        """Returns the states of the nodes, as in `status`."""
        return [record.status() for record in self._records]

    def client(self, label: str, index: int = 0) -> Any:
        """Returns a client of the node `index` of the group `label`, for the launching process.

        Raises:
          LookupError: There is no such node.
        """
        for unit in self._units:
            for leaf in unit.leaves:
                only = len(unit.leaves) == 1 and (unit.group, unit.index) == (label, index)
                if only or leaf.context.label == label:
                    return self._runtime.client(leaf.node.node_id)
        labels = [leaf.context.label for unit in self._units for leaf in unit.leaves]
        raise LookupError(f"node: got {label!r} with index {index}, expected one of {labels}.")

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Assigns the calling thread of the launching process to this program, as `launch.stop` needs it."""
        return entered(self._runtime, None)

    def _leave(self) -> None:
        """Leaves what was entered for the run, whose nodes have ended; then it is over."""
        try:
            self._options.at_end.close()
        except Exception as error:
            self.outcome.fail(error)
        self.outcome.end()

    def _begin_stop(self) -> None:
        """Sets the stop event and calls the stop handlers of the launching process."""
        try:
            self._runtime.begin_stop()
        except Exception as error:
            self.outcome.fail(error)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.stop()
        try:
            self.outcome.over.wait()
        except KeyboardInterrupt:
            self.kill()
            self.outcome.over.wait()
            raise
        if error is None and self.outcome.error is not None:
            raise self.outcome.error


def no_worker(program: Program) -> LaunchError:
    nodes = ", ".join(f"{group} ({nodes[0].description})" for group, nodes in program.groups.items())
    return LaunchError(
        f"program {program.name!r}: got nodes without run(), {nodes}, expected a worker among them. Only a "
        "worker works by itself and ends the program: a PyNode, or a node whose object has run(); step() is "
        "what the engine serial calls instead. To call services from the script, use job.client() of "
        "launch.start()."
    )


def unserved(label: str, description: str) -> LaunchError:
    return LaunchError(f"node {label!r} is a {description}, which serves no methods. Use a CourierNode.")


def unknown_node(node_id: int) -> LaunchError:
    return LaunchError(f"The program has no node {node_id}. Its handle is of a node that was not added.")
