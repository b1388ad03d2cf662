"""The supervisor of programs whose nodes are processes, wherever those are.

A private line joins the launcher and each node: it carries the node's setup, its signs of life and failures,
and the orders to stop and to close. One thread of the launcher, the supervisor, reads all of these lines and
decides. How processes come into being is the business of a `Host`; `launch.engines.processes` forks them,
`launch.engines.ray` has Ray place them.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import queue
import selectors
import socket
import threading
import time
import warnings
from typing import Any

import cloudpickle

from launch.context import activate, deactivate
from launch.engines.base import (
    Job,
    Options,
    Resources,
    find_leaf,
    plan,
    remote_error,
)
from launch.engines.supervised import code, reports
from launch.engines.supervised.process import Host, Process
from launch.engines.supervised.runtime import Entry, RemoteRuntime, Setup
from launch.errors import LaunchError, NodeError, StopTimeoutWarning
from launch.nodes import ReplayNode
from launch.program import Program
from launch.rpc import sockets

_STATUS_INTERVAL = 1.0
_GONE = ("closed", "failed", "killed")
_EXIT_GRACE = 2.0  # seconds that a node which has failed or closed has for leaving


class SupervisedJob(Job):
    """A program of processes. `stop`, `status`, `wait` and `client` are safe to use from any thread.

    A subclass says in `_open` and `_clean_up` what is its own.
    """

    def __init__(self, program: Program, options: Options, engine: str) -> None:
        super().__init__(program, engine, *plan(program, engine, options))
        self._options = options
        self._keys = sockets.CurveKeys.generate()
        self._told: set[int] = set()  # the nodes that told their addresses
        self._state = "running"
        self._processes = [Process(unit) for unit in self._units]
        self._by_number: dict[int, Process] = {}
        self._stop_asked = False
        self._kill_asked = False
        self._deadline: float | None = None
        self._closing: Process | None = None
        self._status_at = 0.0
        if options.directory is not None:
            os.makedirs(os.path.join(options.directory, "logs"), exist_ok=True)
        blobs = [code.dumps(unit) for unit in self._units]  # fails here, where the user sees it
        self._blobs = {unit.label: blob for unit, blob in zip(self._units, blobs, strict=True)}
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._wake, self._wake_end = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)
        self._entries, self._server = self._open()
        self._runtime = RemoteRuntime(self._job, self._entries, self._keys, self.stop)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        activate(self._runtime)
        self._thread = threading.Thread(target=self._supervise, name=f"launch-{program.name}", daemon=True)
        self._thread.start()

    # What users call.

    def stop(self, result: Any = None) -> None:
        self.outcome.offer_result(result)
        self._stop_asked = True
        self._ring()

    def kill(self) -> None:
        self._stop_asked = self._kill_asked = True
        self._ring()

    def client(self, label: str, index: int = 0) -> Any:
        return self._runtime.client(find_leaf(self._units, label, index).node.node_id)

    def state(self) -> str:
        return self._state

    def nodes(self) -> list[dict[str, Any]]:
        return [process.status() for process in self._processes]

    # What engines add.

    @abc.abstractmethod
    def _open(self) -> tuple[dict[int, Entry], Host]:
        """How each node is reached, as far as it is known yet, and what makes the processes."""

    def _find_entries(self, folder: str | None) -> dict[int, Entry]:
        """Entries of the nodes, which meet at sockets in a private folder, or tell their addresses (None)."""
        entries = {}
        for leaf in (leaf for unit in self._units for leaf in unit.leaves):
            node = leaf.node
            entries[node.node_id] = Entry(
                label=leaf.context.label,
                description=node.description,
                serves=node.serves,
                address=None if folder is None else f"ipc://{folder}/{node.node_id}",
                options=node.backend
                if isinstance(node, ReplayNode)
                else getattr(node, "client_options", None),
            )
        return entries

    @abc.abstractmethod
    def _clean_up(self) -> None:
        """Takes away what the engine itself made, once all processes have ended."""

    def _report(self, message: dict[str, Any]) -> None:
        """Takes what the host has to say (`launch.engines.supervised.process.Host`), from any thread."""
        self._reports.put(message)
        self._ring()

    # The supervisor's thread.

    def _supervise(self) -> None:
        try:
            for process in self._processes:
                self._fork(process)
            while not self._advance():
                for key, _ in self._selector.select(self._pause()):
                    self._read(key.fileobj, key.data)
                self._look_at_clock()
                self.outcome.notify()
        except Exception as error:
            self.outcome.fail(error)
        finally:
            self._finish()

    def _pause(self) -> float:
        """Seconds until the next thing that depends on the clock."""
        times = [self._status_at, *([self._deadline] if self._deadline is not None else [])]
        for process in self._processes:
            times += [at for at in (process.kill_at, process.restart_at) if at is not None]
        return max(0.0, min(_STATUS_INTERVAL, min(times) - time.monotonic()))

    def _fork(self, process: Process) -> None:
        label, directory = process.unit.label, self._options.directory
        resources = self._options.resources.get(process.unit.group, Resources())
        log = None if directory is None else reports.log_path(directory, label)
        number, channel = self._server.fork(process.unit, resources, log)
        process.begin(number, channel, time.monotonic())
        self._by_number[number] = process
        self._selector.register(channel, selectors.EVENT_READ, process)
        limits = self._options.heartbeat_timeout, self._options.stop_timeout
        setup = Setup(self._blobs[label], dict(self._entries), self._keys, *limits)
        try:
            channel.send_bytes(cloudpickle.dumps(setup))
        except OSError:
            return  # it has died already; the fork server will say how

    def _read(self, source: Any, process: Process | None) -> None:
        if source is self._wake:
            self._wake.recv(4096)
            while not self._reports.empty():
                self._hear_host(self._reports.get())
        elif process is not None and process.channel is source:  # else dropped a moment ago
            self._read_node(process)

    def _hear_host(self, message: dict[str, Any]) -> None:
        if "error" in message:
            raise LaunchError(message["error"])
        if "forked" in message and message["forked"] in self._by_number:
            process = self._by_number[message["forked"]]
            process.pid = message["pid"]
            process.last_seen = time.monotonic()  # its silence counts from now on
        elif "exit" in message and message["exit"] in self._by_number:
            process = self._by_number.pop(message["exit"])
            self._has_exited(process, message["code"], message.get("reason"))

    def _read_node(self, process: Process) -> None:
        assert process.channel is not None
        try:
            messages = process.channel.receive_ready()
        except EOFError:
            self._selector.unregister(process.channel)
            return
        process.last_seen = time.monotonic()
        for what, value in messages:
            self._hear(process, what, value)

    def _hear(self, process: Process, what: str, value: Any) -> None:
        if what == "ready":
            process.worker = value
            process.state = "running"
            self._server.ready(process.number, value)
            if self._state != "running":
                process.order("stop")
        elif what == "serving":
            self._move(value)
        elif what == "returned":
            process.state = "returned" if process.worker else "running"
            if process.worker is None:
                process.worker = False
        elif what == "stop":
            self.outcome.offer_result(None if value is None else cloudpickle.loads(value))
            self._stop_asked = True
        elif what == "log":
            reports.append_log(self._options.directory, process.unit.label, value)
        elif what == "alive":
            process.usage = value
        elif what == "closed":
            process.closed = True
            process.state = "closed"
            process.kill_at = time.monotonic() + _EXIT_GRACE
        elif what == "failed":
            process.failure = value
            process.error = f"{value['kind']}: {value['message']}"
            process.kill_at = time.monotonic() + _EXIT_GRACE
            if not self._may_restart(process):
                process.state = "failed"
                self._fail(remote_error(process.unit.label, value, self._log_tail(process)))

    def _has_exited(self, process: Process, code: int, reason: str | None) -> None:
        assert process.channel is not None
        for what, value in process.channel.drain():  # what it had said before it ended
            self._hear(process, what, value)
        self._drop(process)
        nowhere = [n.node.node_id for n in process.unit.leaves if n.node.node_id in self._told]
        if nowhere:
            self._move(dict.fromkeys(nowhere))
        if process.closed and process.failure is None:
            process.state = "closed"
            return
        if process.failure is None and self._state != "running" and process.kill_reason is not None:
            process.state = "killed"
            process.error = process.kill_reason
            return
        error: NodeError | None = None
        if process.failure is None:
            kind, text = "ProcessDied", reason or reports.describe_exit(code)
            if process.kill_reason is not None:
                kind, text = "Hung", process.kill_reason
            process.error = f"{kind}: {text}"
            error = NodeError(process.unit.label, kind, text, "", self._log_tail(process))
        if self._may_restart(process):
            process.state = "restarting"
            now = time.monotonic()
            process.restart_at = now + process.back_off.after(now - process.born)
            process.restarts += 1
            return
        process.state = "failed"
        if error is not None:
            self._fail(error)

    def _move(self, addresses: dict[int, str | None]) -> None:
        """Tells everybody where nodes are now, or that they are nowhere (None)."""
        for node_id, address in addresses.items():
            self._entries[node_id] = dataclasses.replace(self._entries[node_id], address=address)
            self._told.add(node_id)
        self._runtime.move(addresses)
        for process in self._processes:
            process.order(("where", addresses))

    def _may_restart(self, process: Process) -> bool:
        allowed = self._options.restarts.get(process.unit.group, 0)
        return self._state == "running" and not self._stop_asked and process.restarts < allowed

    def _fail(self, error: NodeError) -> None:
        self.outcome.fail(error)
        self._stop_asked = True

    def _drop(self, process: Process) -> None:
        assert process.channel is not None
        with contextlib.suppress(KeyError):  # taken out already when the line broke
            self._selector.unregister(process.channel)
        process.channel.close()
        process.channel = None
        process.kill_at = None

    def _advance(self) -> bool:
        """Moves the program on to its next phase when it is time. True when all processes have ended."""
        if self._state == "running":
            known = all(process.worker is not None for process in self._processes)
            workers = [process for process in self._processes if process.worker]
            if known and workers and all(process.state in ("returned", "closed") for process in workers):
                self._stop_asked = True
            if self._stop_asked:
                self._begin_stop()
        if self._kill_asked:
            for process in self._processes:
                if process.alive:
                    self._kill(process, "the program was ended by force")
            self._kill_asked = False
        if self._state == "stopping" and not any(process.working for process in self._processes):
            self._state = "closing"
        if self._state == "closing":
            if self._closing is None or not self._closing.alive or self._closing.state in _GONE:
                self._close_next()
            return not any(process.alive for process in self._processes)
        return False

    def _begin_stop(self) -> None:
        self._state = "stopping"
        self._deadline = time.monotonic() + self._options.stop_timeout
        for process in self._processes:
            process.restart_at = None
            process.order("stop")
        try:
            self._runtime.begin_stop()
        except Exception as error:
            self.outcome.fail(error)

    def _close_next(self) -> None:
        """Orders the last of the nodes that are still there to close."""
        self._closing = None
        self._deadline = None
        for process in reversed(self._processes):
            if process.alive and process.state not in _GONE:
                self._closing = process
                self._deadline = time.monotonic() + self._options.stop_timeout
                process.state = "closing"
                process.order("close")
                return

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            if process.restart_at is not None and now >= process.restart_at:
                self._fork(process)
            if process.kill_at is not None and now >= process.kill_at:
                process.kill_at = None
                self._kill(process, None)
            silent = now - process.last_seen
            limit = self._options.heartbeat_timeout
            born = process.alive and process.pid is not None
            if born and limit is not None and silent > limit and process.kill_reason is None:
                self._kill(process, f"no sign of life for {silent:.1f} s (heartbeat_timeout={limit})")
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._end_late_nodes()
        if now >= self._status_at:
            self._status_at = now + _STATUS_INTERVAL
            self._write_status()

    def _end_late_nodes(self) -> None:
        if self._state == "stopping":
            late = [process for process in self._processes if process.working]
        else:
            late = [self._closing] if self._closing is not None and self._closing.alive else []
        for process in late:
            self._kill(process, f"did not end within stop_timeout={self._options.stop_timeout} s of the stop")
        if late:
            warnings.warn(
                f"{self._program.name}: nodes {[p.unit.label for p in late]} did not end within stop_timeout="
                f"{self._options.stop_timeout} s and were killed; let run() and close() return sooner",
                StopTimeoutWarning,
            )

    def _kill(self, process: Process, reason: str | None) -> None:
        process.kill_reason = process.kill_reason or reason
        self._server.kill(process.number)

    def _finish(self) -> None:
        try:
            self._server.close()
            for process in self._processes:
                if process.alive:
                    self._drop(process)
                    process.state = "killed"
            self._runtime.close()
            deactivate(self._runtime)
            self._clean_up()
            self._selector.close()
        except Exception as error:
            self.outcome.fail(error)
        finally:
            self._wake.close()
            self._wake_end.close()
            self.outcome.over.set()
            self._write_status()
            self.outcome.end()

    # Small things.

    def _ring(self) -> None:
        try:
            self._wake_end.send(b"\0")
        except OSError:
            return  # full: it will wake anyway; closed: it is over

    def _log_tail(self, process: Process) -> str:
        return reports.log_tail(self._options.directory, process.unit.label)

    def _write_status(self) -> None:
        reports.write_status(self._options.directory, self.status())
