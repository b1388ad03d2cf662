"""What sits in the nodes of a real Launchpad program: our objects, their courier servers and clients.

A call is one courier method, ``call(bytes) -> bytes``: pickled arguments in, pickled answer out, because
courier of dm-launchpad 0.5.2 hangs at every numpy argument. Courier knows no keys, so each message begins
with a signature that only the nodes of this run can make.
"""

from __future__ import annotations

import concurrent.futures
import hmac
import pickle
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import cloudpickle

from launch import context
from launch.batching import BatchedMethod
from launch.context import Runtime, entered
from launch.engines.base import Leaf, ended_normally
from launch.errors import CallLost, CallTimeout, LaunchError, ProgramStopped
from launch.handles import Client, Target
from launch.nodes import ReplayNode, connect_replay
from launch.rpc import wire
from launch.rpc.client import Connection
from launch.rpc.sockets import CurveKeys

_LOOK = 1.0  # seconds between two looks at whether the program stops, in calls that wait
_AFTER_STOP = 5.0  # seconds that a node has for an answer once the program stops
_SIGNATURE = 32  # bytes


@dataclass(frozen=True)
class Peer:
    """What clients need to know of a node.

    Attributes:
      address: of replay servers that are not dm-reverb's; else the node tells its own when it is up.
      options: of the client; or the name of the replay back end.
    """

    label: str
    description: str
    serves: str | None
    address: str | None
    options: Any


@dataclass(frozen=True)
class Wiring:
    """What every node of one run knows. ``control`` is where the launcher answers."""

    job: str
    control: str
    keys: CurveKeys
    peers: dict[int, Peer]


def pack(keys: CurveKeys, value: Any) -> bytes:
    """Pickled and signed."""
    try:
        data = pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        data = cloudpickle.dumps(value)  # functions and classes of a script or a notebook
    return hmac.digest(keys.secret, data, "sha256") + data


def unpack(keys: CurveKeys, message: bytes) -> Any:
    """The opposite of `pack`; LaunchError, and nothing is unpickled, for a message of somebody else."""
    data = memoryview(message)[_SIGNATURE:]
    if not hmac.compare_digest(hmac.digest(keys.secret, data, "sha256"), message[:_SIGNATURE]):
        raise LaunchError("a message without this program's signature came in and was refused")
    return pickle.loads(data)


