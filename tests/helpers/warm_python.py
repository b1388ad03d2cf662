"""Python processes that are forks of one that has imported what takes long.

`make test` starts some 80 interpreters with torch, of 2 to 4 CPU seconds each, and 300 others, of 0.3; a fork
takes 0.03. Without the forks it would take 4 to 6 CPU minutes more.

`run` and `Popen` are those of `subprocess` for arguments of Python (`["-c", code]`, `["-m", module]`,
`["script.py"]`), and the process begins with the modules of `preload` imported. It is a child of the process
that is forked (the template), which tells its exit status. Programs on `processes` that it starts have fork
servers that are forks of the template, too.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref

from psutil import NoSuchProcess, Process  # Bound here: a test replaces what psutil has under the name.

from launch.engines import processes

TORCH = ("torch", "framework.commands.train", "framework.programs.make", "gymnasium", "matplotlib.figure")
TORCH += ("torch._dynamo",)  # Which several learners, RMSprop and MAML import, in nearly two CPU seconds.
LAUNCH = ("launch.engines.processes.fork_server", "launch.rpc.client", "numpy", "pytest")
FORK_SERVER = ("launch.engines.processes.fork_server", "main")
WARM = sys.platform == "linux"  # A Mac has no sockets that keep messages apart.

start_interpreter = processes.start_interpreter  # That of users.


class Popen(subprocess.Popen):
    """As `subprocess.Popen`, for a process that is forked from the template of `preload`.

    It leads a session of its own. Of the keyword arguments, ``pass_fds``, ``cwd``, ``env`` and those that
    concern the streams have an effect.
    """

    def __init__(self, args, *, preload=TORCH, **options):
        self._preload, self._report = preload, None
        super().__init__([sys.executable, *map(str, args)], **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        if not WARM:
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        # The pipes, of which the process gets one end each; -1 where it gets ours.
        p2cread, _, _, c2pwrite, _, errwrite = rest[3:9]
        streams = [each if each != -1 else ours for ours, each in enumerate((p2cread, c2pwrite, errwrite))]
        request = {"args": args[1:], "pass_fds": list(pass_fds)}
        request["env"] = dict(os.environ if env is None else env)
        request["cwd"] = os.path.abspath(cwd or "")
        self._report = os.fdopen(_template(self._preload).ask(request, [*streams, *pass_fds]), "rb")
        self.pid = int(self._report.readline())
        self._child_created = True
        self._close_pipe_fds(*rest[3:9])

    def _internal_poll(self, *args, **kwargs):
        if self._report is None:
            return super()._internal_poll(*args, **kwargs)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode

    def _wait(self, timeout):
        if self._report is None:
            return super()._wait(timeout)
        while self.returncode is None:
            with contextlib.suppress(ValueError):  # Another thread has read the status and closed the pipe.
                if not select.select([self._report], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
            with self._waitpid_lock:
                if self.returncode is None:
                    self.returncode = int(self._report.readline())
                    self._report.close()
        return self.returncode


# That of `subprocess`, whose `Popen` is the one above.
run = types.FunctionType(subprocess.run.__code__, {**vars(subprocess), "Popen": Popen})
run.__kwdefaults__ = subprocess.run.__kwdefaults__


def start_fork_server(line, inherited, preload=None, main=FORK_SERVER):
    """As `launch.engines.processes.start_interpreter`, or for another function of the descriptor `line`."""
    if not WARM:
        return start_interpreter(line, inherited)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; sys.argv[:] = {sys.argv!r}; "
        f"from {main[0]} import {main[1]}; {main[1]}({line})"
    )
    modules = preload or (TORCH if "torch" in sys.modules else LAUNCH)
    options = {"stdin": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    return Popen(["-c", code], preload=modules, pass_fds=[line, *inherited], **options)


def cpu_seconds():
    """The CPU seconds of the templates, and of their forks that have ended."""
    total = 0.0
    for pid in templates():
        with contextlib.suppress(NoSuchProcess):  # One that has died is replaced when a test needs it.
            total += sum(_process(pid).cpu_times()[:4])  # Its own, and those of its children.
    return total


_process = functools.cache(Process)  # It reads several files when it is made.


def templates():
    """Process ids of the templates that this process has started."""
    return {template.pid for template in _templates().values()}


@functools.cache
def _templates():
    """The templates, by what they have imported."""
    return {}


def _template(preload):
    with _starting:  # One that is replaced at once would end, because nothing holds its line.
        found = _templates().get(preload)
        if found is not None and found.process is not None and found.process.poll() is not None:
            found = None  # It has died, which must not fail all tests that follow.
        return found or _start_template(preload)


_starting = threading.Lock()


class _Template:
    """The line to a process that is forked.

    Each request has a pipe of its own for the answers. Forks hold the line, too, so that they can ask for
    fork servers; the template ends with the process that started it.
    """

    def __init__(self, line, pid, process=None):
        self.line, self.pid, self.process = line, pid, process
        atexit.register(line.close)  # Or Python tells of an unclosed socket at the end, with -W default.

    def ask(self, request, descriptors):
        """Returns the descriptor from which the answers can be read."""
        answers, theirs = os.pipe()
        try:
            content = json.dumps(request).encode()
            socket.send_fds(self.line, [content], [theirs, self.line.fileno(), *descriptors])
        finally:
            os.close(theirs)
        return answers


def _start_template(preload):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    alive, end = os.pipe()
    helpers, numbers = os.path.dirname(__file__), f"{theirs.fileno()}, {alive}"
    code = (
        f"import sys; path = sys.path[1:]; sys.path[:] = [{helpers!r}, *{sys.path!r}]; "
        f"import warm_python; warm_python.serve({numbers}, {preload!r}, path)"
    )
    options = {"stdin": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    options |= {"pass_fds": [theirs.fileno(), alive], "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    theirs.close()
    os.close(alive)
    atexit.register(process.wait, 10)
    atexit.register(os.close, end)  # The last one registered is the first one called.
    _templates()[preload] = _Template(ours, process.pid, process)
    return _templates()[preload]


def serve(line, alive, preload, path):
    """Serves as a template until the other end of ``alive`` is closed.

    In a fork it returns once the fork's code has run, and the interpreter ends as always.
    """
    for name in preload:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"preload: got {preload}, which start threads, expected modules that start none.")
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [each for each in path if each not in added]
    for each in list(weakref.finalize._registry):
        each.atexit = False  # torch takes its operators down at the exit of each process.
    gc.collect()
    gc.freeze()  # A fork that collects garbage would copy every page.
    wake, wake_end = socket.socketpair()
    for each in (wake, wake_end):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)
    requests, reports = socket.socket(fileno=line), {}
    while True:
        readable, _, _ = select.select([requests, alive, wake], [], [])
        if alive in readable:
            return
        if wake in readable:
            wake.recv(4096)
            _reap(reports)
        if requests in readable:
            content, (report, *descriptors), _, _ = socket.recv_fds(requests, 1 << 20, 64)
            if pid := os.fork():
                reports[pid] = report
                _tell(report, pid)
            else:
                # Their numbers become those of other files, which they would close at the end.
                for each in (requests, wake, wake_end):
                    each.detach()
                return _become(json.loads(content), descriptors, preload, path)
            for each in descriptors:
                os.close(each)


def _reap(reports):
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            report = reports.pop(pid)  # Its CPU seconds are now among those of this process's children.
            _tell(report, os.waitstatus_to_exitcode(status))
            os.close(report)


def _tell(report, what):
    with contextlib.suppress(BrokenPipeError):  # Who asked has gone.
        os.write(report, f"{what}\n".encode())


def _become(request, descriptors, preload, path):
    """Makes a fork the process that the request asks for, and runs its code."""
    template = os.getppid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    line = _take_descriptors(descriptors, [0, 1, 2, *request["pass_fds"]])
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    time.tzset()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # Preloaded modules of ours stay; what the process imports comes from where its environment says.
    added = [each for each in request["env"].get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*added, *path]
    sys.path_importer_cache.clear()
    _templates()[preload] = _Template(socket.socket(fileno=line), template)
    processes.start_interpreter = start_fork_server
    if "torch" in sys.modules:
        _run_and_exit(request["args"])
    _run(request["args"])


def _take_descriptors(descriptors, numbers):
    """Moves descriptors to their numbers, and closes all others but that of the line, which it returns."""
    # No descriptor may lie where another one belongs.
    line, *moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for each in descriptors]
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in (*numbers, line):
            with contextlib.suppress(OSError):  # The one that listed them.
                os.close(each)
    return line


def _run_and_exit(args):
    """Runs code and ends as an interpreter does, without the end of its modules.

    It would copy the pages of the template, in more CPU seconds than most tests take. After an error, and in
    forks without torch, it is made.
    """
    code = 0
    try:
        _run(args)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


def _run(args):
    """Runs code, a module or a script as an interpreter does."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    kind, *rest = args
    if kind == "-c":
        sys.argv[:], code = ["-c", *rest[1:]], compile(rest[0], "<string>", "exec")
        sys.path.insert(0, "")
    elif kind == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        return runpy._run_module_as_main(rest[0])
    else:
        sys.argv[:], main.__file__ = args, kind
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        with open(kind, "rb") as file:
            code = compile(file.read(), kind, "exec")
    exec(code, main.__dict__)
