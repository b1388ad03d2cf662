"""The supervisor of programs whose nodes are processes, on this or other machines.

A private channel connects the launcher and each node. It carries the node's setup, its heartbeats and
failures, and the orders to stop and to close. One thread of the launcher, the supervisor, reads all channels
and makes all decisions. A `ProcessHost` creates the processes: the one in `launch.engines.processes` forks
them, and the one in `launch.engines.ray` makes Ray place them.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import logging
import os
import pickle
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from launch.context import active
from launch.engines.base import Job
from launch.engines.options import Options, Resources
from launch.engines.supervised import code
from launch.engines.supervised.channel import Channel
from launch.engines.supervised.elastic import ElasticGroups
from launch.engines.supervised.files import Files
from launch.engines.supervised.process import Process, ProcessHost
from launch.engines.supervised.runtime import NodeEntry, ProcessSetup, RemoteRuntime
from launch.errors import LaunchError, NodeError, StopTimeoutWarning
from launch.program import Program
from launch.rpc import sockets, wire
from launch.seeds import of_node
from launch.texts import how_it_ended, printable, why_killed

_STATUS_INTERVAL_S = 1.0
_log = logging.getLogger("launch")
_GONE = ("closed", "failed", "killed")
_EXIT_GRACE_S = 2.0  # seconds for a failed or closed node to exit
_REPORT_S = 10.0  # for the host's report on a process that has ended
_UNREPORTED = "The process ended. What started it was lost, so that the exit code is not known."
_MOST_UNREAD = 1 << 16  # orders that may wait for a node that does not read
_MOST_ERRORS = 10  # unexpected errors of the supervisor after which it gives up stopping in order


class SupervisedJob(Job):
    """A program of processes. `stop`, `status`, `wait` and `client` are safe to use from any thread.

    A subclass implements `_open`.
    """

    def __init__(self, program: Program, engine: str, options: Options) -> None:
        super().__init__(program, engine, options)
        self._keys = sockets.CurveKeys.generate()
        self._state = "running"
        # Pickling fails here, where the user sees it.
        self._records = self._processes = [
            Process(unit, code.dumps(unit), options.directory) for unit in self._units
        ]
        self._by_number: dict[int, Process] = {}
        self._numbers = itertools.count(1)  # of the lives of nodes
        self._elastic = ElasticGroups(options.min_nodes, options.min_nodes_timeout)
        self._stop_asked = False
        self._kill_asked = False
        self._ending_since = 0.0  # when the stop or the close of `_closing` began
        self._closing: Process | None = None
        self._status_at = 0.0
        self._files = Files()
        self._host_is_lost = False  # Nothing can be forked, and only a broken channel shows an end.
        self._errors = 0
        if options.directory is not None:
            os.makedirs(os.path.join(options.directory, "logs"), exist_ok=True)
        self._inbox, self._outbox = map(Channel, socket.socketpair())  # of the supervisor, from any thread
        folder, self._server = self._open()
        self._nodes_move = folder is None  # whether each life of a node has an address of its own
        self._entries: dict[int, NodeEntry] = {}
        for leaf in (leaf for unit in self._units for leaf in unit.leaves):
            node, label = leaf.node, leaf.context.label
            address = None if folder is None else f"ipc://{folder}/{node.node_id}"
            self._entries[node.node_id] = NodeEntry(
                label, node.description, node.serves, address, node.client_options
            )
        self._runtime: RemoteRuntime = RemoteRuntime(self._job, self._entries, self._keys, self.stop)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._inbox, selectors.EVENT_READ)
        options.at_end.enter_context(active(self._runtime))
        self._thread = threading.Thread(target=self._supervise, name=f"launch-{program.name}", daemon=True)
        self._thread.start()

    # Methods for users.

    def stop(self, result: Any = None) -> None:
        self.outcome.offer_result(result)
        self._stop_asked = True
        self._report({})

    def kill(self) -> None:
        self._stop_asked = self._kill_asked = True
        self._report({})

    def _has_no_worker(self) -> bool:
        runs = self._state == "running" and not self._stop_asked
        return runs and all(process.worker is False for process in self._processes)

    # Methods that engines implement.

    @abc.abstractmethod
    def _open(self) -> tuple[str | None, ProcessHost]:
        """Returns the folder of the nodes' sockets (None: nodes report addresses), and the host."""

    def _report(self, message: dict[str, Any]) -> None:
        """Wakes the supervisor with a report, a `launch.engines.supervised.process.Report` or `{}`."""
        with contextlib.suppress(OSError):  # the run is over
            self._outbox.send(message)

    # The supervisor's thread.

    def _supervise(self) -> None:
        try:
            over = self._try(self._fork_all)
            while not over:
                over = self._try(self._turn)
        finally:
            self._finish()

    def _try(self, step: Callable[[], bool | None]) -> bool:
        """Takes a step and returns whether the program is over.

        After an error in the step the program stops in order, as after an error of a node: the nodes may have
        something to save.
        """
        try:
            return bool(step())
        except Exception as error:
            self.outcome.fail(error)
            self._stop_asked = True
            self._errors += 1
            return self._errors > _MOST_ERRORS  # the error may be one of every turn

    def _fork_all(self) -> None:
        for process in self._processes:
            self._fork(process)
            self._listen(0.0)  # Unread reports would block the host, which then could not fork.

    def _listen(self, timeout: float) -> None:
        """Waits up to `timeout` seconds until something can be read or sent, then reads and sends it."""
        for key, events in self._selector.select(timeout):
            self._exchange(key.fileobj, key.data, events)

    def _turn(self) -> bool:
        if self._advance():
            return True
        # What arrived before this moment is read below. A supervisor that was held up since the last turn,
        # or is so below, then takes no node for silent whose messages are unread.
        listened = time.monotonic()
        self._listen(self._pause())
        self._look_at_clock(listened)
        self.outcome.notify()
        return False

    def _pause(self) -> float:
        """Returns the seconds until the next event that depends on the clock."""
        times = [self._status_at, *(self._must_end_at(process) for process in self._ending())]
        for process in self._processes:
            times += [at for at in (process.kill_at, process.restart_at) if at is not None]
        return max(0.0, min(_STATUS_INTERVAL_S, min(times) - time.monotonic()))

    def _fork(self, process: Process) -> None:
        if self._host_is_lost:
            process.state = "killed"
            return
        resources = self._options.resources.get(process.unit.group, Resources())
        ours, theirs = socket.socketpair()
        process.begin(next(self._numbers), channel := Channel(ours), time.monotonic())
        self._by_number[process.number] = process
        self._selector.register(channel, selectors.EVENT_READ, process)
        self._server.fork(process, theirs, resources)

    def _order(self, process: Process, what: Any) -> None:
        """Sends an order without waiting. `_exchange` sends any part that the channel has no room for yet.

        The first is its `ProcessSetup`; later "stop", "close", `("addresses", {node_id: address})` or
        `("lost", label)`. Before a process begins, it gets no orders: the setup that it gets when it begins
        contains everything.
        """
        if process.channel is None or not process.begun or process.kill_reason is not None:
            return
        with contextlib.suppress(OSError):  # it is ending; the host will report how
            process.channel.post(what)
        if len(process.channel.unsent) > _MOST_UNREAD:
            process.channel.unsent.clear()
            self._kill(process, f"it did not read its last {_MOST_UNREAD} orders")
        self._watch(process)

    def _watch(self, process: Process) -> None:
        """Makes the selector report when there is room for orders that wait."""
        assert process.channel is not None
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.unsent else 0)
        with contextlib.suppress(KeyError):  # the channel broke: the process is ending
            self._selector.modify(process.channel, events, process)

    def _exchange(self, source: Any, process: Process | None, events: int) -> None:
        if source is self._inbox:
            for message in self._inbox.receive_ready():
                self._hear_host(message)
        elif process is not None and process.channel is source:  # otherwise it was just dropped
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(OSError):  # it is ending; the host will report how
                    process.channel.flush()
                self._watch(process)
            if not events & selectors.EVENT_READ:
                return
            try:
                messages = process.channel.receive_pickles()
            except EOFError:
                self._selector.unregister(process.channel)
                process.silent_since = time.monotonic()
                if self._host_is_lost:
                    self._has_exited(process, 0, _UNREPORTED)
                return
            process.last_seen = time.monotonic()
            self._hear_all(process, messages)

    def _hear_host(self, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._lose_host(message["lost"])
        if "forked" in message and message["forked"] in self._by_number:
            process = self._by_number[message["forked"]]
            process.pid = message["pid"]
            process.last_seen = time.monotonic()  # the heartbeat timeout starts now
            options = self._options
            limits = options.heartbeat_timeout, options.time_to_end(process.unit.group)
            longest = max(map(options.time_to_end, self._program.groups))
            seed = of_node(self._program.seed, process.unit.label)
            setup = ProcessSetup(process.code, dict(self._entries), self._keys, *limits, longest, seed)
            self._order(process, setup)
            if self._state != "running":
                self._order(process, "stop")
        elif "exit" in message and message["exit"] in self._by_number:
            process = self._by_number.pop(message["exit"])
            self._has_exited(process, message["code"], message.get("reason"))

    def _lose_host(self, text: str) -> None:
        """Stops the program in order. Its processes live and hear orders, but nothing reports their ends."""
        _log.error("program %r: %s", self._program.name, text)
        if self._state == "running" or any(process.begun for process in self._processes):
            self.outcome.fail(LaunchError(text))
        self._host_is_lost = self._stop_asked = True
        for process in self._processes:
            process.restart_at = None
            if process.alive and (not process.begun or process.silent_since is not None):
                self._has_exited(process, 0, _UNREPORTED)
            elif process.alive and process.kill_reason is not None:
                self._server.kill(process.number)  # The order may have been lost.

    def _hear_all(self, process: Process, messages: list[bytes]) -> None:
        for message in messages:  # one that cannot be unpickled, such as a result, must not hide the others
            self._try(functools.partial(self._hear, process, message))

    def _hear(self, process: Process, message: bytes) -> None:
        what, value = pickle.loads(message)
        if what == "ready":
            process.worker = value
            if value:
                self._server.note_worker(process.number)
            process.state = "running"
        elif what == "serving":
            self._move(value)
        elif what == "returned":
            process.state = "returned" if process.worker else "running"
            if process.worker is None:
                process.worker = False
        elif what == "stop":
            self.outcome.offer_result(value)
            self._stop_asked = True
        elif what == "raised":  # as an argument of `launch.stop`
            self.outcome.fail(wire.rebuild_error(value, process.unit.label))
            self._stop_asked = True
        elif what == "log":  # the output of a process on another machine
            if process.log is not None:
                self._files.append(process.log, value)
        elif what == "alive":
            process.usage = value
        elif what == "closed":
            process.state = "closed"
            process.kill_at = time.monotonic() + _EXIT_GRACE_S
        elif what == "failed":
            process.failure = value
            process.error = f"{value['kind']}: {value['message']}"
            if process.kill_at is None:  # Further failures of this life do not prolong it.
                process.kill_at = time.monotonic() + _EXIT_GRACE_S
            if not self._may_restart(process):
                # `wait` may wait for the state, which changes next.
                self._fail(wire.node_error(process.unit.label, value))
                process.state = "failed"

    def _has_exited(self, process: Process, code: int, reason: str | None) -> None:
        assert process.channel is not None
        if self._host_is_lost and process.begun:
            self._server.kill(process.number)  # Also the processes that it started.
        self._hear_all(process, process.channel.drain())  # messages from before its end
        self._drop(process)
        if self._nodes_move:
            self._move({leaf.node.node_id: None for leaf in process.unit.leaves})
        if process.state == "closed" and process.failure is None:
            return
        if process.failure is None and self._state != "running" and process.kill_reason is not None:
            process.state = "killed"
            process.error = process.kill_reason
            return
        error: NodeError | None = None
        if process.failure is None:
            early = " before the program was over" if code >= 0 else ""
            text = reason or f"The process {how_it_ended(code)}{early}.{why_killed(code)}"
            kind = "ProcessDied"
            if process.kill_reason is not None:
                kind, text = "Hung", process.kill_reason
            process.error = f"{kind}: {text}"
            error = NodeError(process.unit.label, kind, text, "", process.log_tail())
        if self._may_restart(process):
            process.state = "restarting"
            now = time.monotonic()
            process.restart_at = now + process.back_off.after(now - process.born)
            process.restarts += 1
            if process.unit.group in self._elastic:
                self._elastic.lost(process, now)
                self._say_lost(process)
            return
        if error is not None:
            self._fail(error)
        process.state = "failed"

    def _move(self, addresses: dict[int, str | None]) -> None:
        """Tells all processes the new addresses of nodes; None means that a node has no address now."""
        self._runtime.move(addresses)  # It shares the entries.
        for process in self._processes:
            self._order(process, ("addresses", addresses))

    def _may_restart(self, process: Process) -> bool:
        allowed = self._options.restarts.get(process.unit.group, 0)
        forgiven = self._elastic.forgives(process)
        return self._state == "running" and not self._stop_asked and (forgiven or process.restarts < allowed)

    def _say_lost(self, process: Process) -> None:
        _log.warning(
            "node %r is lost and will be restarted: %s", process.unit.label, printable(str(process.error))
        )
        for other in self._processes:
            if other is not process:
                self._order(other, ("lost", process.unit.label))

    def _fail(self, error: NodeError) -> None:
        self.outcome.fail(error)
        self._stop_asked = True

    def _drop(self, process: Process) -> None:
        assert process.channel is not None
        with contextlib.suppress(KeyError):  # already unregistered when the channel broke
            self._selector.unregister(process.channel)
        process.channel.close()
        process.channel = None
        process.kill_at = None

    def _advance(self) -> bool:
        """Moves the program to its next phase when it is due; returns True when all processes have ended."""
        if self._state == "running":
            now = time.monotonic()
            known = all(
                process.worker is not None or self._elastic.waits_for_place(process, now)
                for process in self._processes
            )
            workers = [process for process in self._processes if process.worker]
            if known and workers and all(process.state in ("returned", "closed") for process in workers):
                self._stop_asked = True
            if self._stop_asked:
                self._begin_stop()
        if self._kill_asked:
            for process in self._processes:
                if process.alive:
                    self._kill(process, "the program was killed")
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
        self._ending_since = time.monotonic()
        for process in self._processes:
            process.restart_at = None
            self._order(process, "stop")
            if process.alive and not process.begun:
                self._kill(process, "the program stopped before it had begun")
        super()._begin_stop()

    def _close_next(self) -> None:
        """Orders the last node that still runs to close."""
        self._closing = None
        for process in reversed(self._processes):
            if process.alive and process.state not in _GONE:
                self._closing = process
                self._ending_since = time.monotonic()
                process.state = "closing"
                self._order(process, "close")
                return

    def _look_at_clock(self, listened: float) -> None:
        """Does what is due. Everything that nodes sent before the time `listened` has been read."""
        now = time.monotonic()
        for process in self._processes:
            if process.restart_at is not None and now >= process.restart_at:
                self._fork(process)
            if process.alive and process.silent_since is not None and now > process.silent_since + _REPORT_S:
                process.silent_since = now
                self._server.give_up(process.unit.label)
            if process.kill_at is not None and now >= process.kill_at:
                process.kill_at = None
                self._kill(process, None)
            silent = listened - process.last_seen
            limit = self._elastic.silence(process, self._options.heartbeat_timeout)
            if process.begun and limit is not None and silent > limit and process.kill_reason is None:
                self._kill(
                    process, f"no sign of life for {silent:.1f} s (limit {limit:g} s, see heartbeat_timeout)"
                )
        if self._state == "running" and not self._stop_asked:
            shortage = self._elastic.shortage(self._processes, now)
            if shortage is not None:
                self.outcome.fail(LaunchError(shortage))
                self._stop_asked = True
        self._kill_late(now)
        if now >= self._status_at:
            self._status_at = now + _STATUS_INTERVAL_S
            self._write_status()

    def _ending(self) -> list[Process]:
        """Returns the processes that a stop waits for now, except those that are being killed."""
        if self._state == "stopping":
            ending = [process for process in self._processes if process.working]
        else:
            ending = [self._closing] if self._closing is not None and self._closing.alive else []
        return [process for process in ending if process.kill_reason is None]

    def _must_end_at(self, process: Process) -> float:
        return self._ending_since + self._options.time_to_end(process.unit.group)

    def _kill_late(self, now: float) -> None:
        late = [process for process in self._ending() if now >= self._must_end_at(process)]
        for process in late:
            seconds = self._options.time_to_end(process.unit.group)
            self._kill(process, f"did not end within stop_timeout={seconds:g} s of the stop")
        if late:
            seconds = max(self._options.time_to_end(process.unit.group) for process in late)
            warnings.warn(
                f"{self._program.name}: nodes {[p.unit.label for p in late]} did not end within stop_timeout="
                f"{seconds:g} s and were killed. Let run() and close() return sooner.",
                StopTimeoutWarning,
            )

    def _kill(self, process: Process, reason: str | None) -> None:
        process.kill_reason = process.kill_reason or reason
        if not process.begun and process.silent_since is None:
            process.silent_since = time.monotonic()  # The host may hang, and have no channel to break.
        self._server.kill(process.number)

    def _finish(self) -> None:
        self._inbox.close()  # nothing is read any more: a report must not wait until there is room for it
        # Processes that are left see their channels break, as when the launcher dies: they stop and close.
        write_status = functools.partial(self._write_status, over=True)
        steps = (self._drop_all, self._server.close, self._runtime.close, write_status)
        try:
            for step in steps:
                self._try(step)  # the others are as necessary
        finally:
            self._selector.close()
            self._outbox.close()
            self._leave()  # whatever happens: `wait` has no other way to return

    def _drop_all(self) -> None:
        for process in self._processes:
            if process.alive:
                self._drop(process)
                process.state = "killed"

    def _write_status(self, over: bool = False) -> None:
        if self._options.directory is not None:
            status = {**self._status(over), "time": time.time(), "launcher_pid": os.getpid()}
            self._files.write_status(os.path.join(self._options.directory, "status.json"), status)
