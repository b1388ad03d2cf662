"""What happens inside the process of a node."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import os
import pickle
import resource
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import zmq

from launch import context
from launch.context import NodeContext, Runtime, entered
from launch.engines._channel import Channel
from launch.engines.base import Leaf, Unit, ended_normally
from launch.errors import LaunchError, ProgramStopped
from launch.handles import Client
from launch.nodes import CourierNode, ReplayNode, connect_replay
from launch.rpc import wire
from launch.rpc.client import Connection
from launch.rpc.server import Server
from launch.rpc.sockets import CurveKeys

_LAUNCHER_GONE_GRACE = 4.0


@dataclass(frozen=True)
class Entry:
    """How to reach a node.

    Attributes:
      serves: as `launch.nodes.Node.serves`.
      address: None if it is not known yet; it is told later, by the order "where".
      port: a loopback port, for replay back ends that know nothing of our sockets.
      options: of the client; or the name of the replay back end.
    """

    label: str
    description: str
    serves: str | None
    address: str | None
    port: int | None
    options: Any


@dataclass(frozen=True)
class Setup:
    """Everything a node's process needs to know; sent over its private line."""

    unit: bytes  # pickled `Unit`; apart, so that its code is imported only once the line is in use
    entries: dict[int, Entry]
    keys: CurveKeys
    heartbeat: float | None
    former: dict[int, str] = field(default_factory=dict)  # where the last life of these nodes was
    interface: str = ""  # where nodes without a fixed address serve: the name or number of this machine


class RemoteRuntime(Runtime):
    """The view of a process in which some of the program's nodes live, or none (the launcher)."""

    def __init__(self, entries: dict[int, Entry], keys: CurveKeys, request_stop: Any) -> None:
        super().__init__()
        self.only_context: NodeContext | None = None
        self._entries = entries
        self._keys = keys
        self._request_stop = request_stop
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        self._connections: dict[int, Any] = {}  # replay clients too
        self._moved = threading.Condition()

    def request_stop(self, result: Any = None) -> None:
        self._request_stop(result)

    def client(self, node_id: int) -> Any:
        entry = self._entries.get(node_id)
        if entry is not None and entry.serves == "replay" and entry.address is None:
            self._wait_for_address(node_id)  # before the lock: others may need their clients meanwhile
        with self._lock:
            client = self._clients.get(node_id)
            if client is None:
                client = self._clients[node_id] = self._connect(node_id)
            return client

    def _connect(self, node_id: int) -> Any:
        entry = self._entries.get(node_id)
        if entry is None:
            raise LaunchError(f"the program has no node {node_id}: was the node of this handle added to it?")
        if entry.serves == "replay":
            address = self._wait_for_address(node_id)
            with entered(self, self.only_context):
                client = connect_replay(entry.options, None, address, entry.port, self._keys)
            self._connections[node_id] = client
            return client
        if entry.serves is None:
            raise LaunchError(
                f"node {entry.label!r} is a {entry.description}, which serves nothing: use a CourierNode"
            )
        with self._moved:
            connection = Connection(
                self._entries[node_id].address,
                self._keys,
                name=entry.label,
                max_in_flight=entry.options["max_in_flight"],
                stopped=self.stopped,
                repeat_lost=entry.options["repeat_lost"],
            )
            self._connections[node_id] = connection
        return Client(node_id, connection.call, connection.submit, entry.options["call_timeout"])

    def move(self, addresses: dict[int, str | None]) -> None:
        """Nodes are somewhere else from now on, or nowhere (None)."""
        with self._moved:
            for node_id, address in addresses.items():
                self._entries[node_id] = dataclasses.replace(self._entries[node_id], address=address)
            moving: list[tuple[Any, str | None]] = [
                (self._connections.get(node_id), address) for node_id, address in addresses.items()
            ]
            self._moved.notify_all()
        for client, address in moving:
            if hasattr(client, "move"):  # a replay back end may not know how
                client.move(address)

    def begin_stop(self) -> None:
        try:
            super().begin_stop()
        finally:
            with self._moved:
                connections = list(self._connections.values())
                self._moved.notify_all()
            for connection in connections:
                if isinstance(connection, Connection):
                    connection.stop()

    def _wait_for_address(self, node_id: int) -> str:
        """Where a node is, as soon as it is somewhere. ProgramStopped if the program stops first."""
        with self._moved:
            self._moved.wait_for(lambda: self._entries[node_id].address is not None or self.stopped.is_set())
            address = self._entries[node_id].address
        if address is None:
            label = self._entries[node_id].label
            raise ProgramStopped(f"node {label!r} is not there and the program stops")
        return address

    def close(self) -> None:
        """Closes every client of this process."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            close = getattr(connection, "close", None)
            if close is not None:
                close()


class _Living:
    """One node of this process: its object and, if it serves, its server."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.object: Any = None
        self.server: Server | None = None

    @property
    def is_worker(self) -> bool:
        return self.leaf.node.is_function or self.leaf.node.runs(self.object)

    @property
    def messages(self) -> int:
        """Calls taken in; of a replay server the messages, if its back end counts them."""
        if self.server is not None:
            return self.server.calls
        return getattr(self.object, "messages", 0) if isinstance(self.leaf.node, ReplayNode) else 0


