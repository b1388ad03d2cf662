"""Fork servers of tests are forks of one process that has imported torch.

Every program on `processes` has a fork server of its own, whose import of torch takes longer than most tests.
Tests of `launch` and of the command line start theirs as users do.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import traceback

from launch.engines import processes
from launch.engines.processes import fork_server

start_interpreter = processes.start_interpreter  # That of users.


def start(line, inherited):
    """As `launch.engines.processes.start_interpreter`."""
    if "torch" not in sys.modules or not hasattr(os, "pidfd_open"):  # Not on a Mac.
        return start_interpreter(line, inherited)
    template, _ = _template()
    about = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "path": sys.path, "folder": os.getcwd()}
    socket.send_fds(template, [json.dumps(about).encode()], [line, 1, 2, *inherited])
    return _Forked(int(template.recv(100)))


def cpu_seconds():
    """The CPU seconds of the process that is forked, and of its forks that have ended."""
    if not _template.cache_info().currsize:
        return 0.0
    line, _ = _template()
    line.send(b"cpu seconds")
    return float(line.recv(100))


def servers():
    """Process ids of the parents of fork servers in this process's tests."""
    made = _template.cache_info().currsize
    return {os.getpid(), _template()[1].pid} if made else {os.getpid()}


@functools.cache
def _template():
    """The line to the process that is forked, and the process. It ends with the line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path[:] = {sys.path!r}; import warm_fork_server as w; w.serve({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    theirs.close()
    atexit.register(process.wait, 10)
    atexit.register(ours.close)  # The last one registered is the first one called.
    return ours, process


class _Forked:
    """What `ForkServer` uses of a `subprocess.Popen`, for a process that is no child of this one."""

    def __init__(self, pid):
        self.pid = pid
        try:
            self._end = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end = None

    def wait(self, timeout=None):
        if self._end is not None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork server", timeout)
            os.close(self._end)
            self._end = None
        return 0  # Only its parent knows its code.

    def kill(self):
        if self._end is not None:
            signal.pidfd_send_signal(self._end, signal.SIGKILL)


def serve(descriptor):
    """Forks a fork server for each request, until the line ends."""
    for name in ("torch", "framework.programs.make"):
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
            _become_fork_server(json.loads(content), *descriptors)
        for each in descriptors:
            os.close(each)
        line.send(str(pid).encode())


def _reap(signum, frame):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # Their CPU seconds are now among those of this process's children.


def _become_fork_server(about, line, output, errors, *inherited):
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
        fork_server.main(line)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
