"""What an engine is: a module `launch.engines.<name>` with `start(program, options) -> Job`.

Whatever runs the nodes, these rules hold:

- An object that has `run()` is a *worker*, any other is a *service*; a `PyNode` is a worker.
- The program is over when all workers have returned, when a node asks for a stop, or when a node fails.
- It stops in this order: (1) the stop event is set and the stop handlers are called in every node; (2) all
  workers return, within `stop_timeout`; (3) the nodes are closed in reverse order of addition, `close()`
  called on objects that have one, so that a node may still call those that were added before it.
- A node that fails is made anew while its group has restarts left; else the program ends with its
  `NodeError`.
"""

from __future__ import annotations

import abc
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.context import NodeContext
from launch.errors import LaunchError, NodeError, ProgramStopped, RemoteTraceback
from launch.nodes import MultiProcessingColocation, Node
from launch.program import Program

FIRST_BACK_OFF = 0.1  # seconds before the first restart of a node; doubles with each
LONGEST_BACK_OFF = 5.0
#: Name to a module of `launch.engines` and a function `(program, options) -> Job` of it.
ENGINES = {
    "serial": ("serial", "start"),
    "threads": ("threads", "start"),
    "processes": ("processes", "start"),
    "ray": ("ray", "start"),
    "launchpad": ("launchpad", "start"),
    "launchpad_mt": ("launchpad", "start_threads"),
}
ENDED = ("returned", "closed", "failed", "killed")  # states of a node whose work is over
LONG_LIFE = 60.0  # seconds; a node that lived so long has not failed "again"


@dataclass(frozen=True)
class Resources:
    """What the nodes of a group get.

    Attributes:
      threads: for OpenMP, BLAS and torch, in each node; more make a learner faster and starve the actors.
      env: environment variables, e.g. `{"CUDA_VISIBLE_DEVICES": "0"}`. Engines within one process ignore
        them.
      num_cpus, num_gpus, custom: what a machine must have free for each node of the group, as Ray counts it;
        only the engine `ray` places nodes. Without `num_cpus` none are held (and if nothing else is named
        either, one has to be free at the moment of placing).
      strategy: how Ray spreads the group's nodes over machines: `"PACK"` (near each other), `"SPREAD"`
        (apart where possible), `"STRICT_PACK"` (one machine) or `"STRICT_SPREAD"`; None leaves it to Ray.
    """

    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    num_cpus: float | None = None
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)
    strategy: str | None = None

    def environment(self) -> dict[str, str]:
        """The variables of a node's process."""
        variables = {key: str(value) for key, value in self.env.items()}
        return {"OMP_NUM_THREADS": str(self.threads), **variables}


@dataclass(frozen=True)
class Options:
    """How a program is run; see `launch.launch` for the meaning of each."""

    resources: Mapping[str, Resources] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    stop_timeout: float = 10.0
    heartbeat_timeout: float | None = 60.0
    directory: str | None = None
    preload: Sequence[str] | None = None


@dataclass(frozen=True)
class Leaf:
    """One node that makes an object: a node of the program, or one inside of a colocation."""

    node: Node
    context: NodeContext


@dataclass(frozen=True)
class Unit:
    """What lives and dies together: one process, where there are processes."""

    label: str
    group: str
    index: int
    leaves: tuple[Leaf, ...]


def plan(program: Program, engine: str, options: Options) -> tuple[str, list[Unit]]:
    """A new random name for this run, and its units in order of addition."""
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
        raise ValueError(f"program {program.name!r} has no nodes")
    return job, units


def check_options(program: Program, options: Options) -> None:
    """ValueError for groups that do not exist and numbers that make no sense."""
    for name in ("resources", "restarts"):
        unknown = sorted(set(getattr(options, name)) - set(program.groups))
        if unknown:
            raise ValueError(
                f"{name}: no group {unknown} in the program; its groups are {list(program.groups)}"
            )
    for group, count in options.restarts.items():
        if count < 0:
            raise ValueError(f"restarts[{group!r}]: expected a number >= 0, got {count}")
    if options.stop_timeout < 0:
        raise ValueError(f"stop_timeout: expected seconds >= 0, got {options.stop_timeout}")
    if options.heartbeat_timeout is not None and options.heartbeat_timeout <= 0:
        raise ValueError(f"heartbeat_timeout: expected seconds > 0 or None, got {options.heartbeat_timeout}")


class BackOff:
    """How long a node's next life has to wait: twice as long after each short life, at once after a long one.

    A node that fails as soon as it starts must not keep the machine busy; one that ran for hours and died for
    the seventh time should be back soon.
    """

    def __init__(self) -> None:
        self._short_lives = 0

    def after(self, life: float) -> float:
        """Seconds to wait after a life of `life` seconds."""
        if life >= LONG_LIFE:
            self._short_lives = 0
        # No larger power is needed, and one of a thousand is no float any more.
        seconds = FIRST_BACK_OFF * 2 ** min(self._short_lives, 30)
        self._short_lives += 1
        return min(LONGEST_BACK_OFF, seconds)


