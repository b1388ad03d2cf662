"""The process from which all node processes are forked.

It imports the expensive modules once and starts no thread. It is the parent of every node. It therefore knows
their exit codes and cannot kill another process under a recycled process id. Each node process leads its own
process group, so that the processes that a node started end with it. When the launcher dies, the channels to
the fork server and to the nodes break. The nodes then stop: workers return and save, and after that the fork
server closes the services, kills the processes that do not end, and removes the program's folders. When
the fork server dies, the nodes live on and the launcher stops them, so that their state is saved.

Where forking is not safe (`launch.platforms`), it imports nothing and spawns the nodes: each is a fresh
interpreter. It spawns them, too, if what it imported has started threads, which a fork would lose with their
locks held. All else is the same, because a node gets its code through its channel in either case.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from launch import platforms
from launch.engines.supervised import node_process
from launch.engines.supervised.channel import Channel


def main(descriptor: int) -> None:
    """Runs on the main thread of a fresh interpreter; `descriptor` is the channel to the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles a terminal's Ctrl-C
    platforms.outlive_signals()
    os.set_inheritable(descriptor, False)
    line = Channel(socket.socket(fileno=descriptor))
    settings = line.receive()
    if platforms.has("fork"):
        for name in settings["preload"]:
            importlib.import_module(name)
    _Parent(line, settings, platforms.has("fork") and platforms.is_single_threaded()).serve()


def command(function: str, *arguments: Any) -> list[str]:
    """Returns the command of a fresh interpreter, like this one, that calls a function of this module."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; sys.argv[:] = {sys.argv!r}; "
        f"from launch.engines.processes import fork_server; fork_server.{function}(*{arguments!r})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [platforms.interpreter(), *flags, "-c", code]


def begin_spawned(descriptor: int, log: str | None) -> NoReturn:
    """Runs a node on the main thread of a fresh interpreter, which `_Parent` spawned."""

    def prepare() -> None:
        os.set_inheritable(descriptor, False)
        platforms.outlive_signals()

    _become_node(prepare, descriptor, log)


class _Parent:
    def __init__(self, line: Channel, settings: dict[str, Any], forks: bool) -> None:
        self._line = line
        self._settings = settings
        self._start = self._fork if forks else self._spawn
        self._children: dict[int, int] = {}  # pid to the launcher's number for the process
        self._workers: set[int] = set()  # the numbers of processes that have work of their own
        self._graces: dict[int, float] = {}  # seconds to end if the launcher dies, by number
        self._wake, wake_end = socket.socketpair()
        self._wake.setblocking(False)
        wake_end.setblocking(False)
        self._wake_end = wake_end
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        requests = self._line.messages
        sources: list[Any] = [self._line, self._wake]
        while True:
            while requests:
                self._obey(requests.pop(0))
            readable, _, _ = select.select(sources, [], [])
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap()
            if self._line in readable:
                try:
                    requests += self._line.receive_ready()
                except EOFError:
                    self._launcher_has_gone()
                    return

    def _obey(self, request: dict[str, Any]) -> None:
        if "fork" in request:
            descriptor = self._line.descriptors.pop(0)
            pid = self._start(request, descriptor)
            os.close(descriptor)
            self._children[pid] = request["fork"]
            self._graces[request["fork"]] = request["grace"]
            self._tell({"forked": request["fork"], "pid": pid})
        elif "worker" in request:
            self._workers.add(request["worker"])
        elif "kill" in request:
            for pid, number in self._children.items():
                if number == request["kill"]:
                    kill_group(pid)

    def _fork(self, request: dict[str, Any], descriptor: int) -> int:
        def prepare() -> None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._line.close()
            self._wake.close()
            self._wake_end.close()
            os.environ.update(request["env"])

        pid = os.fork()
        if pid == 0:
            _become_node(prepare, descriptor, request["log"])
        return pid

    def _spawn(self, request: dict[str, Any], descriptor: int) -> int:
        for other in self._line.descriptors:  # Descriptors of nodes that are yet to be spawned came along.
            os.set_inheritable(other, False)
        os.set_inheritable(descriptor, True)
        arguments = command("begin_spawned", descriptor, request["log"])
        # A signal before the node has its handlers would end it.
        return os.posix_spawn(
            arguments[0], arguments, {**os.environ, **request["env"]}, setsigmask=platforms.OF_ALL_PROCESSES
        )

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._children.pop(pid, None)
            if number is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # the processes that it started
                self._tell({"exit": number, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher has exited; the next read detects it
            self._line.send(message)

    def _launcher_has_gone(self) -> None:
        self._wait(lambda pid: self._children[pid] in self._workers)
        # In reverse order, because each may need those made before it. One that is starting has no work yet.
        for pid in reversed(list(self._children)):
            if pid in self._children:  # It may have ended during the wait for another one.
                os.kill(pid, signal.SIGTERM)  # close
                self._wait(pid.__eq__)
        for pid in list(self._children):
            kill_group(pid)
        while self._children:
            pid, _ = os.waitpid(-1, 0)
            self._children.pop(pid, None)
        for folder in self._settings["folders"]:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, for_pid: Callable[[int], bool]) -> None:
        """Waits until all children that `for_pid` selects have ended, at most for their grace periods."""
        began = time.monotonic()
        while waited_for := list(filter(for_pid, self._children)):
            left = began + max(self._graces[self._children[pid]] for pid in waited_for) - time.monotonic()
            if left <= 0:
                return
            select.select([self._wake], [], [], left)
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
            self._reap()


def kill_group(pid: int) -> None:
    """Kills a node that has not been reaped, and the processes that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it is not a group leader yet
        os.kill(pid, signal.SIGKILL)


def _become_node(prepare: Callable[[], None], descriptor: int, log: str | None) -> NoReturn:
    """Runs a node in this new process, from start to end."""
    code = 1
    try:
        prepare()
        os.setsid()
        node_process.redirect_output(log)
        code = node_process.run(Channel(socket.socket(fileno=descriptor)), parent=os.getppid())
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        node_process.flush_output()
        os._exit(code)
