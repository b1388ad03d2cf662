"""The part that runs inside the process of a node."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psutil

from launch import context, platforms
from launch.context import entered
from launch.engines.base import Leaf, Unit, ended_normally
from launch.engines.supervised.channel import Channel
from launch.engines.supervised.runtime import ProcessSetup, RemoteRuntime
from launch.futures import fulfil
from launch.nodes import CourierNode, ServerNode
from launch.rpc import wire
from launch.rpc.server import RpcServer
from launch.seeds import seed_generators

_MAX_FILES = 1 << 16  # Open files of a node's process: each of its clients is one.
# Under Launchpad, nodes may be threads of one process. When threads import modules of one package at the same
# time, Python can take a module away from one of them: they load one after the other.
_importing = threading.Lock()


class Instance:
    """One node of this process: its object and, if it serves, its server."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.object: Any = None
        self.server: RpcServer | None = None

    @property
    def is_worker(self) -> bool:
        return self.leaf.node.is_function or self.leaf.node.runs(self.object)

    @property
    def messages(self) -> int:
        """Number of calls received; for a replay server, of messages, if its back end counts them."""
        if self.server is not None:
            return self.server.calls
        return getattr(self.object, "messages", 0) if isinstance(self.leaf.node, ServerNode) else 0


class NodeProcess:
    """Creates the objects of a unit, serves them, runs its workers, and closes them when ordered to.

    Args:
      channel: the channel to the launcher.
      setup: the launcher's first message.

    Attributes:
      close: event that is set when the objects should be closed.
      parent: process that ends this one if it hangs after the launcher's death, and with which it ends then;
        None if there is no such process.
    """

    def __init__(self, channel: Channel, setup: ProcessSetup) -> None:
        self._channel = channel
        self._setup = setup
        self.parent: int | None = None
        self._instances: list[Instance] = []
        self._ended = threading.Event()
        if setup.heartbeat is not None:
            # Now: when many processes import at the same time, that can take longer than the limit.
            threading.Thread(target=self._beat, name="launch-heartbeat", daemon=True).start()
        try:
            with _importing:
                unit: Unit = wire.load(setup.unit, ())
                seed_generators(setup.seed)  # Here, where the packages that the code needs are imported.
        except BaseException:
            self._ended.set()
            raise
        leaves = unit.leaves
        if setup.interface:
            here = setup.interface.strip("[]")
            leaves = tuple(
                Leaf(leaf.node, dataclasses.replace(leaf.context, address=here)) for leaf in leaves
            )
        self._instances = [Instance(leaf) for leaf in leaves]
        job = leaves[0].context.job
        self._runtime = RemoteRuntime(job, setup.entries, setup.keys, self._ask_to_stop, self._fail)
        if len(self._instances) == 1:
            self._runtime.only_context = self._instances[0].leaf.context
        self.close = threading.Event()
        self._is_alone = False  # whether the launcher has died
        self._told_to_close = False
        self._failed = False  # whether a thread of a node reported its failure
        self._lock = threading.Lock()
        self._unbuilt = len(self._instances)

    def run(self) -> int:
        """Runs the unit from start to end; returns the exit code."""
        threading.Thread(target=self._listen, name="launch-control", daemon=True).start()
        try:
            self._run_all()
            self._runtime.finish_stop()
            self._tell("returned")
            if any(instance.server is not None or not instance.is_worker for instance in self._instances):
                self.close.wait()
            if self._failed:
                return 1
            with contextlib.ExitStack() as closing:  # after an error, the others are closed too
                for instance in self._instances:
                    closing.callback(self._close, instance)
            self._runtime.close()
        except BaseException as error:
            self._tell("failed", wire.describe_error(error))
            return 1
        self._ended.set()
        self._tell("alive", self._usage())  # the total usage
        self._tell("closed")
        return 0

    def _run_all(self) -> None:
        """Returns when all nodes are constructed and all workers have returned, or raises the first error.

        A single node runs on the main thread. Several nodes have one thread each, so that the constructor of
        one may wait for another.
        """
        if len(self._instances) == 1:
            return self._run_one(self._instances[0])
        ends: list[Future] = []
        for instance in self._instances:
            ends.append(Future())
            run, name = (ends[-1], self._run_one, instance), instance.leaf.context.label
            threading.Thread(target=fulfil, args=run, name=name, daemon=True).start()
        for end in concurrent.futures.as_completed(ends):
            end.result()

    def _run_one(self, instance: Instance) -> None:
        """Creates the object of a node, and runs it if it is a worker."""
        with entered(self._runtime, instance.leaf.context):
            try:
                self._build(instance)
            except BaseException as error:
                if ended_normally(error, self._runtime.stopped.is_set()):
                    return  # The constructor waited for something.
                raise
            with self._lock:
                self._unbuilt -= 1
                last = self._unbuilt == 0
            if last:
                self._tell("ready", any(instance.is_worker for instance in self._instances))
            try:
                if instance.is_worker:
                    instance.leaf.node.work(instance.object)
            except BaseException as error:
                if not ended_normally(error, self._runtime.stopped.is_set()):
                    raise

    def _build(self, instance: Instance) -> None:
        """Creates the object and serves it at the node's address, or at a free port that it reports."""
        node, leaf = instance.leaf.node, instance.leaf
        entry, interface = self._setup.entries[node.node_id], self._setup.interface
        if isinstance(node, ServerNode):
            address = entry.address or f"tcp://{interface}:{_free_port(interface)}"
            instance.object = node.serve(
                embedded=False, concurrent=True, address=address, curve=self._setup.keys
            )
        else:
            instance.object = None if node.is_function else node.call()
            if not isinstance(node, CourierNode):
                return
            instance.server = RpcServer(
                instance.object,
                entry.address or f"tcp://{interface}:*",
                self._setup.keys,
                name=leaf.context.label,
                enter=lambda: context.enter(self._runtime, leaf.context),
                on_failure=functools.partial(self._fail, leaf.context.label),
                **node.server_options,
            ).start()
            address = instance.server.address
        if entry.address is None:
            self._tell("serving", {node.node_id: address})

    def _close(self, instance: Instance) -> None:
        with entered(self._runtime, instance.leaf.context):
            instance.leaf.node.close(instance.object)
            if instance.server is not None:
                instance.server.close()

    def _listen(self) -> None:
        """Carries out the launcher's orders. Ends the process when the channel breaks: the launcher died."""
        context.enter(self._runtime, self._runtime.only_context)
        with contextlib.suppress(EOFError):
            while True:
                command = self._channel.receive()
                if command == "stop":
                    self._carry_out(self._runtime.begin_stop)
                elif command == "close":
                    self.close.set()
                elif command[0] == "addresses":
                    self._runtime.move(command[1])
                elif command[0] == "lost":
                    self._carry_out(*self._runtime.loss_handlers, arguments=command[1:])
        self._is_alone = True
        if self.parent is not None:
            platforms.end_with_parent(signal.SIGKILL)
            if os.getppid() != self.parent:  # It has died, too.
                os._exit(1)
        if self._told_to_close:
            self.close.set()
        self._carry_out(self._runtime.begin_stop)
        if not any(instance.is_worker for instance in self._instances):
            # Workers may still need this service to save their state.
            self.close.wait(self._setup.longest_timeout)
        self.close.set()
        if not self._ended.wait(self._setup.stop_timeout):
            os._exit(1)

    def close_if_alone(self) -> None:
        """Closes a service whose launcher has died; a worker closes when its work has returned.

        While the launcher lives, it decides when, because other nodes may need this service to save their
        state.
        """
        self._told_to_close = True
        if self._is_alone:
            self.close.set()

    def _carry_out(self, *handlers: Callable[..., Any], arguments: tuple = ()) -> None:
        try:
            for handler in handlers:
                handler(*arguments)
        except (Exception, SystemExit) as error:
            self._tell("failed", wire.describe_error(error))

    def _ask_to_stop(self, result: Any = None) -> None:
        """Carries out `launch.stop`. An exception travels with its traceback, which a pickle would drop."""
        if isinstance(result, Exception):
            self._tell("raised", wire.describe_error(result))
        else:
            self._tell("stop", result)

    def _fail(self, label: str, error: BaseException) -> None:
        """Carries out `launch.make_failure_handler`: ends this process as an error of a worker does."""
        with self._lock:
            if self._failed or ended_normally(error, self._runtime.stopped.is_set()):
                return
            self._failed = True
        self._tell("failed", wire.describe_error(error))
        self.close.set()

    def _beat(self) -> None:
        interval = min(1.0, (self._setup.heartbeat or 4.0) / 4)
        while True:
            self._tell("alive", self._usage())
            if self._ended.wait(interval):
                return

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = dict.fromkeys(("cpu_seconds", "memory_bytes"))
        with contextlib.suppress(OSError, psutil.Error):  # The system gives no file: the process lives.
            process = psutil.Process()
            times, memory = process.cpu_times(), process.memory_info()
            usage = {"cpu_seconds": times.user + times.system, "memory_bytes": memory.rss}
        return {**usage, "calls": sum(instance.messages for instance in self._instances)}

    def _tell(self, what: str, value: Any = None) -> None:
        with contextlib.suppress(OSError):  # the launcher is dead; the listening thread ends this process
            self._channel.send((what, value))


def allow_files() -> None:
    """Raises this process's limit of open files. At the usual 1,024, further clients wait in vain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # The system has another limit: macOS.
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def redirect_output(log: str | None) -> None:
    """Appends what this process prints from now on to the file `log`; None leaves it as it is."""
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _free_port(interface: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET) as probe:
        probe.bind((interface.strip("[]"), 0))
        return probe.getsockname()[1]


def run(channel: Channel, interface: str = "", *, parent: int | None = None) -> int:
    """Runs a node under the launcher at the other end of a channel; returns the exit code.

    Args:
      channel: the channel to the launcher.
      interface: the interface on which nodes without a fixed address serve.
      parent: a fork server, which ends this process when the launcher has died: with SIGTERM, which closes a
        service, and later with SIGKILL.
    """
    allow_files()
    platforms.limit_torch()
    try:
        process = NodeProcess(channel, dataclasses.replace(channel.receive(), interface=interface))
        if parent is not None:
            process.parent = parent
            signal.signal(signal.SIGTERM, lambda *_: process.close_if_alone())
            os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        with context.active(process._runtime):
            return process.run()
    except BaseException as error:
        channel.send(("failed", wire.describe_error(error)))
        return 1