class CourierRuntime(Runtime):
    """The view of one process: clients by courier, and what the launcher says."""

    def __init__(self, wiring: Wiring, control: Any = None) -> None:
        super().__init__()
        self.only_context: Any = None
        self.wiring = wiring
        self._control = control or Connection(wiring.control, wiring.keys, name="launcher")
        self._lock = threading.Lock()
        self._couriers: dict[int, Any] = {}
        self._clients: dict[int, Any] = {}
        self._stopped_at = 0.0
        self._closing: set[str] = set()
        self._told = threading.Condition()

    def tell(self, what: str, *args: Any) -> Any:
        """Calls the launcher."""
        return self._control.call(what, args, {}, None)

    def listen(self) -> None:
        """Hears from the launcher when to stop and what to close; on a thread of its own."""
        seen = 0
        while True:
            try:
                seen, stopping, closing = self.tell("changes", seen)
            except LaunchError:  # the launcher is gone, and its driver ends this process
                stopping, closing = True, [peer.label for peer in self.wiring.peers.values()]
            if stopping:
                self._stopped_at = self._stopped_at or time.monotonic()
                try:
                    self.begin_stop()
                except Exception as error:
                    self.tell("failed", "stop handler", wire.describe_error(error))
            with self._told:
                self._closing.update(closing)
                self._told.notify_all()
                if len(self._closing) == len(self.wiring.peers):
                    return

    def wait_to_close(self, label: str) -> None:
        """Waits until it is the node's turn to be closed."""
        with self._told:
            self._told.wait_for(lambda: label in self._closing)

    def add_couriers(self, couriers: dict[int, Any]) -> None:
        """Courier and reverb clients that Launchpad made of the handles of a node."""
        with self._lock:
            self._couriers.update(couriers)

    def request_stop(self, result: Any = None) -> None:
        self.tell("stop", None if result is None else cloudpickle.dumps(result))

    def client(self, node_id: int) -> Any:
        with self._lock:
            client = self._clients.get(node_id)
            if client is None:
                client = self._clients[node_id] = self._connect(node_id)
            return client

    def _connect(self, node_id: int) -> Any:
        peer = self.wiring.peers.get(node_id)
        if peer is None:
            raise LaunchError(f"the program has no node {node_id}: was the node of this handle added to it?")
        if peer.serves is None:
            raise LaunchError(
                f"node {peer.label!r} is a {peer.description}, which serves nothing: use a CourierNode"
            )
        courier = self._couriers.get(node_id)
        if peer.serves == "replay":
            address = peer.address or getattr(courier, "server_address", None)
            if address is None:
                raise LaunchError(
                    f"node {peer.label!r} is a dm-reverb server, which only nodes that were given its "
                    "handle can reach"
                )
            with entered(self, self.only_context):
                return connect_replay(peer.options, None, address, None, self.wiring.keys)
        if courier is None:
            import courier as module

            courier = module.Client(self._address(node_id))
        return Client(
            node_id,
            lambda name, args, kwargs, timeout: self._call(courier, peer.label, name, args, kwargs, timeout),
            lambda name, args, kwargs, timeout: self._submit(
                courier, peer.label, name, args, kwargs, timeout
            ),
            peer.options["call_timeout"],
        )

    def _address(self, node_id: int) -> str:
        while True:
            address = self.tell("address", node_id)
            if address is not None:
                return address
            if self.stopped.is_set():
                raise ProgramStopped(f"{self.wiring.peers[node_id].label} did not come up before the stop")

    def _submit(
        self, courier: Any, label: str, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Future:
        answer: Future = Future()
        answer.set_running_or_notify_cancel()
        first = threading.Lock()  # who takes it decides what the answer is

        def give_up() -> None:
            if first.acquire(blocking=False):
                answer.set_exception(CallTimeout(f"{label}.{name} was not answered within {timeout} s"))

        def done(future: Future) -> None:
            if not first.acquire(blocking=False):
                return
            if timer is not None:
                timer.cancel()
            try:
                answer.set_result(self._read(label, name, future.result()))
            except BaseException as error:
                answer.set_exception(error)

        timer = None if timeout is None else threading.Timer(timeout, give_up)
        if timer is not None:
            timer.daemon = True
            timer.start()
        courier.futures.call(pack(self.wiring.keys, (name, args, kwargs))).add_done_callback(done)
        return answer

    def _call(
        self, courier: Any, label: str, name: str, args: tuple, kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        future = courier.futures.call(pack(self.wiring.keys, (name, args, kwargs)))
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK if deadline is None else max(0.0, min(_LOOK, deadline - time.monotonic()))
            try:
                message = future.result(left)
                break
            except concurrent.futures.TimeoutError:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    future.cancel()
                    raise CallTimeout(f"{label}.{name} was not answered within {timeout} s") from None
                if self._stopped_at and now > self._stopped_at + _AFTER_STOP:
                    future.cancel()
                    raise ProgramStopped(f"{label}.{name}: the program stopped and no answer came") from None
            except Exception as error:
                raise CallLost(f"{label}.{name}: {error}") from error
        return self._read(label, name, message)

    def _read(self, label: str, name: str, message: bytes) -> Any:
        failed, value = unpack(self.wiring.keys, message)
        if not failed:
            return value
        raise wire.rebuild_call_error(value, label)


_runtimes: dict[str, CourierRuntime] = {}
_runtimes_lock = threading.Lock()


def runtime_of(wiring: Wiring) -> CourierRuntime:
    """The runtime of this process; nodes that are threads share it."""
    with _runtimes_lock:
        runtime = _runtimes.get(wiring.job)
        if runtime is None:
            runtime = _runtimes[wiring.job] = CourierRuntime(wiring)
            context.activate(runtime)
            threading.Thread(target=runtime.listen, name="launch-control", daemon=True).start()
        return runtime


_reading = threading.Lock()


def read_unit(unit: bytes) -> tuple[Leaf, ...]:
    """The nodes of a pickled unit; one thread of the process at a time.

    Python calls it a deadlock, which is an error, when one thread imports a package that imports a module of
    its own, and another thread that module.
    """
    with _reading:
        leaves: tuple[Leaf, ...] = pickle.loads(unit).leaves
    return leaves


class Host:
    """Makes the object of one of our nodes, serves and runs it. Launchpad makes hosts and calls ``run``.

    Args:
      unit: pickled `Unit`.
      position: of the node in it.
      wiring: of the run.
      couriers: node number to the client that Launchpad makes of the handle.
    """

    def __init__(self, unit: bytes, position: int, wiring: Wiring, couriers: dict[int, Any]) -> None:
        self._runtime = runtime_of(wiring)
        self._runtime.add_couriers(couriers)
        self._server: Any = None
        self._object: Any = None
        self._target: Target | None = None
        self._failed = False
        parts: tuple[Leaf, ...] = read_unit(unit)
        self._leaf = parts[position]
        self._label = self._leaf.context.label
        self._keys = wiring.keys
        node = self._leaf.node
        try:
            with entered(self._runtime, self._leaf.context):
                if isinstance(node, ReplayNode):
                    address = wiring.peers[node.node_id].address
                    self._object = node.serve(
                        embedded=False, concurrent=True, address=address, port=None, curve=wiring.keys
                    )
                elif not node.is_function:
                    self._object = node.call()
            self._target = Target(self._object, self._label)
        except BaseException as error:
            self._fail(error)

    def set_courier_server(self, server: Any) -> None:
        """Called by Launchpad, which leaves start and stop of the server to us then."""
        self._server = server

    def call(self, message: bytes) -> bytes:
        """The one method that peers call."""
        with entered(self._runtime, self._leaf.context):
            try:
                name, args, kwargs = unpack(self._keys, message)
                assert self._target is not None
                method = self._target.method(name)
                if isinstance(method, BatchedMethod):
                    value = method.submit(args, kwargs).result()
                else:
                    value = method(*args, **kwargs)
                return pack(self._keys, (False, value))
            except BaseException as error:
                return pack(self._keys, (True, wire.describe_error(error)))

    def run(self) -> None:
        """The life of the node after it was made, up to its orderly end."""
        if self._failed:
            return
        node = self._leaf.node
        works = node.is_function or node.runs(self._object)
        address = None
        if self._server is not None:
            self._server.Start()
            address = self._server.address
        self._runtime.tell("ready", self._label, node.node_id, address, works)
        try:
            with entered(self._runtime, self._leaf.context):
                if works and not self._runtime.stopped.is_set():
                    node.call() if node.is_function else self._object.run()
        except BaseException as error:
            if not ended_normally(error, self._runtime.stopped.is_set()):
                self._fail(error)
                return
        if works:
            self._runtime.tell("returned", self._label)
        self._runtime.wait_to_close(self._label)
        try:
            with entered(self._runtime, self._leaf.context):
                closing = getattr(self._object, "close", None)
                if closing is None and isinstance(node, ReplayNode):
                    closing = getattr(self._object, "stop", None)
                if callable(closing) and not node.is_function:
                    closing()
        except Exception as error:
            self._fail(error)
        finally:
            self._runtime.tell("closed", self._label)
            if self._server is not None:
                self._server.Stop()

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        self._runtime.tell("failed", self._label, wire.describe_error(error))


def run_host(unit: bytes, position: int, wiring: Wiring, couriers: dict[int, Any]) -> None:
    """The function of a Launchpad ``PyNode`` for a node of ours that serves nothing by courier."""
    Host(unit, position, wiring, couriers).run()


class NativeTables:
    """``priority_tables_fn`` and ``checkpoint_ctor`` of an ``lp.ReverbNode`` for a `ReplayNode` of ours."""

    def __init__(self, unit: bytes, position: int, checkpointer: bool = False) -> None:
        self._unit, self._position, self._checkpointer = unit, position, checkpointer

    def __call__(self) -> Any:
        import importlib

        node: Any = read_unit(self._unit)[self._position].node
        with _reading:
            module = importlib.import_module(node.backend)
        if self._checkpointer:
            made = node.checkpointer_fn()
            return module.native_checkpointer(made) if hasattr(module, "native_checkpointer") else made
        tables = node.call()
        return module.native_tables(tables) if hasattr(module, "native_tables") else tables
