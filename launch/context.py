"""What code inside a node can ask of its program: where am I, are we stopping, please stop.

```python
def run(self):
    while not launch.stop_event().is_set():
        self.step()
    launch.stop(result)         # from any thread of any node; the first result wins
```

`Runtime` is one process's view of one program; every engine has its own. A thread that a node started itself
finds its program because it is the only one of its process; where one process hosts several programs
(notebooks, tests) such a thread uses `make_program_stopper`, made on a thread of the node.
"""

from __future__ import annotations

import abc
import contextlib
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.errors import LaunchError

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class NodeContext:
    """Where a piece of code runs.

    Attributes:
      program: name of the program.
      group: label of the node's group.
      index: number of the node within its group, from 0.
      label: `"<group>-<index>"`, the name of the node in logs and errors.
      engine: `"serial"`, `"threads"`, `"processes"` …
      directory: the folder of the run, or None.
      job: random name of this run; what it leaves in shared memory begins with `lp-<job>`.
    """

    program: str
    group: str
    index: int
    label: str
    engine: str
    directory: str | None = None
    job: str = ""

    @property
    def host(self) -> str:
        """Identifies the machine (or container) that calls this; nodes of one machine get the same."""
        boot = ""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{platform.node()} {boot}".strip()


class Runtime(abc.ABC):
    """One process's view of a running program.

    Args:
      job: random name of the run.

    Attributes:
      stopped: set when a stop began.
      only_context: where the code of this process runs, if it has one node.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.only_context: NodeContext | None = None
        self.stopped = threading.Event()
        self._handlers: list[Callable[[], Any]] = []
        self._handlers_lock = threading.Lock()

    @abc.abstractmethod
    def client(self, node_id: int) -> Any:
        """A client of the node; the same one for every call in this process."""

    @abc.abstractmethod
    def request_stop(self, result: Any = None) -> None:
        """Asks the program to stop; `result` counts if it is the first that is not None."""

    def begin_stop(self) -> None:
        """Sets the stop event and calls the handlers, once."""
        with self._handlers_lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
            handlers, self._handlers = self._handlers, []
        errors = []
        for handler in handlers:
            try:
                handler()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def add_stop_handler(self, handler: Callable[[], Any]) -> None:
        with self._handlers_lock:
            if not self.stopped.is_set():
                self._handlers.append(handler)
                return
        handler()

    def remove_stop_handler(self, handler: Callable[[], Any]) -> None:
        with self._handlers_lock:
            if handler in self._handlers:
                self._handlers.remove(handler)


class _Here(threading.local):
    runtime: Runtime | None = None
    context: NodeContext | None = None


_here = _Here()
_active: list[Runtime] = []


def activate(runtime: Runtime) -> None:
    """Makes a runtime known to threads of this process that no engine started."""
    _active.append(runtime)


def deactivate(runtime: Runtime) -> None:
    if runtime in _active:
        _active.remove(runtime)


def enter(runtime: Runtime | None, context: NodeContext | None) -> None:
    """From now on the calling thread belongs to this node."""
    _here.runtime = runtime
    _here.context = context


class entered:
    """The calling thread belongs to this node inside the `with` block.

    A class, since the serial engine makes one for each turn and a generator takes three times as long.
    """

    __slots__ = ("_before", "_now")

    def __init__(self, runtime: Runtime, context: NodeContext | None) -> None:
        self._now = runtime, context

    def __enter__(self) -> None:
        self._before = _here.runtime, _here.context
        _here.runtime, _here.context = self._now

    def __exit__(self, *exc_info: object) -> None:
        _here.runtime, _here.context = self._before


def find_runtime() -> Runtime | None:
    """The program of the calling thread, or None outside of any."""
    if _here.runtime is not None:
        return _here.runtime
    if len({runtime.job for runtime in _active}) > 1:  # one program may have several nodes in this process
        raise LaunchError(
            f"{len(_active)} programs run in this process and this thread belongs to none of them: "
            "make a stopper with launch.make_program_stopper() on a thread of the node and hand it over"
        )
    return _active[0] if _active else None


def current_runtime() -> Runtime:
    runtime = find_runtime()
    if runtime is None:
        raise LaunchError("no program runs in this process; this can be called only inside of a node")
    return runtime


def get_node_context() -> NodeContext:
    """Where the calling code runs. LaunchError outside of a node."""
    if _here.context is not None:
        return _here.context
    runtime = find_runtime()
    only = None if runtime is None else runtime.only_context
    if only is None:
        raise LaunchError(
            "get_node_context() was called outside of a node, or on a thread that a node started itself in a "
            "process of several nodes: call it in the node's constructor and keep the answer"
        )
    return only


def shared_memory_directory() -> str | None:
    """A folder for this run in shared memory, of mode 0700; None outside of a node that is a process.

    It is taken away when the program has ended, however it ended: also what a killed node left in it.
    """
    runtime = find_runtime()
    node = _here.context or (None if runtime is None else runtime.only_context)
    if node is None or node.engine != "processes" or not os.path.isdir(SHARED_MEMORY):
        return None
    return os.path.join(SHARED_MEMORY, f"lp-{node.job}")


def stop(result: Any = None) -> None:
    """Asks the whole program to stop and returns at once; callable from any thread of any node.

    Args:
      result: what `launch()` returns; the first that is not None counts.
    """
    current_runtime().request_stop(result)


def stop_event() -> threading.Event:
    """The event that is set when the program begins to stop; outside of a program one that nobody sets."""
    runtime = find_runtime()
    return threading.Event() if runtime is None else runtime.stopped


def wait_for_stop(timeout: float | None = None) -> bool:
    """Waits until the program begins to stop, at most `timeout` seconds. Returns whether it does."""
    return current_runtime().stopped.wait(timeout)


def register_stop_handler(handler: Callable[[], Any]) -> None:
    """Has `handler()` called in this process when the program begins to stop; at once if it does already.

    Nothing happens outside of a program.
    """
    runtime = find_runtime()
    if runtime is not None:
        runtime.add_stop_handler(handler)


def unregister_stop_handler(handler: Callable[[], Any]) -> None:
    """Takes back `register_stop_handler`; nothing happens if it is not registered."""
    runtime = find_runtime()
    if runtime is not None:
        runtime.remove_stop_handler(handler)


def make_program_stopper(launch_type: Any = None) -> Callable[..., None]:
    """Something to call, with the result or nothing, that stops the program.

    Made inside of a node it stops that node's program from any thread. Made outside it may be handed to a
    node as an argument, and stops the program in which it is called.

    Args:
      launch_type: not looked at; programs written for Launchpad give it.
    """
    return stop if find_runtime() is None else current_runtime().request_stop
