"""How a program goes on and ends, on every engine: workers, services, stopping, failures, restarts."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback

import pytest

import launch as lp

# Long enough for a loaded machine; a test that needs it has failed.
PATIENCE = 180.0


class Refused(Exception):
    """An error of the program's own."""


class Counter:
    """A worker that counts until it is stopped."""

    def __init__(self, limit=None, result=None):
        self.count = 0
        self._limit = limit
        self._result = result

    def ready(self):
        return True

    def step(self):
        self.count += 1
        if self.count == self._limit:
            lp.stop(self._result)

    def run(self):
        while not lp.stop_event().is_set():
            self.step()

    def get(self):
        return self.count


@pytest.mark.parametrize("fails", ["", "in a node", "at the start"])
def test_contexts_hold_from_before_the_first_node_until_all_have_ended(engine, tmp_path, fails):
    """They are of the launching process, also if a node fails or the program cannot start."""
    held, seen = tmp_path / "held", []

    @contextlib.contextmanager
    def hold():
        held.write_text(str(os.getpid()))
        try:
            yield
        finally:
            seen.append(held.read_text())
            held.unlink()

    class Holder:
        def __init__(self):
            assert held.exists()

        def close(self):
            assert held.exists()

    def main(holder):
        assert held.exists()
        if fails:
            raise Refused
        lp.stop("ended")

    program = lp.Program("test")
    program.contexts = [hold]
    if fails == "at the start":
        program.contexts = [hold, no_context]
    holder = program.add_node(lp.CourierNode(Holder), label="holder")
    program.add_node(lp.PyNode(main, holder), label="main")
    if not fails:
        assert lp.launch(program, engine) == "ended"
    else:
        with pytest.raises(Refused if fails == "at the start" else lp.NodeError):
            lp.launch(program, engine)
    assert seen == [str(os.getpid())] and not held.exists()


def no_context():
    raise Refused


def test_program_ends_when_all_workers_have_returned(engine):
    def work():
        return None

    program = lp.Program("test")
    program.add_node(lp.CourierNode(dict), label="service")
    with program.group("worker"):
        program.add_node(lp.PyNode(work))
        program.add_node(lp.PyNode(work))
    assert lp.launch(program, engine) is None


@pytest.mark.real
def test_services_close_in_reverse_order_and_may_call_older_ones(engine, tmp_path):
    class Diary:
        def __init__(self, path):
            self._path = path
            self._lines = []

        def write(self, line):
            self._lines.append(line)

        def close(self):
            with open(self._path, "w") as file:
                file.write(" ".join([*self._lines, "diary"]))

    class Service:
        def __init__(self, diary, name):
            self._diary = diary
            self._name = name

        def hello(self):
            return self._name

        def close(self):
            self._diary.write(self._name)

    def main(diary, services):
        def write():
            time.sleep(0.5)  # Services stay open for a handler that takes longer than `main`.
            diary.write("stopping")

        lp.register_stop_handler(write)
        assert [service.hello() for service in services] == ["a", "b", "c"]
        lp.stop()
        lp.wait_for_stop()
        diary.write("returned")

    program = lp.Program("test")
    diary = program.add_node(lp.CourierNode(Diary, str(tmp_path / "diary")), label="diary")
    services = [lp.CourierNode(Service, diary, name) for name in "abc"]
    worker = lp.PyNode(main, diary, [service.create_handle() for service in services])
    # The last service is added after the worker, which must end before all the same.
    for label, node in zip("abwc", (*services[:2], worker, services[2]), strict=True):
        program.add_node(node, label=label)
    lp.launch(program, engine)
    words = (tmp_path / "diary").read_text().split()
    assert sorted(words[:2]) == ["returned", "stopping"]
    assert words[2:] == ["c", "b", "a", "diary"]


def test_stop_from_threads_that_the_node_started(engine):
    """By a function, a stopper made in the node, and one that the script made and passed to it."""

    def main(stopper):
        for stop in (functools.partial(lp.stop, "direct"), lp.make_program_stopper(), stopper):
            thread = threading.Thread(target=stop)
            thread.start()
            thread.join()
        assert lp.wait_for_stop(PATIENCE)

    program = lp.Program("test")
    program.add_node(lp.PyNode(main, lp.make_program_stopper("local_mp")), label="main")
    assert lp.launch(program, engine) == "direct"


def test_ways_of_waiting_for_the_stop(concurrent_engine):
    """Functions as constructors of nodes; they return when the program stops."""

    def poll():
        while not lp.wait_for_stop(0.02):
            continue

    def event():
        assert lp.stop_event().wait(PATIENCE)

    def handler():
        stopped = threading.Event()
        lp.register_stop_handler(stopped.set)
        assert stopped.wait(PATIENCE)

    def ended_by_the_stop():
        lp.wait_for_stop()
        raise lp.ProgramStopped("It waited, and is no failure.")

    program = lp.Program("test")
    for function in (poll, event, handler):
        program.add_node(lp.CourierNode(function), label=function.__name__)
    program.add_node(lp.PyNode(ended_by_the_stop), label="ended_by_the_stop")
    program.add_node(lp.PyNode(lp.stop, "over"), label="main")
    assert lp.launch(program, concurrent_engine) == "over"


