"""Functions for code inside a node: find out where it runs, and stop the program or wait for its stop.

```python
def run(self):
    while not launch.stop_event().is_set():
        self.step()
    launch.stop(result)         # from any thread of any node; the first result counts
```

`Runtime` is one process's view of one program; every engine has its own subclass. A thread that a node
started finds its program if the process hosts only one. If the process hosts several (notebooks, tests), the
thread uses a stopper that `make_program_stopper` created on a thread of the node.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import platform
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launch import platforms
from launch.errors import LaunchError, without_exit


@dataclass(frozen=True)
class NodeContext:
    """The place where code runs.

    Attributes:
      program: name of the program.
      group: label of the node's group.
      index: number of the node within its group, from 0.
      label: `"<group>-<index>"`, the name of the node in logs and errors.
      engine: name of the engine, such as `"serial"`, `"threads"` or `"processes"`.
      directory: the folder of the run, or None.
      job: random name of this run; its folders in shared memory have the prefix `lp-<job>`.
      address: IP address at which nodes on other machines reach this one; loopback if there are no others.
    """

    program: str
    group: str
    index: int
    label: str
    engine: str
    directory: str | None = None
    job: str = ""
    address: str = "127.0.0.1"

    @property
    def host(self) -> str:
        """Identifies the machine (or container) of the caller; equal for nodes on one machine."""
        return f"{platform.node()} {platforms.boot_id()}".strip()


class Runtime(abc.ABC):
    """One process's view of a running program.

    Args:
      job: random name of the run.
      request_stop: carries out `request_stop`.
      report_failure: ends a node as failed; it has the arguments of `fail`. None for a process without
        nodes.

    Attributes:
      stop_was_asked: whether this process has asked for a stop.
      stopped: event that is set when a stop begins.
      only_context: the context of this process's node, if it has only one.
      stop_handlers: the handlers that have not been called.
      loss_handlers: called with the label of each node that is lost; see `register_loss_handler`.
    """

    def __init__(
        self,
        job: str,
        request_stop: Callable[..., None],
        report_failure: Callable[..., None] | None = None,
    ) -> None:
        self.job = job
        self._request_stop, self.stop_was_asked = request_stop, False
        self._report_failure = report_failure
        self.only_context: NodeContext | None = None
        self.stopped = threading.Event()
        self.stop_handlers: list[Callable[[], Any]] = []
        self.loss_handlers: list[Callable[[str], Any]] = []
        self._handlers_lock = threading.Lock()
        self._handled = threading.Event()

    def request_stop(self, result: Any = None) -> None:
        """Asks the program to stop, with a result."""
        self.stop_was_asked = True
        self._request_stop(result)

    @abc.abstractmethod
    def client(self, node_id: int) -> Any:
        """Returns a client of the node; every call in this process returns the same one."""

    def failure_handler(self, label: str) -> Callable[[BaseException], None]:
        """Returns what `make_failure_handler` does for the node `label` of this process."""
        return functools.partial(self.fail, label)

    def fail(self, label: str, error: BaseException, **life: int) -> None:
        """Ends the node `label`, which is in this process, as failed.

        A handler of failures refers to the runtime, which a saved program names and does not hold.
        """
        if self._report_failure is None:
            raise LaunchError(f"node: got {label!r}, expected a node of this process.")
        self._report_failure(label, error, **life)

    def begin_stop(self) -> None:
        """Sets the stop event and calls the handlers, once."""
        with self._handlers_lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
            handlers, self.stop_handlers = list(self.stop_handlers), []  # others may still remove from it
        errors = []
        try:
            for handler in handlers:
                try:
                    handler()
                except (
                    Exception,
                    SystemExit,
                ) as error:  # An exit would end the stopping thread.
                    errors.append(without_exit(error, f"stop handler {handler!r}"))
        finally:
            self._handled.set()
        if errors:
            raise errors[0]

    def finish_stop(self, timeout: float | None = None) -> bool:
        """Waits for the handlers if the program is stopping; they may call nodes that close after this.

        Returns whether they have returned within `timeout` seconds.
        """
        return not self.stopped.is_set() or self._handled.wait(timeout)

    def add_stop_handler(self, handler: Callable[[], Any]) -> None:
        with self._handlers_lock:
            if not self.stopped.is_set():
                self.stop_handlers.append(handler)
                return
        handler()


class _Here(threading.local):
    """The program and the node of the calling thread."""

    runtime: Runtime | None = None
    context: NodeContext | None = None


here = _Here()
_active: list[Runtime] = []


@contextlib.contextmanager
def active(runtime: Runtime) -> Iterator[None]:
    """Registers a runtime for threads of this process that no engine started."""
    _active.append(runtime)
    try:
        yield
    finally:
        _active.remove(runtime)


def enter(runtime: Runtime | None, context: NodeContext | None) -> None:
    """Assigns the calling thread to a node."""
    here.runtime, here.context = runtime, context


@contextlib.contextmanager
def entered(runtime: Runtime | None, context: NodeContext | None) -> Iterator[None]:
    """Assigns the calling thread to a node inside the `with` block."""
    before = here.runtime, here.context
    enter(runtime, context)
    try:
        yield
    finally:
        enter(*before)


def find_runtime() -> Runtime | None:
    """Returns the runtime of the calling thread's program, or None outside of a program."""
    if here.runtime is not None:
        return here.runtime
    if len({runtime.job for runtime in _active}) > 1:  # one program may have several nodes in this process
        raise LaunchError(
            f"{len(_active)} programs run in this process, and this thread belongs to none of them. Create a "
            "stopper with launch.make_program_stopper() on a thread of the node and pass it to this thread."
        )
    return _active[0] if _active else None