def ended_normally(error: BaseException, stopping: bool) -> bool:
    """Whether an exception out of a node is an ordinary end: `sys.exit(0)`, or a wait that a stop ended."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return stopping and isinstance(error, ProgramStopped)


def node_error(label: str, error: BaseException) -> NodeError:
    """The `NodeError` for an exception of a node in this process."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    wrapped = NodeError(label, type(error).__name__, str(error), text)
    wrapped.__cause__ = error
    return wrapped


def remote_error(label: str, failure: Mapping[str, Any], log_tail: str = "") -> NodeError:
    """The `NodeError` for what `launch.rpc.wire.describe_error` gave in another process."""
    from launch.rpc import wire

    error = NodeError(label, failure["kind"], failure["message"], failure["traceback"], log_tail)
    original = wire.rebuild_error(failure)
    if original is not None:
        original.__cause__ = RemoteTraceback(label, failure["traceback"])
        error.__cause__ = original
    return error


class Outcome:
    """How a run ends: the first result, the first error, whether it is over. Safe from any thread.

    Attributes:
      changed: notified when a node's state changes and when the run is over.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = threading.Event()

    def offer_result(self, result: Any) -> None:
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
        """Everything has ended and is cleaned up."""
        self.over.set()
        self.notify()


class Job(abc.ABC):
    """A running program.

    ```python
    with launch.start(program) as job:      # stopped and cleaned up at the end of the block
        print(job.status())
        job.client("counter").get_counts()
        result = job.wait()
    ```
    """

    def __init__(self, program: Program, engine: str, job: str, units: Sequence[Unit]) -> None:
        self.outcome = Outcome()
        self._program = program
        self._engine = engine
        self._job = job
        self._units = list(units)

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
          NodeError: the first node that failed.
          TimeoutError: it has not come to that after `timeout` seconds; the program goes on.
          ValueError: there is no such group.
        """
        ended = self.ended(labels)
        with self.outcome.changed:
            if not self.outcome.changed.wait_for(lambda: self.over or ended(), timeout):
                raise TimeoutError(f"the program is not over after {timeout} seconds")
        if self.over and self.outcome.error is not None:
            raise self.outcome.error
        return self.outcome.result

    def ended(self, labels: Sequence[str] | None) -> Callable[[], bool]:
        """A function that tells whether all nodes of the groups have ended; of no groups: never."""
        if labels is None:
            return lambda: False
        if isinstance(labels, (str, int, float)) or set(labels) - set(self._program.groups):
            groups = list(self._program.groups)
            raise ValueError(f"labels: got {labels!r}, expected groups of {groups}. A timeout is timeout=.")
        return lambda: all(node["state"] in ENDED for node in self.nodes() if node["group"] in labels)

    @abc.abstractmethod
    def stop(self, result: Any = None) -> None:
        """Asks the program to stop and returns at once; `wait` tells when it has."""

    def kill(self) -> None:
        """Ends the program without waiting for its nodes, where the engine can; else the same as `stop`."""
        self.stop()

    def status(self) -> dict[str, Any]:
        """The state of the program and of every node, as plain data.

        `{"program", "engine", "job", "state", "nodes": [{"label", "group", "index", "state", "restarts",
        "pid", "cpu_seconds", "memory_bytes", "calls", "error"}]}`. States of the program: running,
        stopping, finished, failed. States of a node: starting, running, returned, restarting,
        closing, closed, failed, killed.
        """
        state = self.state()
        if self.over:
            state = "finished" if self.outcome.error is None else "failed"
        return {
            "program": self._program.name,
            "engine": self._engine,
            "job": self._job,
            "state": state,
            "nodes": self.nodes(),
        }

    @abc.abstractmethod
    def state(self) -> str:
        """The state of the program until it is over."""

    @abc.abstractmethod
    def nodes(self) -> list[dict[str, Any]]:
        """The states of the nodes, as in `status`."""

    @abc.abstractmethod
    def client(self, label: str, index: int = 0) -> Any:
        """A client of the node `index` of the group `label`, for the process that launched."""

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


def node_status(
    unit: Unit, label: str, state: str, restarts: int, error: str | None, pid: int | None, **usage: Any
) -> dict[str, Any]:
    """The entry of a node in `Job.status`; `usage` has what is known of its process."""
    known = {"label": label, "group": unit.group, "index": unit.index, "state": state, "restarts": restarts}
    unknown = {"cpu_seconds": None, "memory_bytes": None, "calls": None}
    return {**known, "pid": pid, **unknown, **usage, "error": error}


def find_leaf(units: Sequence[Unit], label: str, index: int) -> Leaf:
    """The node that `job.client(label, index)` means. LookupError with what there is."""
    for unit in units:
        if unit.group == label and unit.index == index and len(unit.leaves) == 1:
            return unit.leaves[0]
        for leaf in unit.leaves:
            if leaf.context.label == label:
                return leaf
    raise LookupError(
        f"no node {label!r} with index {index}; the nodes are "
        f"{[leaf.context.label for unit in units for leaf in unit.leaves]}"
    )


def engine_names() -> list[str]:
    """The names of the engines."""
    return sorted(ENGINES)


def unserved(label: str, description: str) -> LaunchError:
    return LaunchError(f"node {label!r} is a {description}, which serves nothing: use a CourierNode")


def unknown_node(node_id: int) -> LaunchError:
    return LaunchError(f"the program has no node {node_id}: was the node of this handle added to it?")
