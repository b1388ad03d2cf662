"""Programs, nodes, and handles: what is refused before anything runs. Engines in one process: their rules."""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
import threading
from collections import namedtuple

import numpy as np
import pytest

import launch as lp
from launch.batching import BatchedMethod, BatchOptions
from launch.engines.supervised.runtime import RemoteRuntime
from launch.errors import describe
from launch.handles import Handle, replace_handles

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(lp.__file__)))
PATIENCE = 30.0


class Nothing:
    pass


def nothing():
    return None


# Programs.


def test_groups_collect_nodes_in_order():
    program = lp.Program("test")
    one, two, three = (lp.PyNode(nothing) for _ in range(3))
    with program.group("a"):
        assert program.current_group == "a"
        program.add_node(one)
        program.add_node(two, label="a")
    program.add_node(three, label="b")
    with program.group("a"):  # a group may be opened again
        program.add_node(four := lp.PyNode(nothing))
    assert program.groups == {"a": [one, two, four], "b": [three]}
    assert program.get_all_nodes() == [one, two, three, four]
    assert [member[:2] for member in program.members()] == [("a", 0), ("a", 1), ("b", 0), ("a", 2)]


def add_in_group(program, group, label):
    with program.group(group):
        program.add_node(lp.PyNode(nothing), label=label)


def nested_group(program):
    with program.group("a"), program.group("b"):
        pass


def added_twice(program):
    node = lp.CourierNode(Nothing)
    for _ in range(2):
        program.add_node(node, label="a")


def inner_node_added_too(program):
    node = lp.PyNode(nothing)
    program.add_node(lp.MultiThreadingColocation([node]), label="a")
    program.add_node(node, label="a")


REFUSED = {
    "no label": (lambda program: program.add_node(lp.PyNode(nothing)), "label="),
    "empty label": (lambda program: program.add_node(lp.PyNode(nothing), label=""), "label"),
    "strange label": (lambda program: program.add_node(lp.PyNode(nothing), label="../x"), "letters"),
    "other label": (lambda program: add_in_group(program, "a", "b"), "'a' is open"),
    "nested group": (nested_group, "nested"),
    "added twice": (added_twice, "already"),
    "inner node added too": (inner_node_added_too, "already"),
    "nested colocation": (
        lambda _: lp.MultiThreadingColocation([lp.MultiProcessingColocation([lp.PyNode(nothing)])]),
        "nested",
    ),
}


@pytest.mark.parametrize("build, message", REFUSED.values(), ids=REFUSED.keys())
def test_programs_that_make_no_sense(build, message):
    with pytest.raises(ValueError, match=message):
        build(lp.Program("test"))


def courier(**options):
    return lambda: lp.CourierNode(Nothing, **options)


NODES = {
    "no function": (lambda: lp.PyNode(), TypeError, r"PyNode\(function\): got None"),
    "not callable": (lambda: lp.PyNode(5), TypeError, "expected a callable"),
    "unknown server option": (courier(courier_kwargs={"port": 1}), ValueError, r"\['port'\].*pool_size"),
    "unknown client option": (courier(courier_client_kwargs={"compress": True}), ValueError, "call_timeout"),
    "no threads": (courier(courier_kwargs={"thread_pool_size": 0}), ValueError, "thread_pool_size: got 0"),
    "no futures": (courier(courier_client_kwargs={"max_in_flight": 0}), ValueError, "max_in_flight: got 0"),
    "cacher of no handle": (lambda: lp.CacherNode(Nothing(), 1.0), TypeError, "handle"),
    "negative interval": (lambda: lp.CacherNode(lp.PyNode(nothing).create_handle(), -1), ValueError, ">= 0"),
    "empty colocation": (lambda: lp.MultiThreadingColocation([]), TypeError, "list of nodes"),
    "empty batch": (lambda: lp.batched_handler(batch_size=0), ValueError, "batch_size"),
    "negative timeout": (lambda: lp.batched_handler(batch_size=1, timeout=-1), ValueError, "timeout"),
}