def find_context() -> NodeContext | None:
    """Returns the place where the calling code runs, or None outside of a node."""
    if here.context is not None:
        return here.context
    runtime = find_runtime()
    return None if runtime is None else runtime.only_context


def current_runtime() -> Runtime:
    runtime = find_runtime()
    if runtime is None:
        raise LaunchError("No program runs in this process. Call this inside of a node.")
    return runtime


def get_node_context() -> NodeContext:
    """Returns the place where the calling code runs.

    Raises:
      LaunchError: The caller is outside of a node.
    """
    found = find_context()
    if found is None:
        raise LaunchError(
            "get_node_context() was called outside of a node, or on a thread that a node started in a "
            "process of several nodes. Call it in the node's constructor and keep the result."
        )
    return found


def shared_memory_directory() -> str | None:
    """Returns this run's folder in shared memory, of mode 0700; None outside of a node that is a process.

    The nodes of one machine have the same folder. It is removed when the program has ended, with the files of
    killed nodes; on `ray`, if the machine's last node was killed, when the next program starts there.
    """
    node = find_context()
    if node is None or node.engine not in ("processes", "ray"):
        return None
    path = shared_memory_path(node.job)
    return path if os.path.isdir(path) else None


def shared_memory_path(job: str) -> str:
    """The folder of a run in shared memory; see `launch.platforms.shared_memory_root`."""
    return os.path.join(platforms.shared_memory_root(), f"lp-{job}")


def stop(result: Any = None) -> None:
    """Asks the whole program to stop and returns at once; callable from any thread of any node.

    Args:
      result: the value that `launch()` returns; the first that is not None counts. If it is an exception,
        `launch()` raises it.
    """
    current_runtime().request_stop(result)


def stop_was_asked() -> bool:
    """Returns whether this process has asked for a stop of the program, or the stop has begun."""
    runtime = current_runtime()
    return runtime.stop_was_asked or runtime.stopped.is_set()


def stop_event() -> threading.Event:
    """Returns the event that is set when the program begins to stop. Outside of a program it is never set."""
    runtime = find_runtime()
    return threading.Event() if runtime is None else runtime.stopped


def wait_for_stop(timeout: float | None = None) -> bool:
    """Waits until the program begins to stop, at most `timeout` seconds; returns whether it does."""
    return current_runtime().stopped.wait(timeout)


def register_stop_handler(handler: Callable[[], Any]) -> None:
    """Registers `handler`, which this process calls when the program begins to stop.

    If the program is already stopping, the handler is called at once. Does nothing outside of a program.
    """
    runtime = find_runtime()
    if runtime is not None:
        runtime.add_stop_handler(handler)


def unregister_stop_handler(handler: Callable[[], Any]) -> None:
    """Removes a handler of `register_stop_handler`; does nothing if it is not registered."""
    runtime = find_runtime()
    if runtime is not None:
        with contextlib.suppress(ValueError):
            runtime.stop_handlers.remove(handler)


def register_loss_handler(handler: Callable[[str], Any]) -> None:
    """Registers `handler`, which this process calls with the label of each node that the program has lost.

    Only nodes of groups with `min_nodes` can be lost. The handler must return soon. It is called before the
    next life of that node begins, but on another machine the call may come late. Does nothing outside of a
    program.
    """
    runtime = find_runtime()
    if runtime is not None:
        runtime.loss_handlers.append(handler)


def make_program_stopper(launch_type: Any = None) -> Callable[..., None]:
    """Returns a function that stops the program; it takes the result, which is optional.

    Created inside a node, the function stops that node's program from any thread. Created outside, it may be
    passed to a node as an argument and stops the program in which it is called.

    Args:
      launch_type: ignored; programs written for Launchpad pass it.
    """
    return stop if find_runtime() is None else current_runtime().request_stop


def make_failure_handler() -> Callable[[BaseException], None]:
    """Returns a function that ends this node as failed, from any thread; it takes the error.

    A service may do its work on a thread of its own, whose exceptions reach no caller. With this function
    they are failures of the node: it is restarted if its group has restarts left, otherwise the program ends
    with its `NodeError`. Call this on a thread of the node, such as in the constructor. A worker raises its
    errors in `run()` instead: the engine `threads` cannot end its thread, so it would not restart it.
    """
    return current_runtime().failure_handler(get_node_context().label)
