"""The operators of flows, with objects in this process."""

from __future__ import annotations

import collections
import functools
import itertools
import queue
import sys
import threading
import time
from concurrent.futures import Future

import pytest
from background import Background
from hypothesis import given
from hypothesis import strategies as st

import launch
from framework.flow import (
    Flow,
    Host,
    LocalNode,
    Node,
    NotReady,
    Par,
    StepError,
    alternate,
    concurrent,
)


class Worker:
    """Counts its items and remembers the newest variables."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.made = 0
        self.version = 0

    def sample(self) -> tuple[str, int, int]:
        self.made += 1
        return self.name, self.made, self.version

    def set_version(self, version: int) -> None:
        self.version = version

    def double(self, item: tuple[str, int, int]) -> int:
        return 2 * item[1]


class Client:
    """The client of a `Host` in this process. Calls whose numbers are in `unsent` are not sent."""

    def __init__(self, host: Host, unsent: tuple[int, ...] = ()) -> None:
        self.futures, self._host, self._unsent, self._made = self, host, unsent, 0

    def call(self, function, args) -> Future:
        self._made += 1
        if self._made - 1 in self._unsent:
            raise TimeoutError("not sent")
        future: Future = Future()
        try:
            future.set_result(self._host.call(function, args))
        except Exception as error:
            future.set_exception(error)
        return future


def in_a_thread(function):
    """The result of `function`, or its exception."""
    call = Background(function)
    return call.exception(10) or call.result()


def nodes(n: int = 2) -> list[LocalNode]:
    return [LocalNode(Worker(chr(ord("a") + i)), f"worker-{i}") for i in range(n)]


def test_sync_is_a_round_of_all_nodes_in_order():
    plan = Par(nodes(3), Worker.sample).sync()
    assert next(plan) == [("a", 1, 0), ("b", 1, 0), ("c", 1, 0)]
    assert next(plan) == [("a", 2, 0), ("b", 2, 0), ("c", 2, 0)]


def test_par_map_runs_in_the_node():
    assert next(Par(nodes(2), Worker.sample).map(Worker.double).sync()) == [2, 2]


def test_nothing_runs_before_an_item_is_asked_for():
    workers = nodes(1)
    plan = Par(workers, Worker.sample).unordered()
    assert workers[0].call(lambda worker: worker.made).result() == 0
    next(plan)
    assert workers[0].call(lambda worker: worker.made).result() == 1


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_staleness_is_the_depth(depth):
    workers = nodes(2)
    sent: collections.Counter[str] = collections.Counter()
    ages = []
    for node, (_, _, version) in Par(workers, Worker.sample).unordered(depth, source=True):
        ages.append(sent[node.name] - version)
        sent[node.name] += 1
        node.call(Worker.set_version, sent[node.name]).result()
        if len(ages) == 120:
            break
    assert ages[: 2 * depth] == [age for age in range(depth) for _ in range(2)]
    assert set(ages[2 * depth :]) == {depth}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no luck"), "ValueError: no luck"),
        (SystemExit(), r"RuntimeError: SystemExit: got sys\.exit"),
    ],
    ids=["error", "exit"],
)
def test_a_failed_step_names_its_node_and_the_flow_goes_on(error, told):
    def fail_second(worker: Worker) -> int:
        worker.made += 1
        if worker.name == "b" and worker.made == 2:
            raise error
        return worker.made

    plan = Par(nodes(2), fail_second).unordered()
    assert [next(plan), next(plan), next(plan)] == [1, 1, 2]
    with pytest.raises(StepError, match=rf"worker-1: .*fail_second: {told}") as caught:
        next(plan)
    assert caught.value.node == "worker-1"
    assert error in (caught.value.__cause__, caught.value.__cause__.__cause__)
    assert [next(plan), next(plan)] == [3, 3]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_call_that_cannot_be_sent_does_not_end_the_flow(depth):
    node = Node(Client(Host(Worker), unsent=(0, 4)))
    plan = Par([node], Worker.sample).unordered(depth).map(lambda item: item[1])
    found = [in_a_thread(lambda: next(plan)) for _ in range(6)]
    assert [each for each in found if isinstance(each, int)] == [1, 2, 3, 4]
    assert [str(each) for each in found if not isinstance(each, int)] == ["not sent"] * 2


def test_operators():
    assert list(Flow.of(range(4)).map(lambda x: x * x)) == [0, 1, 4, 9]
    assert list(Flow.of(range(6)).filter(lambda x: x % 2 == 0)) == [0, 2, 4]
    assert list(Flow.of([[1, 2], [], [3]]).flatten()) == [1, 2, 3]
    assert list(Flow.of(range(7)).batch(3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(Flow.of(range(3)).combine(lambda x: [x] * x)) == [1, 2, 2]

    def sums(items):
        total = 0
        for item in items:
            total += item
            yield total

    assert list(Flow.of(range(5)).transform(sums)) == [0, 1, 3, 6, 10]


def test_an_error_in_a_step_does_not_end_the_flow():
    plan = Flow.of(range(4)).map(lambda x: 1 // x).batch(2)
    with pytest.raises(ZeroDivisionError):
        next(plan)
    assert next(plan) == [1, 0]  # Of 1 and 2: the item that failed is gone.


def test_an_error_does_not_end_a_generator_for_good():
    plan = Flow.of(range(4)).map(lambda x: 1 // x).transform(lambda items: (item + 1 for item in items))
    with pytest.raises(ZeroDivisionError):
        next(plan)
    assert list(plan) == [2, 1, 1]
    with pytest.raises(StopIteration):
        next(plan)


@pytest.mark.parametrize("make_node", [LocalNode, lambda obj: Node(Client(Host(lambda: obj)))])
def test_a_step_whose_own_call_is_lost_is_an_error_and_not_repeated(make_node):
    calls = []

    def step(obj):
        calls.append(obj)
        raise launch.CallLost("another node was restarted")

    for take in (Par([make_node("object")], step).sync(), Par([make_node("object")], step).unordered()):
        with pytest.raises(StepError, match="CallLost: another node was restarted"):
            next(take)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("operate", "expected"),
    [
        (lambda flow: flow.batch(2), [[0, 1], [2, 3]]),
        (lambda flow: flow.filter(lambda x: x % 2 == 1), [1, 3]),
        (lambda flow: flow.combine(lambda x: [x] * (x % 2)), [1, 3]),
    ],
    ids=["batch", "filter", "combine"],
)
def test_several_items_for_one_request_wait_for_other_flows(operate, expected):
    """The flow gives one item after each of the other flow's."""
    left = [1]
    limited = Flow.of((left.pop(), i)[1] for i in range(4))
    limited.ready = lambda: bool(left)
    alone = operate(limited)
    with pytest.raises(NotReady, match="none of 1 flows is ready"):
        next(concurrent(alone, threads=False))
    plan = concurrent(alone, Flow.of(iter(lambda: left.append(1), 0)), threads=False)
    found = filter(lambda item: item is not None, plan)
    assert [next(found) for _ in expected] == expected


