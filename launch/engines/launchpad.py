"""Runs the graph as a real ``launchpad.Program``, each node in a process of its own (``local_mp``).

The engine ``launchpad_mt`` runs it as threads of one process (``local_mt``). Needs dm-launchpad, so Python
3.10. Served nodes are ``lp.CourierNode``s and called by courier; a `ReplayNode` on dm-reverb is an
``lp.ReverbNode``; all others are ``lp.PyNode``s. The rules of `launch.engines.base` hold, but for restarts,
which Launchpad has none of.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

from launch.engines import _code
from launch.engines._launchpad_driver import Part, Plan
from launch.engines._launchpad_node import CourierRuntime, Peer, Wiring
from launch.engines.base import Job, Options, Outcome, find_leaf, plan, remote_error
from launch.errors import LaunchError, NodeError, StopTimeoutWarning
from launch.nodes import CourierNode, Node, ReplayNode
from launch.program import Program
from launch.rpc import sockets
from launch.rpc.server import Server

_CHANGES = 1.0  # seconds after which a question for changes is answered anyway
_TAIL = 4000  # bytes of a log in an error


def start(program: Program, options: Options, launch_type: str = "local_mp") -> LaunchpadJob:
    """Starts the program under ``lp.launch(..., launch_type)``."""
    if importlib.util.find_spec("launchpad") is None:
        raise LaunchError("the engine launchpad needs dm-launchpad (Python 3.10): see docs/deepmind.md")
    if any(options.restarts.values()):
        raise ValueError(f"restarts: got {dict(options.restarts)}; Launchpad does not restart nodes")
    return LaunchpadJob(program, options, launch_type)


class Control:
    """What the nodes tell the launcher and ask of it; served to them."""

    def __init__(self, labels: list[str], outcome: Outcome) -> None:
        self._outcome = outcome
        self.changed = threading.Condition()
        self.states = dict.fromkeys(labels, "starting")
        self.errors: dict[str, str] = {}
        self.addresses: dict[int, str] = {}
        self.stopping = False
        self.closing: list[str] = []
        self._version = 1

    def ready(self, label: str, node_id: int, address: str | None, works: bool) -> None:
        with self.changed:
            self.states[label] = "running" if works else "serving"
            if address is not None:
                self.addresses[node_id] = address
            self.changed.notify_all()

    def returned(self, label: str) -> None:
        self._set(label, "returned")

    def closed(self, label: str) -> None:
        if self.states.get(label) != "failed":
            self._set(label, "closed")

    def failed(self, label: str, failure: Any) -> None:
        self._outcome.fail(remote_error(label, failure))
        self.errors[label] = f"{failure['kind']}: {failure['message']}"
        self._set(label, "failed")

    def stop(self, result: bytes | None) -> None:
        self._outcome.offer_result(None if result is None else pickle.loads(result))
        self.begin_stop()

    def address(self, node_id: int) -> str | None:
        """The courier address of a node once it is up; None if that is not so yet."""
        with self.changed:
            self.changed.wait_for(lambda: node_id in self.addresses or self.stopping, _CHANGES)
            return self.addresses.get(node_id)

    def changes(self, seen: int) -> tuple[int, bool, list[str]]:
        """``(version, stopping, nodes that may close)``, as soon as it is not what the node has ``seen``."""
        with self.changed:
            self.changed.wait_for(lambda: self._version != seen, _CHANGES)
            return self._version, self.stopping, list(self.closing)

    # Not called by nodes.

    def begin_stop(self) -> None:
        with self.changed:
            self.stopping = True
            self._version += 1
            self.changed.notify_all()

    def let_close(self, label: str) -> None:
        with self.changed:
            self.closing.append(label)
            self._version += 1
            self.changed.notify_all()

    def _set(self, label: str, state: str) -> None:
        with self.changed:
            self.states[label] = state
            self.changed.notify_all()


class LaunchpadJob(Job):
    """A process drives Launchpad; a thread here follows what the nodes tell."""

    def __init__(self, program: Program, options: Options, launch_type: str) -> None:
        self.outcome = Outcome()
        self._program, self._options, self._type = program, options, launch_type
        self._engine = "launchpad" if launch_type == "local_mp" else "launchpad_mt"
        self._job, self._units = plan(program, self._engine, options)
        blobs = [_code.dumps(unit) for unit in self._units]  # fails here, where the user sees it
        self._directory = sockets.make_private_directory()
        leaves = [leaf for unit in self._units for leaf in unit.leaves]
        # The nodes that tell us what they do; dm-reverb's own servers do not.
        self._hosts = [leaf.context.label for leaf in leaves if _kind(leaf.node) != "reverb"]
        self._control = Control(self._hosts, self.outcome)
        keys = sockets.CurveKeys.generate()
        peers = {leaf.node.node_id: self._peer(leaf.node, leaf.context.label) for leaf in leaves}
        wiring = Wiring(self._job, f"ipc://{self._directory}/control", keys, peers)
        self._server = Server(self._control, wiring.control, keys, name="launcher").start()
        self._runtime = CourierRuntime(wiring, control=_Here(self._control))
        units = tuple(
            (unit.group, blob, tuple(_part(leaf.node) for leaf in unit.leaves))
            for unit, blob in zip(self._units, blobs, strict=True)
        )
        environments = {unit.group: self._environment(unit.group) for unit in self._units}
        self._log = os.path.join(self._log_directory(), "launchpad.log")
        self._driver = self._start_driver(Plan(program.name, launch_type, units, wiring, environments))
        threading.Thread(target=self._follow, name=f"launch-{program.name}", daemon=True).start()
        threading.Thread(target=self._watch_driver, name="launch-watch", daemon=True).start()

    def stop(self, result: Any = None) -> None:
        self.outcome.offer_result(result)
        self._control.begin_stop()

    def kill(self) -> None:
        """Ends all processes of the program at once."""
        self._control.begin_stop()
        self._kill_all()

    def status(self) -> dict[str, Any]:
        control = self._control
        state = "stopping" if control.stopping else "running"
        if self.outcome.over.is_set():
            state = "finished" if self.outcome.error is None else "failed"
        nodes = []
        for unit in self._units:
            for leaf in unit.leaves:
                label = leaf.context.label
                nodes.append(
                    {
                        "label": label,
                        "group": unit.group,
                        "index": unit.index,
                        "state": control.states.get(label, "running").replace("serving", "running"),
                        "restarts": 0,
                        "pid": None,
                        "cpu_seconds": None,
                        "memory_bytes": None,
                        "calls": None,
                        "error": control.errors.get(label),
                    }
                )
        return {
            "program": self._program.name,
            "engine": self._engine,
            "job": self._job,
            "state": state,
            "nodes": nodes,
        }

    def client(self, label: str, index: int = 0) -> Any:
        return self._runtime.client(find_leaf(self._units, label, index).node.node_id)

    # Preparation.

    def _peer(self, node: Node, label: str) -> Peer:
        ours = isinstance(node, ReplayNode) and _kind(node) != "reverb"
        address = f"ipc://{self._directory}/{node.node_id}" if ours else None
        options = node.backend if isinstance(node, ReplayNode) else getattr(node, "client_options", None)
        return Peer(label, node.description, node.serves, address, options)

    def _environment(self, group: str) -> dict[str, str]:
        resources = self._options.resources.get(group)
        variables = {} if resources is None else dict(resources.env)
        return {"OMP_NUM_THREADS": str(1 if resources is None else resources.threads), **variables}

    def _log_directory(self) -> str:
        folder = os.path.join(self._options.directory or self._directory, "logs")
        os.makedirs(folder, exist_ok=True)
        return folder

    def _start_driver(self, todo: Plan) -> subprocess.Popen:
        path = os.path.join(self._directory, "plan")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            pickle.dump(todo, file)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
            "LAUNCHPAD_LOGGING_DIR": self._log_directory(),
        }
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "launch.engines._launchpad_driver", path],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    # The run.

    def _watch_driver(self) -> None:
        code = self._driver.wait()
        with self._control.changed:
            self._control.changed.notify_all()
        if not self._control.stopping:
            self.outcome.fail(
                NodeError("launchpad", "ProcessDied", f"exit code {code}", log_tail=self._tail())
            )
            self._control.begin_stop()

    def _follow(self) -> None:
        control = self._control
        try:
            with control.changed:
                control.changed.wait_for(self._is_to_stop)
            control.begin_stop()
            if self._wait(lambda: not self._in("starting", "running")):
                for label in reversed(self._hosts):
                    control.let_close(label)
                    if control.states[label] == "failed":
                        continue
                    if not self._wait(lambda label=label: control.states[label] in ("closed", "failed")):
                        break
            self._end_driver()
        except Exception as error:
            self.outcome.fail(error)
        finally:
            self._kill_all()
            self._server.close()
            sockets.remove_private_directory(self._directory)
            self.outcome.over.set()

    def _is_to_stop(self) -> bool:
        if self._control.stopping or "failed" in self._control.states.values():
            return True
        states = self._control.states.values()
        return "returned" in states and not self._in("starting", "running")

    def _in(self, *states: str) -> list[str]:
        return [label for label in self._hosts if self._control.states[label] in states]

    def _wait(self, done: Any) -> bool:
        """Whether ``done()`` within ``stop_timeout``; if not, warns, and everything is killed later."""
        gone = self._driver.poll
        with self._control.changed:
            self._control.changed.wait_for(lambda: done() or gone() is not None, self._options.stop_timeout)
            if done():
                return True
        if gone() is None:
            late = self._in("starting", "running", "serving", "returned")
            warnings.warn(
                f"{self._program.name}: nodes {late} did not end within stop_timeout="
                f"{self._options.stop_timeout} s and were killed; let run() and close() return sooner",
                StopTimeoutWarning,
            )
        return False

    def _end_driver(self) -> None:
        """Stops what Launchpad still runs: dm-reverb's servers."""
        deadline = time.monotonic() + self._options.stop_timeout
        try:
            assert self._driver.stdin is not None
            self._driver.stdin.write(b"end\n")
            self._driver.stdin.flush()
            self._driver.wait(max(0.1, deadline - time.monotonic()))
        except (OSError, subprocess.TimeoutExpired):
            pass  # gone already, or killed in a moment

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._driver.pid, signal.SIGKILL)
        if self._driver.stdin is not None:
            with contextlib.suppress(OSError):  # what was in its buffer goes nowhere
                self._driver.stdin.close()
        self._driver.wait()

    def _tail(self) -> str:
        with open(self._log, "rb") as file:
            return file.read()[-_TAIL:].decode(errors="replace")


class _Here:
    """`Control` for the launcher itself, in the shape of a connection."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def call(self, method: str, args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
        return getattr(self._control, method)(*args, **kwargs)


def _kind(node: Node) -> str:
    if isinstance(node, ReplayNode):
        native = node.backend == "reverb" or hasattr(importlib.import_module(node.backend), "native_tables")
        return "reverb" if native else "plain"
    return "courier" if isinstance(node, CourierNode) else "plain"


def _part(node: Node) -> Part:
    calls = tuple(dict.fromkeys(handle.node_id for handle in node.handles()))
    return Part(node.node_id, _kind(node), calls, getattr(node, "checkpointer_fn", None) is not None)
