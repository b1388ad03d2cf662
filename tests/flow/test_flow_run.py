"""`flow.run`: a plan without a program of one's own."""

from __future__ import annotations

import pytest

import launch
from framework import flow
from framework.flow import Flow, Par, StepError


class Worker:
    def __init__(self, index: int):
        self.index, self.version = index, 0

    def sample(self) -> int:
        self.version += 1
        return 10 * self.index + self.version

    def fail(self) -> None:
        raise KeyError("lost")


def sums(nodes) -> Flow:
    return Par(nodes, Worker.sample).sync().map(sum)


def three(nodes):
    for number in range(3):
        yield number + nodes[0].call(Worker.sample).result()


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_the_first_items_of_a_plan_or_all_of_one_that_ends(engine):
    assert flow.run(Worker, 2, sums, items=3, engine=engine) == [12, 14, 16]
    if engine != "processes":  # They start once.
        assert flow.run(Worker, 1, three, engine=engine) == [1, 3, 5]
        assert flow.run(Worker, 1, three, items=9, engine=engine) == [1, 3, 5]


def test_no_items_are_an_empty_list_and_nothing_is_computed():
    assert flow.run(Worker, 1, lambda nodes: Par(nodes, Worker.fail).sync(), items=0) == []


def test_branches_that_wait_for_each_other_take_turns():
    def plan(nodes):
        left, right = sums(nodes).tee(2, ahead=1)
        return flow.concurrent(left.map(str), right)

    assert flow.run(Worker, 1, plan, items=4) == ["1", 1, "2", 2]


def test_an_error_of_a_step_is_that_of_the_call():
    with pytest.raises(launch.NodeError, match="lost") as caught:
        flow.run(Worker, 2, lambda nodes: Par(nodes, Worker.fail).sync(), items=1)
    assert isinstance(caught.value.__cause__, StepError) and "worker-0" in str(caught.value.__cause__)


@pytest.mark.parametrize("count, items, text", [(0, 1, "count: got 0"), (1, -1, "items: got -1")])
def test_wrong_numbers_are_refused(count, items, text):
    with pytest.raises(ValueError, match=text):
        flow.run(Worker, count, sums, items=items)