def test_a_transformation_that_takes_items_at_once_waits_for_a_request():
    taken = []
    plan = Flow.of(range(3)).map(lambda item: taken.append(item) or item)
    plan = plan.transform(lambda items: itertools.chain([next(items)], items))
    assert taken == []
    assert next(plan) == 0 and taken == [0]
    assert list(plan) == [1, 2]


@pytest.mark.parametrize("threads", [None, True], ids=["alone", "in a thread"])
def test_several_items_for_one_request_wait_where_nothing_takes_turns(threads):
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    plan = Flow(items.get, lambda: not items.empty()).batch(3)
    if threads:
        plan = concurrent(plan, threads=True)
    items.put(0)
    timers = [threading.Timer(0.05 * i, items.put, (i,)) for i in (1, 2)]
    for timer in timers:
        timer.start()
    assert in_a_thread(lambda: next(plan)) == [0, 1, 2]


def test_alternate_asks_whether_a_flow_is_ready_after_the_end_of_another():
    left = [0, 1]
    limited = Flow(lambda: left.pop(0), lambda: bool(left))
    plan = concurrent(alternate(limited, Flow.of("a")), threads=False)
    assert [next(plan), next(plan), next(plan)] == [0, "a", 1]
    with pytest.raises(NotReady):
        next(plan)
    left.append(2)
    assert next(plan) == 2


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 40))
def test_alternate_takes_exactly_its_weights(weights, count):
    flows = [Flow.of(iter(lambda i=i: i, None)) for i in range(len(weights))]
    plan = alternate(*flows, weights=weights)
    round_ = [i for i, weight in enumerate(weights) for _ in range(weight)]
    assert [next(plan) for _ in range(count)] == (round_ * count)[:count]


def test_alternate_goes_on_without_a_flow_that_has_ended():
    plan = alternate(Flow.of("ab"), Flow.of("xyz!"), weights=[2, 1])
    assert "".join(plan) == "abxyz!"


