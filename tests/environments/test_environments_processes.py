"""Environments in child processes: the same steps as in line, and no way to leave a child behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import psutil
import pytest
import warm_python
from faulty_environment import FaultyEnvironment

from framework import environments
from framework.environments import EnvironmentFault, processes, suites, testing
from framework.environments.processes import ProcessEnvironment

CARTPOLE = "gymnasium:CartPole-v1"


def _pids(environment):
    return [child.process.pid for child in environment._children]


def _gone(pids, timeout=10.0):
    """Whether all processes end in time. psutil waits on the process, it does not poll files."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_the_same_steps_as_in_line(num_processes):
    actions = np.random.default_rng(0).integers(0, 2, (120, 5))
    inline = environments.make(CARTPOLE, num_envs=5, seed=3, stepping="inline")
    with environments.make(
        CARTPOLE, num_envs=5, seed=3, stepping="processes", num_processes=num_processes
    ) as outside:
        assert len(_pids(outside)) == num_processes
        assert outside.observation_spec() == inline.observation_spec()
        pairs = [(inline.reset().observation.copy(), outside.reset().observation.copy())]
        for t, action in enumerate(actions):
            mine, theirs = inline.step(action), outside.step(action)
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype
            if t == 50:
                pairs.append((inline.reset().observation.copy(), outside.reset().observation.copy()))
        for mine, theirs in pairs:
            np.testing.assert_array_equal(mine, theirs)


def test_more_processes_than_envs_are_not_started():
    with environments.make(CARTPOLE, num_envs=2, stepping="processes", num_processes=8) as environment:
        assert len(_pids(environment)) == 2


def test_close_ends_the_children_and_further_calls_say_so():
    environment = environments.make(CARTPOLE, num_envs=2, stepping="processes", num_processes=2)
    environment.reset()
    pids = _pids(environment)
    environment.close()
    environment.close()
    assert _gone(pids, 0)
    with pytest.raises(EnvironmentFault, match="closed"):
        environment.reset()


def test_the_last_reference_gone_ends_the_children():
    environment = environments.make(CARTPOLE, num_envs=2, stepping="processes", num_processes=2)
    pids = _pids(environment)
    del environment
    gc.collect()
    assert _gone(pids)


def test_no_descriptor_is_left_open():
    def count():
        return len(os.listdir("/proc/self/fd"))

    environments.make(CARTPOLE, stepping="processes").close()
    before = count()
    for _ in range(2):
        environments.make(CARTPOLE, stepping="processes").close()
    gc.collect()
    assert count() == before


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", r"env 0: step\(0\) raised RuntimeError: the simulator exploded"),
        ("sys.exit", r"env 0: SystemExit: got sys.exit\(0\)"),
    ],
)
def test_the_childs_traceback_is_raised_and_a_reset_goes_on(fault, told):
    where = {"num_envs": 2, "stepping": "processes", "num_processes": 2}
    with environments.make(FaultyEnvironment, options={"fault": fault, "at": 2}, **where) as environment:
        environment.reset()
        environment.step(np.zeros(2, np.int64))
        with pytest.raises(EnvironmentFault, match=told) as caught:
            environment.step(np.zeros(2, np.int64))
        shown = caught.value.__cause__
        assert shown.place.startswith("FaultyEnvironment.step (") or sys.version_info < (3, 11)
        assert "faulty_environment.py" in shown.text and "/framework/" not in shown.text
        assert (environment.reset().step_type == 0).all()
        assert environment.step(np.zeros(2, np.int64)).step_type.tolist() == [1, 1]


def test_a_dead_child_is_named_with_its_exit_code_and_the_others_end():
    where = {"num_envs": 4, "stepping": "processes", "num_processes": 2}
    environment = environments.make(FaultyEnvironment, options={"fault": "exit", "at": 2}, **where)
    pids = _pids(environment)
    environment.reset()
    environment.step(np.zeros(4, np.int64))
    with pytest.raises(EnvironmentFault, match=r"envs \d to \d: .*exited with code 7"):
        environment.step(np.zeros(4, np.int64))
    with pytest.raises(EnvironmentFault, match=r"can no longer be used.*exited with code 7"):
        environment.step(np.zeros(4, np.int64))
    environment.close()
    assert _gone(pids, 0)


def test_a_killed_child_is_noticed():
    with environments.make(CARTPOLE, num_envs=2, stepping="processes", num_processes=2) as environment:
        environment.reset()
        os.kill(_pids(environment)[1], signal.SIGKILL)
        with pytest.raises(EnvironmentFault, match=r"env 1: .*killed by SIGKILL"):
            for _ in range(3):
                environment.step(np.zeros(2, np.int64))