def test_stop_from_outside(concurrent_engine):
    program = lp.Program("test")
    program.add_node(lp.CourierNode(Counter), label="worker")
    job = lp.start(program, concurrent_engine)
    while job.client("worker").get() < 5:
        assert not job.over
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.01)
    job.stop("from outside")
    assert job.wait(timeout=PATIENCE) == "from outside"
    assert job.over
    assert {node["state"] for node in job.status()["nodes"]} <= {"closed", "returned"}
    assert job.status()["state"] == "finished"


def test_a_program_without_a_worker_is_an_error(engine):
    class Idle:
        def step(self):
            pass

    program = lp.Program("idle")
    program.add_node(lp.CourierNode(Idle), label="service")
    with pytest.raises(lp.LaunchError, match=r"without run\(\), service \(CourierNode\(Idle\)\), expected a"):
        lp.launch(program, engine)


@pytest.mark.parametrize("failing", ["short", "long"])
def test_waiting_for_groups_raises_the_error_of_any_node(concurrent_engine, failing):
    def fail():
        raise Refused

    program = lp.Program("groups")
    for label in ("short", "long"):
        program.add_node(lp.PyNode(fail if label == failing else lp.wait_for_stop), label=label)
    with pytest.raises(lp.NodeError, match=f"node '{failing}-0' failed with Refused"):  # noqa: SIM117
        with lp.start(program, concurrent_engine) as job:
            job.wait(["short"], timeout=PATIENCE)
            pytest.fail("wait() returned")


def test_waiting_for_groups(concurrent_engine):
    program = lp.Program("groups")
    program.add_node(lp.PyNode(lambda: None), label="short")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="long")
    with lp.start(program, concurrent_engine) as job:
        job.wait(["short"], timeout=PATIENCE)
        assert not job.over
        with pytest.raises(TimeoutError):
            job.wait(["short", "long"], timeout=0.1)
        with pytest.raises(ValueError, match="medium"):
            job.wait(["medium"])


# Failures.


class Broken:
    def __init__(self, where):
        self._where = where
        if where == "in the constructor":
            raise Refused(where)

    def step(self):
        raise Refused(self._where)

    run = step


def broken():
    raise Refused("in a function")


BROKEN = {
    "in the constructor": lambda: lp.CourierNode(Broken, "in the constructor"),
    "in run": lambda: lp.CourierNode(Broken, "in run"),
    "in a function": lambda: lp.PyNode(broken),
}


@pytest.mark.parametrize(
    "where", ["in the constructor", "in a function", pytest.param("in run", marks=pytest.mark.real)]
)
def test_a_failing_node_ends_the_program(engine, where):
    program = lp.Program("test")
    program.add_node(BROKEN[where](), label="broken")
    program.add_node(lp.CourierNode(Counter), label="worker")
    with pytest.raises(lp.NodeError, match=rf"broken-0.*Refused: {where}") as caught:
        lp.launch(program, engine)
    assert caught.value.node == "broken-0"
    assert isinstance(caught.value.__cause__, Refused)
    assert "raise Refused" in caught.value.traceback
    assert caught.value.frames.count("raise Refused") == 1 and "/launch/engines" not in caught.value.frames
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("raise Refused") == 1 and "Refused" in printed.splitlines()[-1]


class Exits:
    """A worker whose user calls `sys.exit()`, while another worker waits for the stop."""

    def step(self):
        sys.exit()

    run = step


def call_one_that_exits(client, code):
    with pytest.raises(lp.LaunchError, match=r"step.*got sys\.exit\(\), expected a return") as caught:
        client.step()
    assert not isinstance(caught.value, lp.CallLost | lp.ProgramStopped)
    sys.exit(code)


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_is_a_failure_except_with_zero_in_a_function(engine, code):
    """It ends neither the caller of a call, nor, without a word, a worker."""
    program = lp.Program("test")
    service = lp.CourierNode(Exits)
    service.disable_run()
    program.add_node(
        lp.PyNode(call_one_that_exits, program.add_node(service, label="one"), code), label="main"
    )
    if code:
        with pytest.raises(
            lp.NodeError, match=r"call_one_that_exits.*main-0.*SystemExit: got sys\.exit\(3\)"
        ):
            lp.launch(program, engine)
    else:
        assert lp.launch(program, engine) is None


class Counts:
    """A plan of three steps, whose author took `run = step` from a plan of one."""

    def __init__(self, last):
        self.made, self.last = 0, last

    def step(self):
        self.made += 1
        if self.made == self.last:
            lp.stop(self.made)

    run = step


@pytest.mark.parametrize("last", [1, 3])
def test_a_run_that_is_step_makes_all_steps_or_says_what_is_left(engine, last):
    program = lp.Program("test")
    program.add_node(lp.PyClassNode(Counts, last), label="driver")
    if last == 1 or engine == "serial":
        assert lp.launch(program, engine) == last
    else:
        with pytest.raises(lp.NodeError, match=r"'driver-0' failed with LaunchError: Counts: got run = step"):
            lp.launch(program, engine)


