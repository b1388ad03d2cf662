"""What every engine must do: the same programs, the same answers, the same failures."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import tempfile
import threading
import time
from typing import Any

import numpy as np
import pytest

import launch as lp

# Nodes are not in the process that launches.
ELSEWHERE = ("processes", "ray", "launchpad_mt", "launchpad")
# Long enough for a loaded machine; a test that needs it has failed.
PATIENCE = 180.0


class Refused(Exception):
    """Carries more than a message, to see that it arrives whole."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason, code)
        self.reason = reason
        self.code = code


class Calculator:
    """A service: no work of its own."""

    def __init__(self, offset=0):
        self._offset = offset
        self._open, self._holding = threading.Event(), threading.Semaphore(0)
        self._barrier = threading.Barrier(20)
        self.built_in = lp.get_node_context()

    def add(self, a, b=0):
        return a + b + self._offset

    def __call__(self, x):
        return -x

    def where(self):
        return lp.get_node_context(), self.built_in

    def refuse(self):
        raise Refused("not today", 7)

    def roundtrip(self, value):
        return value

    def apply(self, client, x):
        return client.add(x)

    def meet(self):
        return self._barrier.wait(PATIENCE)

    def hold(self):
        self._holding.release()
        return self._open.wait(PATIENCE)

    def held(self, times):
        """Waits until `hold` was called as often."""
        for _ in range(times):
            assert self._holding.acquire(timeout=PATIENCE)

    def release(self):
        self._open.set()

    def wait(self, seconds):
        return lp.wait_for_stop(seconds)

    def _private(self):
        return "secret"


def calculator_program(fn, *args, **options):
    """A calculator and a function that gets a client of it and ``args``."""
    program = lp.Program("test")
    calculator = program.add_node(lp.CourierNode(Calculator, **options), label="calculator")
    program.add_node(lp.PyNode(fn, calculator, *args), label="main")
    return program


# Calls. All of them are made by the node of one program.


def arrays_and_nests_travel_whole(client):
    value = {
        "large": np.arange(300_000, dtype=np.float32).reshape(3, -1),
        "nest": [(1, "two"), {"three": 3.0}, None, b"bytes"],
    }
    back = client.roundtrip(value)
    np.testing.assert_array_equal(back["large"], value["large"])
    assert back["nest"] == value["nest"]
    back["large"][0, 0] = 5.0  # ours to change


def futures_of_answers_and_errors(client):
    futures = [client.futures.add(i, i) for i in range(200)]
    assert [future.result(PATIENCE) for future in futures] == [2 * i for i in range(200)]
    assert isinstance(client.futures.refuse().exception(PATIENCE), Refused)
    assert client.futures(3).result(PATIENCE) == -3


def only_public_methods(client):
    assert client(5) == -5
    with pytest.raises(AttributeError, match="public"):
        client._private()
    with pytest.raises(AttributeError, match=r"no method 'missing'.*add"):
        client.missing()


def errors_keep_their_type_and_show_where_they_come_from(client):
    with pytest.raises(Refused) as caught:
        client.refuse()
    assert (caught.value.reason, caught.value.code) == ("not today", 7)
    cause = "RemoteTraceback" if lp.get_node_context().engine in ELSEWHERE else "NoneType"
    assert type(caught.value.__cause__).__name__ == cause


def the_context_is_that_of_the_called_node(client):
    inside, built_in = client.where()
    assert inside == built_in
    assert (inside.label, inside.group, inside.index) == ("calculator-0", "calculator", 0)
    assert inside.program == "test"
    assert lp.get_node_context().label == "main-0" and lp.get_node_context().engine == inside.engine


def a_client_may_be_passed_on(client):
    assert client.apply(client, 5) == 5


@pytest.mark.real
def test_calls(engine):
    def main(client):
        for call in (
            arrays_and_nests_travel_whole,
            futures_of_answers_and_errors,
            only_public_methods,
            errors_keep_their_type_and_show_where_they_come_from,
            the_context_is_that_of_the_called_node,
            a_client_may_be_passed_on,
        ):
            call(client)
        lp.stop((os.getpid(), lp.get_node_context().engine))
        lp.stop("too late: the first result wins")

    pid, name = lp.launch(calculator_program(main), engine)
    assert name == engine and (pid != os.getpid()) == (engine in ELSEWHERE)