def test_signals_to_all_processes_do_not_end_the_children(monkeypatch):
    """Their parent acts on them: it stops, and saves what it has."""
    monkeypatch.setattr(processes, "subprocess", subprocess)  # An interpreter inherits which are blocked.

    def factory():
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        assert program.wait(30) == -signal.SIGTERM  # Programs of environments take signals.
        return testing.FakeEnvironment()

    with environments.make(factory, num_envs=2, stepping="processes", num_processes=1) as environment:
        environment.reset()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(_pids(environment)[0], number)
            environment.step(np.zeros(2, np.int64))
        pids = _pids(environment)
    assert _gone(pids)


def test_a_hanging_step_meets_its_timeout_and_the_child_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "_CLOSE_S", 0.5)
    source = suites.EnvironmentSource("Hanging", FaultyEnvironment, {"fault": "hang", "at": 1})
    environment = ProcessEnvironment(source, [None, None], 1, step_timeout=2.0)
    pids = _pids(environment)
    environment.reset()
    with pytest.raises(EnvironmentFault, match=r"envs 0 to 1: step\(\) took longer than 2.0 s"):
        environment.step(np.zeros(2, np.int64))
    environment.close()
    assert _gone(pids, 0)


class Unbuildable(testing.EchoEnvironment):
    def __init__(self, seed):
        raise FileNotFoundError("no such level")


class Unending(testing.EchoEnvironment):
    def __init__(self):
        threading.Event().wait()


def test_an_environment_that_cannot_be_built_is_an_error_at_once():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EnvironmentFault, match=r"Unbuildable, envs? 0.*FileNotFoundError: no such level"):
        environments.make(Unbuildable, num_envs=2, stepping="processes", num_processes=2)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_building_has_a_time_limit():
    source = suites.EnvironmentSource("Unending", Unending)
    with pytest.raises(EnvironmentFault, match=r"env 0: building took longer than 2.0 s"):
        ProcessEnvironment(source, [None], start_timeout=2.0)


def test_the_episodes_of_some_envs_can_be_ended():
    with environments.make(
        testing.EchoEnvironment, num_envs=4, stepping="processes", num_processes=2
    ) as environment:
        environment.reset()
        environment.step(np.zeros(4, np.int64))
        environment.end_episodes(np.array([False, True, True, False]))
        timestep = environment.step(np.zeros(4, np.int64))
        assert timestep.step_type.tolist() == [1, 0, 0, 1]


class Marking(testing.EchoEnvironment):
    def __init__(self, folder, seed):
        super().__init__()
        self._file = folder / str(seed)

    def close(self):
        self._file.touch()


def test_the_envs_are_closed_in_the_children(tmp_path):
    environment = environments.make(
        Marking, num_envs=3, seed=0, stepping="processes", num_processes=2, options={"folder": tmp_path}
    )
    environment.reset()
    environment.close()
    assert len(list(tmp_path.iterdir())) == 3


_PARENT = """
    import signal, sys, threading
    import numpy as np
    from framework import environments
    from framework.environments import testing

    class Hanging(testing.EchoEnvironment):
        def step(self, action):
            timestep = super().step(action)
            return threading.Event().wait() if self._count == 3 else timestep

    # Shells let what they run in the background ignore it, and these tests with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = environments.make(Hanging, num_envs=2, stepping="processes", num_processes=2)
    environment.reset()
    print(*[child.process.pid for child in environment._children], flush=True)
    while True:
        environment.step(np.zeros(2, np.int64))
"""


def _start_parent():
    code, pipes = textwrap.dedent(_PARENT), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = warm_python.Popen(["-c", code], **pipes, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2, parent.stderr.read()
    return parent, pids


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_children_end_with_their_parent_even_in_a_step_that_hangs(how):
    parent, pids = _start_parent()
    try:
        # Ctrl-C in a terminal reaches the whole process group; the children must leave it to the parent.
        (os.killpg if how == signal.SIGINT else os.kill)(parent.pid, how)
        _, errors = parent.communicate(timeout=30)
        assert _gone(pids)
        if how == signal.SIGINT:
            assert errors.count("KeyboardInterrupt") >= 1
            assert errors.count("Traceback") == 1  # the parent's own; the children are silent
    finally:
        parent.kill()
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def test_an_interrupted_environment_says_that_it_cannot_go_on():
    environment = environments.make(CARTPOLE, num_envs=2, stepping="processes", num_processes=2)
    environment.reset()

    class Interrupting:
        def __getattr__(self, name):
            if name == "recv":
                raise KeyboardInterrupt
            return getattr(real, name)

    child = environment._children[0]
    real, child.connection = child.connection, Interrupting()
    with pytest.raises(KeyboardInterrupt):
        environment.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match=r"can no longer be used.*interrupted"):
        environment.step(np.zeros(2, np.int64))
    environment.close()
