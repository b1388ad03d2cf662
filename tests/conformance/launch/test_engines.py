"""What every engine must do: the same programs, the same answers, the same failures."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import time

import numpy as np
import pytest

import launch as lp

LAUNCHPAD = ("launchpad_mt", "launchpad")
# Nodes are not in the process that launches.
ELSEWHERE = ("processes", "ray", *LAUNCHPAD)
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
        self.pid = os.getpid()
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

    def not_a_method(self):
        return None

    def _private(self):
        return "secret"


def start(program, engine, **options):
    return lp.start(program, engine, **options)


def launch(program, engine, **options):
    return lp.launch(program, engine, **options)


def calculator_program(fn, *args):
    """A calculator and a function that gets a client of it and ``args``."""
    program = lp.Program("test")
    calculator = program.add_node(lp.CourierNode(Calculator), label="calculator")
    program.add_node(lp.PyNode(fn, calculator, *args), label="main")
    return program


# Calls.


def test_first_result_wins(engine):
    def main(client):
        lp.stop(client.add(40, b=2))
        lp.stop("too late")

    assert launch(calculator_program(main), engine) == 42


def test_without_a_result_launch_returns_none(engine):
    assert launch(calculator_program(lambda client: client.add(1)), engine) is None


def test_arrays_and_nests_travel_whole(engine):
    def main(client):
        value = {
            "large": np.arange(300_000, dtype=np.float32).reshape(3, -1),
            "small": np.arange(3),
            "nest": [(1, "two"), {"three": 3.0}, None, b"bytes"],
        }
        back = client.roundtrip(value)
        np.testing.assert_array_equal(back["large"], value["large"])
        np.testing.assert_array_equal(back["small"], value["small"])
        assert back["nest"] == value["nest"]
        back["large"][0, 0] = 5.0  # ours to change
        lp.stop("ok")

    assert launch(calculator_program(main), engine) == "ok"


def test_futures(engine):
    def main(client):
        futures = [client.futures.add(i, i) for i in range(200)]
        assert [future.result(PATIENCE) for future in futures] == [2 * i for i in range(200)]
        failing = client.futures.refuse()
        assert isinstance(failing.exception(PATIENCE), Refused)
        assert client.futures(3).result(PATIENCE) == -3
        lp.stop("ok")

    assert launch(calculator_program(main), engine) == "ok"


def test_call_operator_and_only_public_methods(engine):
    def main(client):
        assert client(5) == -5
        with pytest.raises(AttributeError, match="public"):
            client._private()
        with pytest.raises(AttributeError, match=r"no method 'missing'.*add"):
            client.missing()
        lp.stop("ok")

    assert launch(calculator_program(main), engine) == "ok"


def test_errors_keep_their_type_and_show_where_they_come_from(engine):
    def main(client):
        with pytest.raises(Refused) as caught:
            client.refuse()
        assert (caught.value.reason, caught.value.code) == ("not today", 7)
        lp.stop(type(caught.value.__cause__).__name__)

    result = launch(calculator_program(main), engine)
    assert result == ("RemoteTraceback" if engine in ELSEWHERE else "NoneType")


def test_context_is_that_of_the_called_node(engine):
    def main(client):
        mine = lp.get_node_context()
        inside, built_in = client.where()
        assert inside == built_in
        lp.stop((mine.label, inside.label, inside.group, inside.index, inside.program, inside.engine))

    expected = ("main-0", "calculator-0", "calculator", 0, "test", engine)
    assert launch(calculator_program(main), engine) == expected


def test_handles_anywhere_in_the_arguments(engine):
    def main(nested, keyword, partial):
        clients = [nested["a"][0], nested["a"][1][0], keyword, partial()]
        lp.stop([client.add(1) for client in clients])

    program = lp.Program("test")
    one = program.add_node(lp.CourierNode(Calculator, 10), label="one")
    two = program.add_node(lp.CourierNode(Calculator, offset=20), label="two")
    program.add_node(
        lp.PyNode(main, {"a": [one, (two,)]}, keyword=one, partial=functools.partial(lambda c: c, two)),
        label="main",
    )
    assert launch(program, engine) == [11, 21, 11, 21]


def test_clients_may_be_passed_on(engine):
    class Forwarder:
        def forward(self, client, x):
            return client.add(x)

    def main(calculator, forwarder):
        lp.stop(forwarder.forward(calculator, 5))

    program = lp.Program("test")
    calculator = program.add_node(lp.CourierNode(Calculator), label="calculator")
    forwarder = program.add_node(lp.CourierNode(Forwarder), label="forwarder")
    program.add_node(lp.PyNode(main, calculator, forwarder), label="main")
    assert launch(program, engine) == 5


def test_nodes_may_refer_to_each_other_in_a_circle(engine):
    class Ping:
        def __init__(self, other):
            self._other = other

        def ping(self, n):
            return n if n == 0 else self._other.ping(n - 1)

    def main(client):
        lp.stop(client.ping(4))

    program = lp.Program("test")
    one, two = lp.CourierNode(Ping), lp.CourierNode(Ping)
    first, second = program.add_node(one, label="one"), program.add_node(two, label="two")
    one.configure(second)
    two.configure(first)
    program.add_node(lp.PyNode(main, first), label="main")
    assert launch(program, engine) == 0


def test_processes_are_where_they_should_be(engine):
    def main(client):
        lp.stop((client.where()[0].index, os.getpid(), client.roundtrip(0)))

    _, pid, _ = launch(calculator_program(main), engine)
    assert (pid != os.getpid()) == (engine in ELSEWHERE)


def test_job_client_reaches_services(concurrent_engine):
    def main(client):
        lp.wait_for_stop()

    with start(calculator_program(main), concurrent_engine) as job:
        client = job.client("calculator")
        assert client.add(1, 2) == 3
        assert client.futures.add(1, 2).result(PATIENCE) == 3
        with pytest.raises(LookupError, match="calculator-0"):
            job.client("nobody")
        with pytest.raises(lp.LaunchError, match="serves no methods"):
            job.client("main")


def test_call_timeout(concurrent_engine):
    class Slow:
        def __init__(self):
            self._release = threading.Event()

        def wait(self):
            return self._release.wait(PATIENCE)

        def release(self):
            self._release.set()

    def main(slow):
        for call in (slow.with_timeout(0.05).wait, slow.with_timeout(0.05).futures.wait):
            with pytest.raises(TimeoutError):
                answer = call()
                answer.result(PATIENCE)
        slow.release()
        assert slow.wait() is True
        lp.stop("ok")

    program = lp.Program("test")
    slow = program.add_node(lp.CourierNode(Slow), label="slow")
    program.add_node(lp.PyNode(main, slow), label="main")
    assert launch(program, concurrent_engine) == "ok"


def test_a_timeout_includes_the_wait_for_room(concurrent_engine):
    class Slow:
        def wait(self, seconds):
            return lp.wait_for_stop(seconds)

    def main(slow):
        slow.wait(0.0)  # The node has started.
        first = slow.futures.wait(2.0)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            slow.with_timeout(3.0).futures.wait(PATIENCE).result(PATIENCE)
        lp.stop((first.done(), time.monotonic() - began))

    program = lp.Program("test")
    options = {"max_in_flight": 1}
    slow = program.add_node(lp.CourierNode(Slow, courier_client_kwargs=options), label="slow")
    program.add_node(lp.PyNode(main, slow), label="main")
    there_was_room, seconds = launch(program, concurrent_engine)
    assert there_was_room
    assert seconds < 4.5


def test_calls_that_block_do_not_hold_up_others(concurrent_engine):
    class Meeting:
        def __init__(self):
            self._barrier = threading.Barrier(20)

        def meet(self):
            return self._barrier.wait(PATIENCE)

    def main(meeting):
        futures = [meeting.futures.meet() for _ in range(20)]
        lp.stop(sorted(future.result(PATIENCE) for future in futures))

    program = lp.Program("test")
    meeting = program.add_node(lp.CourierNode(Meeting), label="meeting")
    program.add_node(lp.PyNode(main, meeting), label="main")
    assert launch(program, concurrent_engine) == list(range(20))


# Special nodes.


def test_colocations(engine):
    def main(clients):
        lp.stop([client.add(1) for client in clients])

    program = lp.Program("test")
    nodes = [lp.CourierNode(Calculator, offset) for offset in (10, 20, 30, 40)]
    handles = [node.create_handle() for node in nodes]
    program.add_node(lp.MultiThreadingColocation(nodes[:2]), label="threads")
    program.add_node(lp.MultiProcessingColocation(nodes[2:]), label="processes")
    program.add_node(lp.MultiThreadingColocation([lp.PyNode(main, handles)]), label="main")
    assert launch(program, engine) == [11, 21, 31, 41]


def test_cacher_shares_answers(engine):
    class Source:
        def __init__(self):
            self.asked = 0

        def get(self, name):
            self.asked += 1
            return name, self.asked

    def main(cached):
        lp.stop([cached.get("a"), cached.get("a"), cached.get("b")])

    program = lp.Program("test")
    source = program.add_node(lp.CourierNode(Source), label="source")
    cached = program.add_node(lp.CacherNode(source, refresh_interval=3600.0), label="cacher")
    program.add_node(lp.PyNode(main, cached), label="main")
    fresh = engine == "serial"
    assert launch(program, engine) == [("a", 1), ("a", 2 if fresh else 1), ("b", 3 if fresh else 2)]


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
    assert launch(program, engine) == "ok"


def test_two_programs_at_once_do_not_meet(concurrent_engine):
    def main(client):
        lp.wait_for_stop()

    programs = [calculator_program(main) for _ in range(2)]
    with start(programs[0], concurrent_engine) as one, start(programs[1], concurrent_engine) as two:
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
        with start(calculator_program(main), engine) as job:
            assert job.wait() == 1
        assert os.listdir(folder) == []
    deadline = time.monotonic() + PATIENCE
    while (left := [t for t in set(threading.enumerate()) - before if not t.daemon]) and left:
        left[0].join(deadline - time.monotonic())
    assert not left
    if os.path.isdir("/dev/shm"):
        assert not [name for name in os.listdir("/dev/shm") if job.status()["job"] in name]