def test_timeouts_and_cancelled_futures(concurrent_engine):
    def main(calculator):
        unlimited = calculator.with_timeout(0)  # 0 is none; the node's own is 0.1 s.
        assert unlimited.add(1) == 1
        with pytest.raises(lp.CallTimeout):
            calculator.hold()
        with pytest.raises(lp.CallTimeout):
            unlimited.with_timeout(0.05).futures.hold().result(PATIENCE)
        held = unlimited.futures.hold()
        unlimited.held(3)
        cancelled = held.cancel()
        unlimited.release()
        done = unlimited.futures.hold()
        done.result(PATIENCE)
        lp.stop((cancelled, held.cancelled(), done.cancel()))

    options = {"call_timeout": datetime.timedelta(seconds=0.1)}
    program = calculator_program(main, courier_client_kwargs=options)
    assert lp.launch(program, concurrent_engine) == (True, True, False)


def test_a_timeout_includes_the_wait_for_room(concurrent_engine):
    def main(calculator):
        calculator.wait(0.0)  # The node has started.
        first = calculator.futures.wait(2.0)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            calculator.with_timeout(3.0).futures.wait(PATIENCE).result(PATIENCE)
        lp.stop((first.done(), time.monotonic() - began))

    program = calculator_program(main, courier_client_kwargs={"max_in_flight": 1})
    there_was_room, seconds = lp.launch(program, concurrent_engine)
    assert there_was_room
    assert seconds < 4.5


@pytest.mark.real
def test_a_job_makes_clients_whose_calls_do_not_hold_up_each_other(concurrent_engine):
    def main(client):
        lp.wait_for_stop()

    with lp.start(calculator_program(main), concurrent_engine) as job:
        client = job.client("calculator")
        assert client.add(1, 2) == 3
        futures = [client.futures.meet() for _ in range(20)]
        assert sorted(future.result(PATIENCE) for future in futures) == list(range(20))
        with pytest.raises(LookupError, match="calculator-0"):
            job.client("nobody")
        with pytest.raises(lp.LaunchError, match="serves no methods"):
            job.client("main")


# Handles.


@dataclasses.dataclass
class Peers:
    """What a node is told of the others, and itself."""

    others: dict[str, Any]
    itself: Any = None


def test_handles_anywhere_in_the_arguments(engine):
    def main(nested, peers, keyword, partial):
        assert peers.itself.itself is not None
        clients = [nested["a"][0], nested["a"][1][0], peers.others["b"], keyword, partial()]
        lp.stop([client.add(1) for client in clients])

    program = lp.Program("test")
    one = program.add_node(lp.CourierNode(Calculator, 10), label="one")
    two = program.add_node(lp.CourierNode(Calculator, offset=20), label="two")
    peers = Peers({"b": two})
    peers.itself = peers
    partial = functools.partial(lambda client: client, two)
    main = lp.PyNode(main, {"a": [one, (two,)]}, peers, keyword=one, partial=partial)
    program.add_node(main, label="main")
    assert lp.launch(program, engine) == [11, 21, 21, 11, 21]
    assert isinstance(peers.others["b"], lp.CourierHandle), "the script's own object is left alone"


class Asks:
    """Its constructor waits for another node, and so do its calls."""

    def __init__(self, other):
        self._other, self._answer = other, other.ping(0)

    def ping(self, n):
        return self._answer if n == 0 else self._other.ping(n - 1)


class Answers:
    """Refers back to a node whose constructor waits for this one."""

    def __init__(self, other):
        self._other = other

    def ping(self, n):
        return 7 if n == 0 else self._other.ping(n - 1)


@pytest.mark.parametrize("colocated", [False, True])
def test_constructors_may_wait_for_later_nodes_and_nodes_refer_to_each_other_in_a_circle(engine, colocated):
    program = lp.Program("test")
    first, second, third = lp.CourierNode(Asks), lp.CourierNode(Asks), lp.CourierNode(Answers)
    first.configure(second.create_handle())
    second.configure(third.create_handle())
    third.configure(first.create_handle())
    main = lp.PyNode(lambda node: lp.stop((node.ping(0), node.ping(7))), first.create_handle())
    if colocated:
        program.add_node(lp.MultiThreadingColocation([first, second, third, main]), label="all")
    else:
        for label, node in (("first", first), ("second", second), ("third", third), ("main", main)):
            program.add_node(node, label=label)
    assert lp.launch(program, engine) == (7, 7)


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


# Special nodes.


