"""Programs as users of Launchpad write them: only the import is another."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import logging
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import launch as lp

PATIENCE = 180.0


class Consumer:
    """Asks all producers and prints what they say."""

    def __init__(self, producers: list[lp.CourierClient]) -> None:
        self._producers = producers

    def run(self) -> None:
        self.step()

    def step(self) -> None:
        answers = [producer.futures.work(context) for context, producer in enumerate(self._producers)]
        lp.stop([answer.result() for answer in answers])


class Producer:
    def work(self, context):
        return context


def consumer_program():
    program = lp.Program("consumer_producers")
    with program.group("producer"):
        producers = [program.add_node(lp.CourierNode(Producer)) for _ in range(3)]
    consumer = lp.CourierNode(Consumer, producers=producers)
    program.add_node(consumer, label="consumer")
    return program, consumer


def test_consumer_and_producers(engine):
    assert lp.launch(consumer_program()[0], engine) == [0, 1, 2]


def test_run_can_be_disabled_and_called_from_outside(concurrent_engine):
    program, _ = consumer_program()
    (node,) = program.groups["consumer"]
    node.disable_run()
    program.add_node(lp.PyNode(lp.wait_for_stop), label="wait")
    with lp.start(program, concurrent_engine) as job:
        job.client("consumer").run()
        assert job.wait(timeout=PATIENCE) == [0, 1, 2]


class Sums:
    """Replaces one of its methods by a batched one, with a size that only the constructor knows."""

    def __init__(self, batch_size):
        self.rows = 0
        self.compute = lp.batched_handler(batch_size=batch_size, timeout=PATIENCE)(self.compute)

    def compute(self, values):
        self.rows = max(self.rows, len(values))
        return values.sum(axis=1)

    def largest(self):
        return self.rows


def test_batched_method_made_in_the_constructor(engine):
    def main(server):
        answers = [server.futures.compute([x, x + 1]) for x in range(4)]
        lp.stop(([int(answer.result(PATIENCE)) for answer in answers], server.largest()))

    program = lp.Program("batching")
    server = program.add_node(lp.CourierNode(Sums, 2), label="server")
    program.add_node(lp.PyNode(main, server), label="client")
    sums, rows = lp.launch(program, engine)
    assert sums == [1, 3, 5, 7]
    assert rows == (1 if engine == "serial" else 2)


@pytest.mark.parametrize("wait", ["wait_for_stop", "stop_event", "register_stop_handler"])
def test_ways_of_waiting_for_the_stop(concurrent_engine, wait):
    """Functions as constructors of nodes; they return when the program stops."""

    def poll():
        while not lp.wait_for_stop(0.02):
            logging.info("still here")

    def event():
        assert lp.stop_event().wait(PATIENCE)

    def handler():
        stopped = threading.Event()
        lp.register_stop_handler(stopped.set)
        assert stopped.wait(PATIENCE)

    program = lp.Program("program_wait")
    function = {"wait_for_stop": poll, "stop_event": event, "register_stop_handler": handler}[wait]
    program.add_node(lp.CourierNode(function), label="_waiter")
    program.add_node(lp.PyNode(lp.stop, "over"), label="_stop_program")
    assert lp.launch(program, concurrent_engine) == "over"


class Limited:
    """Counts to a limit and ends the program by what it was given for it."""

    def __init__(self, stopper):
        self._stopper = stopper
        self._left = 3

    def count(self):
        self._left -= 1
        if not self._left:
            thread = threading.Thread(target=self._stopper)  # of its own, as a callback has
            thread.start()
            thread.join()


def test_a_stopper_made_by_the_script(engine):
    def main(limited):
        while not lp.stop_event().is_set():
            limited.count()

    program = lp.Program("stopper")
    stopper = lp.make_program_stopper("local_mp")
    limited = program.add_node(lp.CourierNode(Limited, stopper), label="limited")
    program.add_node(lp.PyNode(main, limited), label="main")
    assert lp.launch(program, engine) is None


@dataclasses.dataclass(frozen=True)
class Peers:
    """What a node is told of the others."""

    first: Any
    others: dict[str, Any]
    size: int = 3


@dataclasses.dataclass
class Circle:
    peers: Any
    itself: Any = None


def test_handles_inside_of_dataclasses(engine):
    def main(circle):
        peers = circle.peers
        assert circle.itself.itself is not None
        lp.stop([peers.first.work(1), *[peer.work(name) for name, peer in peers.others.items()], peers.size])

    program = lp.Program("nested")
    producers = [program.add_node(lp.CourierNode(Producer), label=name) for name in "ab"]
    circle = Circle(Peers(producers[0], {"b": producers[1]}))
    circle.itself = circle
    program.add_node(lp.PyNode(main, circle), label="main")
    assert lp.launch(program, engine) == [1, "b", 3]
    assert isinstance(circle.peers.first, lp.CourierHandle), "the script's own object is left alone"


class Clock:
    def __init__(self):
        self.asked = 0

    def tell(self):
        self.asked += 1
        return self.asked


def test_a_cacher_asks_again_when_its_answer_is_old(concurrent_engine):
    def main(cached, direct):
        first = cached.tell()
        while (again := cached.tell()) == first and not lp.wait_for_stop(0.02):
            continue
        lp.stop((first, again, direct.tell()))

    program = lp.Program("cacher")
    clock = program.add_node(lp.CourierNode(Clock), label="clock")
    cached = program.add_node(lp.CacherNode(clock, 0.2), label="cacher")
    program.add_node(lp.PyNode(main, cached, clock), label="main")
    first, again, direct = lp.launch(program, concurrent_engine)
    assert (first, again, direct) == (1, 2, 3)


class Gate:
    def __init__(self):
        self._open = threading.Event()
        self.passed = []

    def open(self):
        self._open.set()

    def go(self, name):
        assert self._open.wait(PATIENCE)
        self.passed.append(name)

    def who(self):
        return self.passed


def test_cancelled_futures_and_bounded_flight(concurrent_engine):
    def main(gate):
        flights = [gate.futures.go(0), gate.futures.go(1)]
        blocked = threading.Thread(target=lambda: flights.append(gate.futures.go(2)))
        blocked.start()
        blocked.join(0.3)
        waits = blocked.is_alive()
        gate.open()
        blocked.join(PATIENCE)
        for flight in flights:
            flight.result(PATIENCE)
        assert not flights[0].cancel(), "it is done"
        lp.stop((waits, sorted(gate.who())))

    program = lp.Program("flight")
    limit = {"max_in_flight": 2}
    gate = program.add_node(lp.CourierNode(Gate, courier_client_kwargs=limit), label="gate")
    program.add_node(lp.PyNode(main, gate), label="main")
    waits, who = lp.launch(program, concurrent_engine)
    assert who == [0, 1, 2]
    assert waits


def test_an_error_of_a_class_that_only_the_node_can_import(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # for the engines whose nodes are here
    module = f"only_there_{engine}"
    (tmp_path / f"{module}.py").write_text("class Odd(Exception):\n    pass\n")

    class Thrower:
        def __init__(self, path, module):
            sys.path.insert(0, path)
            self._module = importlib.import_module(module)

        def throw(self):
            raise self._module.Odd("a strange thing")

    def main(thrower):
        try:
            thrower.throw()
        except Exception as error:
            lp.stop((type(error).__name__, str(error), "in throw" in str(error.__cause__)))

    program = lp.Program("odd")
    thrower = program.add_node(lp.CourierNode(Thrower, str(tmp_path), module), label="thrower")
    program.add_node(lp.PyNode(main, thrower), label="main")
    kind, text, traced = lp.launch(program, engine)
    if engine in ("processes", "ray"):
        assert (kind, text, traced) == ("RemoteError", "Odd: a strange thing", True)
    else:
        assert "a strange thing" in text


def test_array_arguments_of_every_kind(engine):
    def main(producer):
        for value in (
            np.float32(2.5),
            np.arange(6).reshape(2, 3)[:, ::2],
            np.array("text"),
            np.zeros((0, 2)),
        ):
            back = producer.work(value)
            np.testing.assert_array_equal(back, value)
            assert back.dtype == value.dtype
        lp.stop("ok")

    program = lp.Program("arrays")
    producer = program.add_node(lp.CourierNode(Producer), label="producer")
    program.add_node(lp.PyNode(main, producer), label="main")
    assert lp.launch(program, engine) == "ok"


class Asks:
    """Its constructor waits for another node."""

    def __init__(self, other):
        self._answer = other.answer()

    def answer(self):
        return self._answer + 1


class Answers:
    def answer(self):
        return 1


@pytest.mark.parametrize("colocated", [False, True])
def test_a_constructor_may_wait_for_a_node_that_is_added_later(engine, colocated):
    program = lp.Program("constructors")
    first, second, third = lp.CourierNode(Asks), lp.CourierNode(Asks), lp.CourierNode(Answers)
    first.configure(second.create_handle())
    second.configure(third.create_handle())
    main = lp.PyNode(lambda node: lp.stop(node.answer()), first.create_handle())
    if colocated:
        program.add_node(lp.MultiThreadingColocation([first, second, third, main]), label="all")
    else:
        for label, node in (("first", first), ("second", second), ("third", third), ("main", main)):
            program.add_node(node, label=label)
    assert lp.launch(program, engine) == 3


class Slow:
    def __init__(self):
        self._open = threading.Event()

    def is_there(self):
        return True

    def wait(self):
        return self._open.wait(PATIENCE)

    def open(self):
        self._open.set()


@pytest.mark.parametrize("timeout", [datetime.timedelta(seconds=0.1), 0.1])
def test_call_timeouts_as_courier_takes_them(concurrent_engine, timeout):
    def main(slow):
        unlimited = slow.with_timeout(0)  # 0 is none
        assert unlimited.is_there()
        try:
            slow.wait()
        except lp.CallTimeout:
            unlimited.open()
            lp.stop(unlimited.wait())

    program = lp.Program("timeouts")
    options = {"courier_client_kwargs": {"call_timeout": timeout}, "courier_kwargs": {"thread_pool_size": 4}}
    slow = program.add_node(lp.CourierNode(Slow, **options), label="slow")
    program.add_node(lp.PyNode(main, slow), label="main")
    assert lp.launch(program, concurrent_engine) is True


def test_a_future_can_be_cancelled_until_its_answer_is_there(concurrent_engine):
    def main(slow):
        held = slow.futures.wait()
        time.sleep(0.2)  # by now the node is at it
        cancelled = held.cancel()
        slow.open()
        done = slow.futures.wait()
        done.result(PATIENCE)
        lp.stop((cancelled, held.cancelled(), done.cancel()))

    program = lp.Program("cancel")
    slow = program.add_node(lp.CourierNode(Slow), label="slow")
    program.add_node(lp.PyNode(main, slow), label="main")
    assert lp.launch(program, concurrent_engine) == (True, True, False)


def test_a_node_in_two_groups_runs_twice(engine):
    class Tally:
        def __init__(self):
            self._labels = []

        def add(self, label):
            self._labels.append(label)
            if len(self._labels) == 2:
                lp.stop(sorted(self._labels))

    program = lp.Program("twice")
    tally = program.add_node(lp.CourierNode(Tally), label="tally")
    node = lp.PyNode(lambda tally: tally.add(lp.get_node_context().label), tally)
    program.add_node(node, label="a")
    program.add_node(node, label="b")
    assert lp.launch(program, engine) == ["a-0", "b-0"]


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


def test_serial_finds_a_wait_that_nothing_can_end():
    for wait in (lp.wait_for_stop, lambda: lp.stop_event().wait()):
        program = lp.Program("waits")
        program.add_node(lp.PyNode(wait), label="waits")
        with pytest.raises(lp.NodeError, match="DeadlockError"):
            lp.launch(program, "serial")


def test_batched_handlers_take_launchpads_arguments():
    method = lp.batched_handler(8, 2, datetime.timedelta(milliseconds=50), True)(Answers().answer)
    assert method._options == (8, 0.05, True, 2)
    with pytest.raises(ValueError, match="max_parallelism"):
        lp.batched_handler(8, 0.5)


def test_reverb_nodes_take_launchpads_arguments(engine):
    def tables():
        from framework import replay

        fifo = replay.selectors.Fifo()
        return [replay.Table("t", fifo, replay.selectors.Fifo(), 10, replay.rate_limiters.MinSize(1))]

    program = lp.Program("reverb")
    server = program.add_node(lp.ReverbNode(tables, None, None), label="replay")
    program.add_node(lp.PyNode(lambda client: lp.stop(sorted(client.server_info())), server), label="main")
    assert lp.launch(program, engine) == ["t"]
    with pytest.raises(ValueError, match="checkpoint_time_delta_minutes"):
        lp.ReverbNode(tables, None, 0)


class FullDisk:
    """A checkpointer whose second try fails; the tries are counted in a file."""

    def __init__(self, path):
        self._path = path

    def save(self, tables, store):
        with open(self._path, "a") as file:
            file.write("x")
        if self._path.stat().st_size == 2:
            raise OSError("no space is left on the device")
        return "a checkpoint"

    def load(self, tables, store):
        return None


def test_a_checkpoint_of_a_reverb_node_that_fails_is_followed_by_others(tmp_path, caplog):
    tries = tmp_path / "tries"

    def tables():
        from framework import replay

        fifo = replay.selectors.Fifo()
        return [replay.Table("t", fifo, replay.selectors.Fifo(), 10, replay.rate_limiters.MinSize(1))]

    def main():
        deadline = time.monotonic() + PATIENCE
        while not (tries.exists() and tries.stat().st_size > 3) and time.monotonic() < deadline:
            lp.wait_for_stop(0.02)

    program = lp.Program("reverb")
    node = lp.ReverbNode(tables, lambda: FullDisk(tries), checkpoint_time_delta_minutes=0.05 / 60)
    program.add_node(node, label="replay")
    program.add_node(lp.PyNode(main), label="main")
    lp.launch(program, "threads")
    assert tries.stat().st_size > 3
    messages = [record.getMessage() for record in caplog.records if record.name == "launch"]
    assert len(messages) == 1  # none for the end of the program
    assert messages[0].startswith("replay-0: no checkpoint") and "no space is left" in messages[0]