class NodeProcess:
    """Makes the objects of a unit, serves them, runs its workers, and closes them when told."""

    def __init__(self, channel: Channel, setup: Setup) -> None:
        self._channel = channel
        self._setup = setup
        self._runtime = RemoteRuntime(setup.entries, setup.keys, self._ask_for_stop)
        unit: Unit = pickle.loads(setup.unit)
        self._living = [_Living(leaf) for leaf in unit.leaves]
        self._close = threading.Event()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._failed = threading.Lock()
        self._done = threading.Event()  # all workers have returned, or one has failed
        if len(self._living) == 1:
            self._runtime.only_context = self._living[0].leaf.context

    def run(self) -> int:
        """The whole life; returns the exit code."""
        context.activate(self._runtime)
        threading.Thread(target=self._listen, name="launch-control", daemon=True).start()
        if self._setup.heartbeat is not None:
            threading.Thread(target=self._beat, name="launch-heartbeat", daemon=True).start()
        try:
            for living in self._living:
                with entered(self._runtime, living.leaf.context):
                    self._build(living)
            self._tell("ready", any(living.is_worker for living in self._living))
            self._work()
            self._tell("returned")
            if any(living.server is not None or not living.is_worker for living in self._living):
                self._close.wait()
            for living in reversed(self._living):
                with entered(self._runtime, living.leaf.context):
                    self._end(living)
            self._runtime.close()
        except BaseException as error:
            self._tell("failed", wire.describe_error(error))
            return 1
        self._ended.set()
        self._tell("alive", self._usage())  # what it used in all
        self._tell("closed")
        return 0

    def _build(self, living: _Living) -> None:
        node, entry = living.leaf.node, self._setup.entries[living.leaf.node.node_id]
        if isinstance(node, ReplayNode):
            living.object = self._serve_at(
                node.node_id,
                lambda address: node.serve(
                    embedded=False,
                    concurrent=True,
                    address=address,
                    port=entry.port,
                    curve=self._setup.keys,
                ),
            )
            return
        living.object = None if node.is_function else node.call()
        if isinstance(node, CourierNode):
            leaf, options = living.leaf, node.server_options
            living.server = self._serve_at(
                node.node_id,
                lambda address: Server(
                    living.object,
                    address,
                    self._setup.keys,
                    name=leaf.context.label,
                    enter=lambda: context.enter(self._runtime, leaf.context),
                    **options,
                ),
            ).start()

    def _serve_at(self, node_id: int, make: Callable[[str], Any]) -> Any:
        """``make(address)``, where the address is the node's, its last one, or a free port that is told."""
        fixed = self._setup.entries[node_id].address
        if fixed is not None:
            return make(fixed)
        interface, former = self._setup.interface, self._setup.former.get(node_id)
        tries = [f"tcp://{interface}:{_free_port(interface)}" for _ in range(3)]
        if former is not None and former.rpartition(":")[0] == f"tcp://{interface}":
            tries.insert(0, former)
        for address in tries:
            try:
                served = make(address)
            except (OSError, zmq.ZMQError) as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._tell("serving", {node_id: address})
            return served
        raise LaunchError(f"no free port on {interface}: tried {tries}")

    def _work(self) -> None:
        """Runs the workers: the only one on the main thread, several on threads; returns when all have."""
        workers = [living for living in self._living if living.is_worker]
        if len(self._living) == 1:
            for living in workers:
                self._run_worker(living)
        else:
            threads = [
                threading.Thread(target=self._run_worker, args=(w,), name=w.leaf.context.label, daemon=True)
                for w in workers
            ]
            for thread in threads:
                thread.start()
            threading.Thread(target=_join_all, args=(threads, self._done), daemon=True).start()
            self._done.wait()
        if self._failure is not None:
            raise self._failure

    def _run_worker(self, living: _Living) -> None:
        try:
            with entered(self._runtime, living.leaf.context):
                living.leaf.node.call() if living.leaf.node.is_function else living.object.run()
        except BaseException as error:
            if ended_normally(error, self._runtime.stopped.is_set()):
                return
            with self._failed:
                if self._failure is None:
                    self._failure = error
            self._done.set()

    def _end(self, living: _Living) -> None:
        closing = getattr(living.object, "close", None)
        if closing is None and isinstance(living.leaf.node, ReplayNode):
            closing = getattr(living.object, "stop", None)
        if callable(closing) and not living.leaf.node.is_function:
            closing()
        if living.server is not None:
            living.server.close()

    def _ask_for_stop(self, result: Any) -> None:
        self._tell("stop", None if result is None else cloudpickle.dumps(result))

    def _listen(self) -> None:
        """Obeys the launcher; when the line breaks the launcher is dead, and this process ends itself."""
        context.enter(self._runtime, self._runtime.only_context)
        try:
            while True:
                command = self._channel.receive()
                if command == "stop":
                    self._begin_stop()
                elif command == "close":
                    self._close.set()
                elif command[0] == "where":
                    self._runtime.move(command[1])
        except EOFError:
            self._close.set()
            self._begin_stop()
            if not self._ended.wait(_LAUNCHER_GONE_GRACE):
                os._exit(1)

    def _begin_stop(self) -> None:
        try:
            self._runtime.begin_stop()
        except Exception as error:
            self._tell("failed", wire.describe_error(error))

    def _beat(self) -> None:
        interval = min(1.0, (self._setup.heartbeat or 4.0) / 4)
        while True:
            self._tell("alive", self._usage())
            if self._ended.wait(interval):
                return

    def _usage(self) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        calls = sum(living.messages for living in self._living)
        memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
            memory = int(file.read().split()[1]) * resource.getpagesize()
        return {"cpu_seconds": usage.ru_utime + usage.ru_stime, "memory_bytes": memory, "calls": calls}

    def _tell(self, what: str, value: Any = None) -> None:
        with contextlib.suppress(OSError):  # the launcher is dead; the listening thread ends this process
            self._channel.send((what, value))


def _free_port(interface: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET) as probe:
        probe.bind((interface.strip("[]"), 0))
        return probe.getsockname()[1]


def _join_all(threads: list[threading.Thread], done: threading.Event) -> None:
    for thread in threads:
        thread.join()
    done.set()


def main(line: socket.socket, threads: int) -> int:
    """Called by the fork server in a new process."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    channel = Channel(line)
    try:
        code = NodeProcess(channel, channel.receive()).run()
    except BaseException as error:
        channel.send(("failed", wire.describe_error(error)))
        code = 1
    atexit._run_exitfuncs()
    return code