@pytest.mark.parametrize("make, error, message", NODES.values(), ids=NODES.keys())
def test_nodes_that_make_no_sense(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_node_takes_its_first_argument_by_launchpads_name():
    assert lp.PyNode(function=str, object=1).call() == "1"
    assert lp.PyClassNode(constructor=int).call() == 0


OPTIONS = {
    "engine": ({"engine": "steam"}, "serial"),
    "engine, nearly": ({"engine": "proceses"}, "Did you mean 'processes'?"),
    "field of resources": ({"resources": {"main": {"num_gpu": 1}}}, r"got \['num_gpu'\], .*mean 'num_gpus'?"),
    "group of restarts": ({"restarts": {"nobody": 1}}, "nobody"),
    "number of restarts": ({"restarts": {"main": -1}}, ">= 0"),
    "group of resources": ({"resources": {"nobody": {}}}, "nobody"),
    "env of resources": ({"resources": {"main": {"env": "A=1"}}}, "env: got 'A=1'"),
    "custom of resources": ({"resources": {"main": {"custom": 5}}}, "custom: got 5"),
    "stop_timeout": ({"stop_timeout": -1.0}, "stop_timeout"),
    "heartbeat_timeout": ({"heartbeat_timeout": 0.0}, "heartbeat_timeout"),
}


@pytest.mark.parametrize("options, message", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_that_make_no_sense(options, message):
    program = lp.Program("test")
    program.add_node(lp.PyNode(nothing), label="main")
    with pytest.raises(ValueError, match=message):
        lp.launch(program, **options)


def test_empty_program():
    with pytest.raises(ValueError, match="no nodes"):
        lp.launch(lp.Program("test"))


def test_settings_that_are_added_to_a_program_are_those_of_no_other():
    first, second = lp.Program("first"), lp.Program("second")
    for name in ("resources", "strategies", "min_nodes", "stop_timeouts"):
        getattr(first, name)["main"] = {}
        assert not getattr(second, name), name


# Handles.


def test_handle_is_not_the_node():
    handle = lp.CourierNode(Nothing).create_handle()
    with pytest.raises(AttributeError, match=r"handle is not the node.*dereference\(\)\.act"):
        handle.act  # noqa: B018
    with pytest.raises(RuntimeError, match="outside of a running program"):
        handle.dereference()


def test_nests_without_handles_are_left_alone():
    Pair = namedtuple("Pair", "one two")
    for value in ([1, [2]], (1,), {"a": {1, 2}}, Pair(1, [2]), np.arange(3)):
        assert replace_handles(value, Handle.dereference) is value


def test_handle_of_a_node_that_was_not_added():
    stranger = lp.CourierNode(Nothing).create_handle()
    program = lp.Program("test")
    program.add_node(lp.PyNode(print, stranger), label="main")
    with pytest.raises(lp.NodeError, match="added"):
        lp.launch(program, "threads")


class Part:
    def __init__(self, number):
        self.number = number

    def get(self):
        return self.number


def connect_all(handles):
    return [handle.dereference() for handle in handles]


def main_of_group(parts):
    lp.stop([part.get() for part in parts])


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_group_of_handles_becomes_one_client(engine):
    program = lp.Program("test")
    handles = [program.add_node(lp.CourierNode(Part, number), label="part") for number in range(3)]
    group = lp.HandleGroup(handles, connect_all)
    main = lp.PyNode(main_of_group, group)
    program.add_node(main, label="main")
    assert main.handles() == list(group.members()) == handles and handles[0].members() == (handles[0],)
    assert lp.launch(program, engine) == [0, 1, 2]


# Outside of a program.


def test_outside_of_a_program():
    assert not lp.stop_event().is_set()
    lp.register_stop_handler(nothing)
    lp.unregister_stop_handler(nothing)
    for call in (lp.stop, lp.get_node_context, lp.make_program_stopper(), lp.wait_for_stop):
        with pytest.raises(lp.LaunchError):
            call()


@pytest.mark.parametrize("place", ["", "Game.step (game.py, line 3)"])
def test_an_error_shows_its_innermost_frame_if_none_is_the_users(place):
    """The function of the user may have run in another process."""
    with pytest.raises(lp.LaunchError) as caught:
        lp.wait_for_stop()
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # Past this file.
    error.__cause__ = lp.RemoteTraceback("1", "", place, "process")
    assert error.__traceback__.tb_next is not None
    told = describe(error)
    assert told["place"] == place and told["frames"].count("File ") == 1
    assert told["traceback"].count("File ") > 1
    assert str(lp.NodeError("a-0", **told)).startswith(
        f"{place and place + ': '}node 'a-0' failed with Launch"
    )


# The engines of one process.


def test_a_stop_handler_that_exits_ends_neither_the_stop_nor_the_others():
    runtime, called = RemoteRuntime("job", {}, None, nothing), []
    for handler in (sys.exit, lambda: called.append(1)):
        runtime.add_stop_handler(handler)
    with pytest.raises(lp.LaunchError, match=r"stop handler .*exit"):
        runtime.begin_stop()
    assert called


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_circle_of_constructors_is_an_error(engine):
    class Eager:
        def __init__(self, other):
            other.hello()

        def hello(self):
            return None

    program = lp.Program("test")
    one, two = lp.CourierNode(Eager), lp.CourierNode(Eager)
    first, second = program.add_node(one, label="one"), program.add_node(two, label="two")
    one.configure(second)
    two.configure(first)
    with pytest.raises(lp.NodeError, match=r"one-0 -> two-0 -> one-0"):
        lp.launch(program, engine)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_the_other_nodes_are_closed_after_one_that_exits(engine):
    closed = []

    class First:
        def close(self):
            closed.append(self)

    class Exits:
        def close(self):
            sys.exit(0)

    program = lp.Program("test")
    program.add_node(lp.CourierNode(First), label="first")
    program.add_node(lp.CourierNode(Exits), label="exits")
    program.add_node(lp.PyNode(lp.stop), label="main")
    with pytest.raises(lp.NodeError, match="'exits-0' failed with SystemExit"):
        lp.launch(program, engine)
    assert closed


# The engine of threads.


def test_thread_that_does_not_end_is_reported_with_its_stack():
    release = threading.Event()

    def stubborn():
        lp.stop()
        release.wait(PATIENCE)

    program = lp.Program("test")
    program.add_node(lp.PyNode(stubborn), label="stubborn")
    try:
        with pytest.raises(lp.LaunchError, match=r"stubborn-0(?s:.*)release\.wait"):
            lp.launch(program, "threads", stop_timeout=0.1)
    finally:
        release.set()


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize("name", ["producer_consumer", "parameter_server"])
def test_examples(name, engine):
    spec = importlib.util.spec_from_file_location(name, os.path.join(ROOT, "examples", f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        result = lp.launch(module.make_program(), engine)
    finally:
        del sys.modules[name]
    if name == "producer_consumer":
        expected = sum(1000 * producer + i for producer in range(3) for i in range(30))
        assert result == {"total": expected, "count": 90}
    else:
        np.testing.assert_allclose(result, module.TRUE_WEIGHTS, atol=1e-3)


def test_batched_methods_that_are_put_into_a_class():
    class Server:
        def double(self, x):
            """Doubles."""
            return 2 * x

        def negate(self, x):
            return -x

    Server.double = lp.batched_handler(batch_size=1)(Server.double)
    Server.negate = lp.batched_handler(batch_size=1)(Server.negate)
    server = Server()
    assert server.double(np.array(3)) == 6 and server.negate(np.array(3)) == -3
    assert Server.double.__doc__ == "Doubles."


class Sums:
    """Replaces one of its methods by a batched one, with a size that only the constructor knows."""

    def __init__(self, batch_size):
        self.compute = lp.batched_handler(batch_size=batch_size, timeout=PATIENCE)(self.compute)

    def compute(self, values):
        return values.sum(axis=1) + 100 * len(values)


def test_a_batch_for_which_there_is_no_thread_holds_up_no_other(monkeypatch):
    start, failed = threading.Thread.start, []

    def fail_once(thread):
        if not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    double = BatchedMethod(lambda x: 2 * x, "double", BatchOptions(batch_size=2, timeout=0.0))
    with pytest.raises(RuntimeError, match="new thread"):
        double(1)
    assert double.submit((1,), {}).result(PATIENCE) == 2


def test_a_batch_is_over_when_it_was_late_and_has_no_calls_that_were_canceled():
    sizes = []
    late, full = (
        BatchedMethod(lambda x: sizes.append(len(x)) or 2 * x, "double", BatchOptions(3, seconds))
        for seconds in (0.0, 3600.0)
    )
    assert [late.submit((x,), {}).result(PATIENCE) for x in (1, 2)] == [2, 4]
    calls = [full.submit((x,), {}) for x in (1, 2)]
    assert calls[0].cancel() and full.submit((3,), {}).result(PATIENCE) == 6
    assert sizes == [1, 1, 2] and calls[1].result(PATIENCE) == 4


def test_batched_method_made_in_the_constructor():
    sums = Sums(2)
    answers = [sums.compute.submit(([x, x + 1],), {}) for x in range(4)]
    assert [int(answer.result(PATIENCE)) for answer in answers] == [201, 203, 205, 207]


def test_batched_handlers_take_launchpads_arguments():
    method = lp.batched_handler(8, 2, datetime.timedelta(milliseconds=50), True)(Part(0).get)
    assert method._options == (8, 0.05, True, 2)
    with pytest.raises(ValueError, match="max_parallelism"):
        lp.batched_handler(8, 0.5)


def test_a_batched_method_that_calls_that_of_its_base_class():
    class Base:
        @lp.batched_handler(batch_size=1)
        def act(self, x):
            return x + 1

    class Derived(Base):
        @lp.batched_handler(batch_size=1)
        def act(self, x):
            return 2 * super().act(x[0])[None]

    assert Derived().act.submit((np.array(3),), {}).result(PATIENCE) == 8
    assert Base().act(np.array(3)) == 4


def test_batched_methods_take_lists_of_numbers_by_keyword():
    class Server:
        @lp.batched_handler(batch_size=2)
        def double(self, x, *, y):
            return 2 * x + y

    method = Server().double
    calls = [method.submit(([1, 2, 3],), {"y": [i, i, i]}) for i in (0, 1)]
    assert [call.result(PATIENCE).tolist() for call in calls] == [[2, 4, 6], [3, 5, 7]]
