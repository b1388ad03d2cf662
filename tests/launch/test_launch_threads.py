"""The engine `threads` alone."""

from __future__ import annotations

import threading
import time

import pytest
from background import until

import launch as lp
from launch.futures import CallThreads

PATIENCE = 15.0


class Failing:
    """A service that fails when it is told to."""

    def __init__(self):
        self._fail = lp.make_failure_handler()

    def fail(self):
        self._fail(ValueError("told to"))


def test_a_stop_before_the_thread_of_a_restart_has_started(monkeypatch):
    start, jobs, begun = threading.Thread.start, [], threading.Event()

    def main(service):
        begun.wait(PATIENCE)
        service.fail()

    def start_late(thread):
        if getattr(thread._target, "__name__", "") == "_run_again":
            jobs[0].stop("stopped")
            time.sleep(0.3)  # The supervisor joins the threads in the meantime.
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Failing), label="service")
    program.add_node(lp.PyNode(main, service), label="main")
    jobs.append(lp.start(program, "threads", restarts={"service": 1}))
    begun.set()
    assert jobs[0].wait(timeout=PATIENCE) == "stopped"


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_life_fails_once(engine):
    lives = []

    class Service(Failing):
        def __init__(self):
            super().__init__()
            lives.append(self)

        def close(self):
            if self is lives[0]:
                self.fail()

        def count(self):
            return len(lives)

    def main(service):
        assert service.count() == 1
        first = lives[0]
        for fail in (service.fail, first.fail):
            fail()
        assert service.count() == 2
        first.fail()
        assert service.count() == 2

    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(main, service), label="main")
    lp.launch(program, engine, restarts={"service": 1})


def test_a_node_that_does_not_close_is_reported_with_its_stack():
    release, closed = threading.Event(), []

    class Stubborn:
        def close(self):
            release.wait(PATIENCE)

    class Obliging:
        def close(self):
            closed.append(self)

    program = lp.Program("test")
    program.add_node(lp.CourierNode(Obliging), label="obliging")
    program.add_node(lp.CourierNode(Stubborn), label="stubborn")
    program.add_node(lp.PyNode(lp.stop), label="main")
    try:
        with pytest.raises(lp.LaunchError, match=r"stubborn-0(?s:.*)release\.wait"):
            lp.launch(program, "threads", stop_timeout=0.5)
    finally:
        release.set()
    assert closed


def test_a_thread_that_cannot_start_ends_the_program(monkeypatch):
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "last-0":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    program = lp.Program("test")
    for label in ("first", "last"):
        program.add_node(lp.PyNode(lp.wait_for_stop), label=label)
    with pytest.raises(RuntimeError, match="new thread"), lp.start(program, "threads") as job:
        job.wait(timeout=PATIENCE)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_restart_closes_what_failed(engine):
    """Also if closing fails, and once each; and none of its stop handlers is called."""
    closed = []

    class Fragile:
        def __init__(self):
            lp.register_stop_handler(self.check_open)

        def check_open(self):
            assert self not in closed

        def step(self):
            if len(closed) < 2:
                raise ValueError("as it should")
            lp.stop()

        def run(self):
            self.step()

        def close(self):
            closed.append(self)
            assert len(closed) != 1

    program = lp.Program("test")
    program.add_node(lp.CourierNode(Fragile), label="fragile")
    lp.launch(program, engine, restarts={"fragile": 2})
    assert len(set(closed)) == len(closed) == 3


def test_calls_have_a_limited_number_of_threads_which_end_without_calls():
    calls, before, running, go_on = CallThreads(2), {*threading.enumerate()}, [], threading.Event()

    def call():
        running.append(threading.current_thread())
        go_on.wait(PATIENCE)

    for _ in range(3):
        calls.submit(call)
    made = {*threading.enumerate()} - before
    assert len(made) == 2
    go_on.set()
    for thread in made:
        thread.join(PATIENCE)
    assert {*running} <= made and len(running) == 3
    calls.submit(call)
    until(lambda: len(running) == 4, PATIENCE)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_call_leaves_its_caller_where_it_was(engine):
    class Service:
        def where(self):
            return lp.get_node_context().label

    def main(service):
        lp.stop([service.where(), lp.get_node_context().label])

    program = lp.Program("test")
    service = program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(main, service), label="main")
    assert lp.launch(program, engine) == ["service-0", "main-0"]


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_callback_of_a_future_may_call_its_node(engine):
    class Echo:
        def echo(self, x):
            return x

    def main(node):
        done = threading.Semaphore(0)

        def again(future):
            node.futures.echo(future.result() + 1).add_done_callback(lambda _: done.release())

        for _ in range(20):
            first, second = node.futures.echo(0), node.futures.echo(0)
            first.add_done_callback(again)
            assert done.acquire(timeout=PATIENCE)
            second.result(PATIENCE)

    program = lp.Program("test")
    narrow = {"courier_kwargs": {"thread_pool_size": 1}, "courier_client_kwargs": {"max_in_flight": 1}}
    echo = program.add_node(lp.CourierNode(Echo, **narrow), label="echo")
    program.add_node(lp.PyNode(main, echo), label="main")
    lp.launch(program, engine)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_nodes_close_after_the_stop_handlers(engine, hangs):
    """Which the thread that asked for the stop calls."""
    begun, closed, end, started = (threading.Event() for _ in range(4))
    late = []

    class Service:
        def close(self):
            closed.set()

    def handle():
        begun.set()
        late.append(end.wait(PATIENCE) if hangs else closed.wait(0.3))

    def stop():
        started.wait(PATIENCE)
        job.stop()

    def main():
        lp.register_stop_handler(handle)
        threading.Thread(target=stop).start()
        begun.wait(PATIENCE)

    program = lp.Program("test")
    program.add_node(lp.CourierNode(Service), label="service")
    program.add_node(lp.PyNode(main), label="main")
    job = lp.start(program, engine, stop_timeout=0.5 if hangs else PATIENCE)
    started.set()
    if hangs:
        with pytest.raises(lp.LaunchError, match="stop handlers did not return"):
            job.wait()
    else:
        job.wait()
        assert late == [False]
    end.set()
    assert closed.is_set()