@pytest.mark.parametrize("join", [alternate, functools.partial(concurrent, threads=False)])
def test_an_error_is_the_turn_of_its_flow(join):
    plan = join(Flow.of(itertools.repeat(0)).map(lambda zero: 1 // zero), Flow.of("ab"))
    for item in "ab":
        with pytest.raises(ZeroDivisionError):
            next(plan)
        assert next(plan) == item


@pytest.mark.parametrize("weights", [[1], [0, 1], [1, 2, 3]])
def test_alternate_checks_its_weights(weights):
    with pytest.raises(ValueError, match="weights: got"):
        alternate(Flow.of([1]), Flow.of([2]), weights=weights)


def test_tee_gives_each_branch_every_item():
    left, right = Flow.of(range(5)).tee(2, ahead=5)
    assert list(left) == list(right) == list(range(5))


def test_a_branch_waits_for_one_that_is_behind():
    taken = []
    left, right = Flow.of(range(9)).map(lambda x: taken.append(x) or x).tee(2, ahead=1)
    assert [next(left), next(left)] == [0, 1]
    assert not left.ready()
    with pytest.raises(launch.DeadlockError, match="2 items behind"):
        next(left)
    assert taken == [0, 1]
    assert next(right) == 0
    assert left.ready() and next(left) == 2


def test_branches_of_a_tee_in_several_threads_wait_for_each_other():
    taken: list[int] = []
    branches = Flow.of(range(200)).map(lambda x: taken.append(x) or x).tee(3, ahead=2, threads=True)
    got: list[list[int]] = [[], [], []]
    behind = []

    def run(i: int) -> None:
        for item in branches[i]:
            got[i].append(item)
            behind.append(len(taken) - min(map(len, got)))

    for running in [Background(run, i) for i in range(3)]:
        running.result(20)
    assert got == [list(range(200))] * 3
    assert max(behind) <= 3 + 3  # Ahead, the item in hand, and one that each thread has not noted yet.


def test_concurrent_without_threads_takes_turns_among_the_ready():
    ready = True
    slow = Flow.of(iter("abc"), lambda: ready)
    plan = concurrent(slow, Flow.of(range(3)))
    assert next(plan) == "a"
    ready = False
    assert [next(plan), next(plan), next(plan)] == [0, 1, 2]
    with pytest.raises(launch.DeadlockError, match="none of 1 flows is ready"):
        next(plan)
    ready = True
    assert list(plan) == ["b", "c"]
    alone = Flow.of("de", lambda: False).batch(2)
    assert next(alone) == ["d", "e"], "no other flow has turns any more"


@pytest.mark.parametrize("ahead", [0, 3])
def test_concurrent_runs_no_further_ahead_than_it_is_told(ahead):
    made: collections.Counter[str] = collections.Counter()
    changed = threading.Condition()

    def make(name: str) -> str:
        with changed:
            made[name] += 1
            changed.notify_all()
        return name

    flows = [Flow(lambda name=name: make(name)) for name in "xy"]
    plan = concurrent(*flows, ahead=ahead, threads=True)
    assert not made
    taken: collections.Counter[str] = collections.Counter()
    for _ in range(50):
        taken[next(plan)] += 1
        with changed:
            full = changed.wait_for(lambda: all(made[n] == taken[n] + ahead + 1 for n in "xy"), 10)
        assert full, (made, taken)
    time.sleep(0.05)  # Time to make too many.
    assert all(made[name] == taken[name] + ahead + 1 for name in "xy")
    del plan  # ends the threads


def test_concurrent_raises_the_error_of_a_flow_and_goes_on():
    plan = concurrent(Flow.of(range(3)).map(lambda x: 1 // x), threads=True)
    with pytest.raises(ZeroDivisionError):
        next(plan)
    assert list(plan) == [1, 0]


def test_concurrent_passes_on_what_ends_a_thread():
    def leave(x):
        return x if x else sys.exit(3)

    plan = concurrent(Flow.of(range(3)).map(leave), threads=True)
    left = in_a_thread(lambda: next(plan))
    assert isinstance(left, SystemExit) and left.code == 3
    assert in_a_thread(lambda: list(plan)) == [1, 2]


def test_threads_of_concurrent_end_with_it():
    before = set(threading.enumerate())
    plan = concurrent(Flow(lambda: 1), Flow(lambda: 2), threads=True)
    next(plan)
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert len(started) == 2
    del plan
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