@pytest.mark.real
def test_colocations(engine):
    def main(clients):
        lp.stop([client.add(1) for client in clients])

    program = lp.Program("test")
    nodes = [lp.CourierNode(Calculator, offset) for offset in (10, 20, 30, 40)]
    handles = [node.create_handle() for node in nodes]
    program.add_node(lp.MultiThreadingColocation(nodes[:2]), label="threads")
    program.add_node(lp.MultiProcessingColocation(nodes[2:]), label="processes")
    program.add_node(lp.MultiThreadingColocation([lp.PyNode(main, handles)]), label="main")
    assert lp.launch(program, engine) == [11, 21, 31, 41]


def test_cacher_shares_answers_until_they_are_old(engine):
    class Source:
        def __init__(self):
            self.asked = 0

        def get(self, name):
            self.asked += 1
            return name, self.asked

        def fail(self):
            self.asked += 1
            raise ValueError(self.asked)

        __call__ = get

    def main(cached, brief):
        answers = [cached.get("a"), cached.get("a"), cached("b")]
        first = brief.get("c")
        while (again := brief.get("c")) == first and not lp.stop_event().wait(0.02):
            continue
        failures = {str(cached.futures.fail().exception(PATIENCE)) for _ in range(2)}
        lp.stop([*answers, again[1] - first[1], len(failures)])

    program = lp.Program("test")
    source = program.add_node(lp.CourierNode(Source), label="source")
    cached = program.add_node(lp.CacherNode(source, refresh_interval=3600.0), label="cacher")
    brief = program.add_node(lp.CacherNode(source, 0.2), label="brief")
    program.add_node(lp.PyNode(main, cached, brief), label="main")
    fresh = engine == "serial"
    expected = [("a", 1), ("a", 2 if fresh else 1), ("b", 3 if fresh else 2), 1, 2]
    assert lp.launch(program, engine) == expected


class Inference:
    def __init__(self):
        self.sizes = []

    @lp.batched_handler(batch_size=4, timeout=3600.0, pad_batch=False)
    def act(self, observation, *, scale):
        self.sizes.append(len(scale))
        if (scale < 0).any():
            raise Refused("negative", 0)
        return {"action": observation["x"].sum(axis=-1) * scale, "size": np.full(len(scale), len(scale))}

    @lp.batched_handler(batch_size=4, timeout=0.01, pad_batch=True)
    def padded(self, x):
        return np.stack([x, np.full(len(x), len(x))], axis=1)


def test_batched_handler_gathers_calls(engine):
    def main(inference, size):
        calls = [inference.futures.act({"x": np.full(3, i)}, scale=2) for i in range(8)]
        answers = [call.result(PATIENCE) for call in calls]
        assert [answer["action"] for answer in answers] == [6 * i for i in range(8)]
        assert {int(answer["size"]) for answer in answers} == {size}
        assert inference.padded(7).tolist() == [7, 4]
        failing = [inference.futures.act({"x": np.zeros(3)}, scale=-1) for _ in range(4)]
        assert all(isinstance(call.exception(PATIENCE), Refused) for call in failing)
        lp.stop("ok")

    program = lp.Program("test")
    inference = program.add_node(lp.CourierNode(Inference), label="inference")
    program.add_node(lp.PyNode(main, inference, 1 if engine == "serial" else 4), label="main")
    assert lp.launch(program, engine) == "ok"


def tables():
    from framework import replay

    fifo = replay.selectors.Fifo()
    return [replay.Table("t", fifo, replay.selectors.Fifo(), 10, replay.rate_limiters.MinSize(1))]


def test_reverb_nodes_take_launchpads_arguments(engine):
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


# Programs as a whole.


def test_two_programs_at_once_do_not_meet(concurrent_engine):
    def main(client):
        lp.wait_for_stop()

    programs = [calculator_program(main) for _ in range(2)]
    with lp.start(programs[0], concurrent_engine) as one, lp.start(programs[1], concurrent_engine) as two:
        assert one.client("calculator").add(1) == two.client("calculator").add(1)
        one.stop("one")
        assert one.wait(timeout=PATIENCE) == "one"
        assert two.client("calculator").add(2) == 2
        assert not two.over


def test_nothing_stays_behind(engine, monkeypatch):
    def main(client):
        lp.stop(client.add(1))

    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        with lp.start(calculator_program(main), engine) as job:
            assert job.wait() == 1
        assert os.listdir(folder) == []
    deadline = time.monotonic() + PATIENCE
    while (left := [t for t in set(threading.enumerate()) - before if not t.daemon]) and left:
        left[0].join(deadline - time.monotonic())
    assert not left
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if job.status()["job"] in name]
