"""Fork servers of tests are forks of one process that has imported torch.

Every program on `processes` has a fork server of its own, whose import of torch takes longer than most tests.
Those of tests of `launch` are forks of another process, which has imported what these tests use. Tests of the
command line start theirs as users do.
"""

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback

from launch.engines import processes

start_interpreter = processes.start_interpreter  # That of users.
FORK_SERVER = "launch.engines.processes.fork_server:main"
LAUNCH = ("launch.engines.processes.fork_server", "launch.rpc.client", "numpy", "pytest")
TORCH = ("torch", "framework.programs.make")


def start(line, inherited, preload=TORCH, main=FORK_SERVER):
    """As `launch.engines.processes.start_interpreter`, or another function of the descriptor `line`."""
    if (preload is TORCH and "torch" not in sys.modules) or not hasattr(os, "pidfd_open"):  # Not on a Mac.
        return start_interpreter(line, inherited)
    template, _ = _template(preload)
    about = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "path": sys.path, "folder": os.getcwd()}
    about["main"] = main
    socket.send_fds(template, [json.dumps(about).encode()], [line, 1, 2, *inherited])
    return _Forked(int(template.recv(100)))


def cpu_seconds():
    """The CPU seconds of the processes that are forked, and of their forks that have ended."""
    total = 0.0
    for line, _ in _templates.values():
        line.send(b"cpu seconds")
        total += float(line.recv(100))
    return total


def servers():
    """Process ids of the parents of fork servers in this process's tests."""
    return {os.getpid(), *(process.pid for _, process in _templates.values())}


_templates = {}  # The line to each process that is forked, and the process, by what it has imported.


def _template(preload):
    """The line to the process that is forked, and the process. It ends with the line."""
    if preload in _templates:
        return _templates[preload]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path[:] = {sys.path!r}; import warm_fork_server as w; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}w.serve({theirs.fileno()}, {preload!r})"],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    theirs.close()
    atexit.register(process.wait, 10)
    atexit.register(ours.close)  # The last one registered is the first one called.
    return _templates.setdefault(preload, (ours, process))


class _Forked:
    """What `ForkServer` uses of a `subprocess.Popen`, for a process that is no child of this one."""

    def __init__(self, pid):
        self.pid = pid
        self._lock = threading.Lock()
        try:
            self._end = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end = None

    def wait(self, timeout=None):
        if self._end is not None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork server", timeout)
            with self._lock:
                os.close(self._end)
                self._end = None
        return 0  # Only its parent knows its code.

    def kill(self):
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._end is not None:
                signal.pidfd_send_signal(self._end, signal.SIGKILL)


def serve(descriptor, preload):
    """Forks a fork server for each request, until the line ends."""
    for name in preload:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, _reap)
    line = socket.socket(fileno=descriptor)
    while True:
        content, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 64)
        if not content:
            return
        if content == b"cpu seconds":
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            line.send(str(sum(each.ru_utime + each.ru_stime for each in used)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            line.close()
            _become(json.loads(content), *descriptors)
        for each in descriptors:
            os.close(each)
        line.send(str(pid).encode())


def _reap(signum, frame):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # Their CPU seconds are now among those of this process's children.


def _become(about, line, output, errors, *inherited):
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, each in enumerate((output, errors), 1):
            os.dup2(each, number)
            os.close(each)
        os.environ.clear()
        os.environ.update(about["env"])
        sys.path[:] = about["path"]
        os.chdir(about["folder"])
        module, _, function = about["main"].partition(":")
        getattr(importlib.import_module(module), function)(line)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
