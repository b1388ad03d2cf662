"""What all tests share: one thread for numeric libraries, and the stacks of a test that hangs.

Idle OpenMP threads spin, and tests share the cores. A test that reaches its time limit usually waits for
processes that it started: a moment before, each of them says on stderr where its threads are, and ends.
"""

import gc
import os
import signal
import threading

import cpu_budget
import psutil
import pytest
import quarantine
import warm_python

from launch.engines import processes

_CI_PHASES = ("explicit", "reuse", "generate")

try:
    import hypothesis
except ImportError:  # the environments of other back ends may do without
    pass
else:
    # A loaded machine generates data slowly, which says nothing of the code under test.
    slow = [hypothesis.HealthCheck.too_slow]
    # In CI an example that fails is enough. Shrinking it takes minutes, in which nothing else is tested.
    phases = [each for each in hypothesis.Phase if "CI" not in os.environ or each.name in _CI_PHASES]
    hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=slow, phases=phases)
    hypothesis.settings.load_profile("tests")

# A shell lets what it runs in the background ignore these, and the processes of tests would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For processes that tests start: SIGABRT has Python write the stacks of all threads.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# On a busy machine a start of Ray may fail. It then waits as long as this for a process that has ended, and
# helpers/patient_ray.py starts it again.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "60")
_RAY_LIMIT_S = 600

_BEFORE_LIMIT_S = 10.0


def pytest_configure(config):
    config.pluginmanager.register(cpu_budget.CpuBudget("CI" in os.environ), "cpu_budget")


def pytest_collection_modifyitems(config, items):
    """Tests on Ray have a higher limit. Those in quarantine have a second try; pytest says so (``RERUN``)."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        on_ray = any(isinstance(value, str) and value == "ray" for value in parameters)
        if (on_ray or item.get_closest_marker("ray")) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_RAY_LIMIT_S))
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return  # the environments of other back ends: all tests have one try there
    reasons = quarantine.read_quarantine(quarantine.PATH.read_text(encoding="utf-8"))
    for item in items:
        if item.nodeid in reasons:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish(session):
    """What all tests have imported is left out of collections of garbage: each would walk it for a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def warm_fork_servers(monkeypatch):
    monkeypatch.setattr(processes, "start_interpreter", warm_python.start_fork_server)


def abort_children(launcher: int) -> None:
    """Has the Python processes below ``launcher`` write their stacks and end.

    Those that have processes of their own and were started by ``launcher`` itself (fork servers) are left:
    with them the others would end before they have written.
    """
    templates = warm_python.templates()
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            if process.pid in templates or "python" not in process.name():
                continue
            if process.ppid() not in {launcher, *templates} or not process.children():
                process.send_signal(signal.SIGABRT)
        except psutil.NoSuchProcess:
            continue  # it has ended meanwhile


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Around a test: the processes it has started are aborted a moment before its limit."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout") or 0)
    if item.config.getoption("timeout", None) is not None:
        limit = float(item.config.getoption("timeout"))
    if limit <= 2 * _BEFORE_LIMIT_S:
        return (yield)
    timer = threading.Timer(limit - _BEFORE_LIMIT_S, abort_children, (os.getpid(),))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()
