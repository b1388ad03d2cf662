"""Forks of a template are as processes of interpreters: streams, exit status, signals, place, end."""

import os
import signal
import subprocess

import pytest
import warm_python

OWN_DESCRIPTORS = """
import os, sys
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
class Last:
    def __del__(self, mine=opened, fstat=os.fstat, write=os.write):
        for each in mine:
            fstat(each)
        write(1, b"open")
sys.last_of_all = Last()
"""
RUNS = {
    "code": (
        ["-c", "import sys; print(sys.argv, sys.path[0] == '', __name__)", "a"],
        0,
        "['-c', 'a'] True __main__",
    ),
    "module": (["-m", "calendar", "2024", "2"], 0, "February 2024"),
    "script": (["here.py", "a"], 3, "['here.py', 'a'] True"),
    "exit with a text": (["-c", "raise SystemExit('why')"], 1, "why"),
    "exception": (["-c", "1 / 0"], 1, "ZeroDivisionError"),
    "hard exit": (["-c", "import os; os._exit(7)"], 7, ""),
    "end of the interpreter": (
        ["-c", "import atexit; atexit.register(print, 'at the end')"],
        0,
        "at the end",
    ),
    "threads are waited for": (
        ["-c", "import threading, time; threading.Timer(0.1, print, ['late']).start()"],
        0,
        "late",
    ),
    "place": (
        ["-c", "import os; print(os.getcwd(), os.environ['A'], len(os.environ) < 4)"],
        0,
        "{folder} b True",
    ),
    "stdin": (["-c", "print(input()[::-1])"], 0, "olleh"),
    "interrupted": (
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"],
        -2,
        "KeyboardInterrupt",
    ),
    # What the template had under these numbers is not closed when the interpreter ends.
    "its own descriptors": (["-c", OWN_DESCRIPTORS], 0, "open"),
    "no descriptors": (["-c", "import os; print(os.listdir('/proc/self/fd')[3:-2])"], 0, "[]"),
}


pytestmark = pytest.mark.skipif(not warm_python.WARM, reason="needs templates")


@pytest.mark.parametrize("args, code, text", RUNS.values(), ids=RUNS)
def test_runs(tmp_path, args, code, text):
    (tmp_path / "here.py").write_text(
        "import sys, os\nprint(sys.argv, sys.path[0] == os.getcwd())\nsys.exit(3)"
    )
    options = {"cwd": tmp_path, "env": {"A": "b"}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = warm_python.run(
        args, preload=warm_python.LAUNCH, input="hello\n", text=True, timeout=60, **options
    )
    assert done.returncode == code and text.format(folder=tmp_path) in done.stdout


def test_a_process_that_runs():
    code = "import os, sys, time; os.write(int(sys.argv[1]), b'x'); time.sleep(600)"
    ours, theirs = os.pipe()
    before = warm_python.cpu_seconds()
    with warm_python.Popen(["-c", code, theirs], preload=warm_python.LAUNCH, pass_fds=[theirs]) as process:
        os.close(theirs)
        assert os.read(ours, 1) == b"x" and process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert os.getpgid(process.pid) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM == process.poll()
        assert os.read(ours, 1) == b""  # No other process holds the pipe.
    os.close(ours)
    assert warm_python.cpu_seconds() > before


def test_a_template_that_has_died_is_replaced():
    preload = ("json",)
    assert warm_python.run(["-c", "pass"], preload=preload).returncode == 0
    template = warm_python._template(preload).process
    template.kill()
    template.wait(10)
    assert warm_python.cpu_seconds() >= 0.0
    assert warm_python.run(["-c", "pass"], preload=preload).returncode == 0