def test_a_worker_that_exits_ends_the_program(concurrent_engine):
    program = lp.Program("test")
    program.add_node(lp.PyClassNode(Exits), label="worker")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="other")
    with pytest.raises(lp.NodeError, match=r"step \(.*, line \d+\): node 'worker-0' failed with SystemExit"):
        lp.launch(program, concurrent_engine)


class Fragile:
    """Fails in its first lives; lives are counted in a file, as the object forgets."""

    def __init__(self, path, failures):
        with open(path, "a") as file:
            file.write("x")
        self._life = os.path.getsize(path)
        self._failures = failures

    def life(self):
        return self._life

    def step(self):
        if self._life <= self._failures:
            raise Refused("fragile")
        lp.stop(self._life)

    def run(self):
        self.step()
        lp.wait_for_stop()


@pytest.mark.parametrize("failures, restarts", [(2, 2), (2, 1)])
def test_restarts(engine, tmp_path, failures, restarts):
    program = lp.Program("test")
    program.add_node(lp.CourierNode(Fragile, str(tmp_path / "lives"), failures), label="fragile")
    if engine.startswith("launchpad"):
        with pytest.raises(ValueError, match="Launchpad does not restart"):
            lp.launch(program, engine, restarts={"fragile": restarts})
        return
    if failures > restarts:
        with pytest.raises(lp.NodeError, match="Refused"):
            lp.launch(program, engine, restarts={"fragile": restarts})
    else:
        assert lp.launch(program, engine, restarts={"fragile": restarts}) == failures + 1


def test_a_stop_before_a_restart(concurrent_engine):
    """The node had a restart left, so its failure is none of the program."""
    if concurrent_engine.startswith("launchpad"):
        return  # Launchpad does not restart nodes.

    def fail():
        raise Refused("always")

    program = lp.Program("test")
    program.add_node(lp.PyNode(fail), label="fragile")
    with lp.start(program, concurrent_engine, restarts={"fragile": 1_000}) as job:
        while job.status()["nodes"][0]["restarts"] < 5:  # The next pause is of 1.6 s.
            time.sleep(0.01)
        job.stop("stopped")
        assert job.wait(timeout=PATIENCE) == "stopped"


class Threaded(Fragile):
    """A service whose own thread fails in its first lives."""

    def __init__(self, path, failures):
        super().__init__(path, failures)
        self._fail = lp.make_failure_handler()

    def work(self):
        if self._life <= self._failures:
            thread = threading.Thread(target=self._fail, args=(Refused("in a thread"),))
            thread.start()
            thread.join()
        return self._life

    run = None  # It has no work of its own.


@pytest.mark.parametrize("failures, restarts", [(2, 2), (2, 1)])
def test_a_failure_of_a_thread_of_a_service(engine, tmp_path, failures, restarts):
    def main(service):
        while not lp.stop_event().is_set():
            with contextlib.suppress(lp.CallLost):  # Its process has ended.
                if (life := service.work()) > failures:
                    lp.stop(life)
            lp.wait_for_stop(0.01)

    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Threaded, str(tmp_path / "lives"), failures), label="service")
    program.add_node(lp.PyNode(main, service), label="main")
    if restarts and engine.startswith("launchpad"):
        return  # Launchpad does not restart nodes.
    if failures > restarts:
        with pytest.raises(lp.NodeError, match="'service-0' failed with Refused: in a thread") as error:
            lp.launch(program, engine, restarts={"service": restarts})
        assert isinstance(error.value.__cause__, Refused)
    else:
        assert lp.launch(program, engine, restarts={"service": restarts}) == failures + 1


class Wordless(Exception):
    def __str__(self):
        return self.words  # which it does not have


def test_a_failure_with_an_error_that_cannot_be_printed(engine):
    def main():
        raise Wordless

    program = lp.Program("test")
    program.add_node(lp.PyNode(main), label="main")
    program.add_node(lp.CourierNode(Counter), label="counter")
    with pytest.raises(lp.NodeError, match="'main-0' failed with Wordless: <its"):
        lp.launch(program, engine)


class Closing:
    """Notes in a file that it is closed, and may fail then."""

    def __init__(self, path, fails):
        self._path, self._fails = path, fails

    def ready(self):
        return True

    def close(self):
        self._path.write_text("closed")
        if self._fails:
            raise Refused("at the close")


def stop_once_ready(*nodes):  # A node that has not begun is not closed.
    assert all(node.ready() for node in nodes)
    lp.stop()


def test_an_error_at_the_close_of_a_node_does_not_keep_the_others_open(engine, tmp_path):
    program = lp.Program("test")
    nodes = [lp.CourierNode(Closing, tmp_path / name, name == "last") for name in ("first", "last")]
    handles = [node.create_handle() for node in nodes]
    program.add_node(lp.MultiThreadingColocation(nodes), label="both")
    program.add_node(lp.PyNode(stop_once_ready, *handles), label="main")
    with pytest.raises(lp.NodeError, match="Refused: at the close"):
        lp.launch(program, engine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "last"]
