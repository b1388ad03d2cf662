"""Learners form a group, step together or not at all, and form a new group when one of them is lost."""

import contextlib
import datetime
import functools
import itertools
import threading
import uuid
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from background import Background
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.learners import LearnerGroup, distributed
from framework.learners.group import (
    FirstLearner,
    GroupChanged,
    GroupLost,
    GroupMember,
    Place,
    SharedKeys,
)

PATIENCE, ENV_STEPS, STATE = 60.0, 7, {"state": "of rank 0"}
ROUNDS = 4  # Steps that all learners make in the last group.


def first_learner(size):
    return FirstLearner(SimpleNamespace(save=lambda: STATE, env_steps=ENV_STEPS), size)


class Simulation:
    """Learners as threads, which die without a word and are started again.

    Args:
      deaths: of each rank, the ends of its lives: the steps that it makes, and whether it dies while it waits
        for the next one.
      repeats: of each rank, how its calls are made, over and over: once, "again" after the answer, or
        "meanwhile" while the first one runs. The repeat has the same arguments.
    """

    def __init__(self, deaths, repeats):
        self._deaths, self._size = deaths, len(deaths)
        self._repeats = [itertools.cycle(each) for each in repeats]
        self._generations = first_learner(self._size)
        self._threads = []
        self.made = {}  # (generation, step) to the ranks that made it
        self.numbers = [[] for _ in deaths]  # of the generations of each rank

    def run(self):
        self._start(*(functools.partial(self._live, rank) for rank in range(self._size)))
        for thread in self._threads:  # grows meanwhile
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _start(self, *calls):
        threads = [threading.Thread(target=call, daemon=True) for call in calls]
        self._threads += threads
        for thread in threads:
            thread.start()
        return threads

    def _live(self, rank):
        lives = [*self._deaths[rank], None]
        step = number = None
        while True:
            try:
                if number is None:
                    place = Place(f"learner-{rank}", "host")
                    number, *_ = self._call(rank, self._generations.join_learners, place, uuid.uuid4().hex)
                    self.numbers[rank].append(number)
                    step = 0
                if lives[0] is not None and step == lives[0][0]:
                    if lives.pop(0)[1]:  # The call of a dead process goes on.
                        arrives = functools.partial(self._call, rank, self._arrive, number, step)
                        self._start(functools.partial(self._ignore_changes, arrives))
                    number = None
                elif step == ROUNDS:
                    return
                else:
                    self._call(rank, self._arrive, number, step)
                    step += 1
            except GroupChanged:
                number = None

    def _call(self, rank, method, *arguments):
        """Calls `method`, once or twice; one of the calls may be the one that counts."""
        how = next(self._repeats[rank])
        call = functools.partial(method, rank, *arguments)
        repeated = functools.partial(self._ignore_changes, call)
        repeats = self._start(repeated) if how == "meanwhile" else []
        try:
            answer = call()
        finally:
            for thread in repeats:  # A client makes no new call before the repeat of the last one.
                thread.join(PATIENCE)
        if how == "again":
            repeated()
        return answer

    def _ignore_changes(self, call):
        with contextlib.suppress(GroupChanged):
            call()

    def _arrive(self, rank, number, step):
        assert self._generations.arrive(rank, number, step) == ENV_STEPS
        self.made.setdefault((number, step), set()).add(rank)


# A call of a dead process may complete a step, so no one dies in the last one.
DEATHS = st.lists(st.tuples(st.integers(0, ROUNDS - 2), st.booleans()), max_size=2)
REPEATS = st.lists(st.sampled_from(["once", "again", "meanwhile"]), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(DEATHS, min_size=2, max_size=4), st.lists(REPEATS, min_size=4, max_size=4))
def test_all_learners_make_a_step_or_none_does_however_they_die(deaths, repeats):
    simulation = Simulation(deaths, repeats)
    simulation.run()
    everyone = set(range(len(deaths)))
    assert all(ranks == everyone for ranks in simulation.made.values())
    last = max(number for number, _ in simulation.made)
    assert {(last, step) for step in range(ROUNDS)} <= set(simulation.made)
    for numbers in simulation.numbers:
        assert numbers == sorted(set(numbers)) and numbers[-1] == last
    if not any(deaths):  # Repeated calls alone form no new group.
        assert set(simulation.made) == {(last, step) for step in range(ROUNDS)}


def joined(generations, *places):
    """The answers or errors of learners that join at the same time."""
    joins = [Background(generations.join_learners, *each, uuid.uuid4().hex) for each in enumerate(places)]
    return [join.exception(PATIENCE) or join.result() for join in joins]


def test_learners_learn_whether_they_are_on_one_host():
    generations = first_learner(2)
    (number, apart, _), _ = joined(generations, Place("learner-0", "a"), Place("learner-1", "a"))
    assert not apart
    again = joined(generations, Place("learner-0", "a"), Place("learner-1", "b"))
    assert again == [(number + 1, True, STATE)] * 2


def test_a_repeated_join_is_the_same_membership_and_a_restarted_learner_forms_a_new_group():
    generations, places = first_learner(2), [Place(f"learner-{rank}", "a") for rank in range(2)]
    waiting = Background(generations.join_learners, 0, places[0], "a")
    number, *_ = generations.join_learners(1, places[1], "b")
    assert waiting.result(PATIENCE) == (number, False, STATE)
    assert (
        generations.join_learners(1, places[1], "b")
        == generations.join_learners(0, places[0], "a")
        == (number, False, STATE)
    )
    waiting = Background(generations.join_learners, 1, places[1], "restarted")
    with pytest.raises(GroupChanged):
        generations.arrive(0, number, 0)
    assert generations.join_learners(0, places[0], "c") == (number + 1, False, STATE)
    assert waiting.result(PATIENCE) == (number + 1, False, STATE)


def test_two_learners_with_one_gpu_are_refused():
    same = [Place(f"learner-{rank}", "a", "GPU-1") for rank in range(2)]
    for error in joined(first_learner(2), *same):
        assert isinstance(error, ValueError)
        assert "one GPU for both learner-" in str(error) and "on 'a'" in str(error)
    apart = [Place("learner-0", "a", "GPU-1"), Place("learner-1", "b", "GPU-1")]
    assert all(answer[1] for answer in joined(first_learner(2), *apart))


def test_a_closed_group_ends_every_wait():
    generations = first_learner(2)
    (number, *_), _ = joined(generations, Place("learner-0", "a"), Place("learner-1", "a"))
    arriving = Background(generations.arrive, 0, number, 0)
    exchanging = Background(generations.exchange, number, "wait", ["key"], PATIENCE)
    generations.close()
    assert arriving.result(PATIENCE) is None and isinstance(exchanging.exception(PATIENCE), GroupChanged)
    assert generations.join_learners(1, Place("learner-1", "a"), "late") is None


def test_a_learner_gives_up_when_three_groups_were_lost_before_a_step():
    member = GroupMember(SimpleNamespace(device=torch.device("cpu")), 1, 2, SimpleNamespace())
    assert [member.has_lost(GroupLost()) for _ in range(2)] == [True, True]
    member.stepped()
    assert [member.has_lost(GroupLost()) for _ in range(3)] == [True, True, False]
    assert not member.has_lost(ValueError())


def test_a_group_is_formed_through_a_store_of_calls():
    keys = SharedKeys()
    store = distributed.CallStore(lambda operation, *arguments: getattr(keys, operation)(*arguments))
    store.set("a", "1")
    assert store.get("a") == b"1" and store.add("a", 2) == 3 and store.check(["a"])
    assert not store.check(["a", "b"])
    assert [keys.add("a", 1, call_id) for call_id in ("x", "x", "y", "x")] == [4, 4, 5, 4]
    assert store.get("a") == b"5"
    with pytest.raises(GroupLost, match="no address within 0"):
        store.wait(["b"], datetime.timedelta(0))
    group = LearnerGroup(0, 1, store)
    assert group.counts(7) == [[7]]
    group.close()
    with pytest.raises(GroupLost):  # The other one does not come.
        LearnerGroup(0, 2, distributed.CallStore(store._call), timeout_s=0.1)
    assert not dist.is_initialized()


def test_a_group_listens_on_the_interface_of_its_address():
    assert distributed.interface_of("127.0.0.1").startswith("lo")
    with pytest.raises(ValueError, match=r"address: got '192\.0\.2\.1', expected an IP address of this"):
        distributed.interface_of("192.0.2.1")


def test_an_interface_that_is_named_needs_no_address_of_this_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", distributed.interface_of("127.0.0.1"))
    group = LearnerGroup(0, 1, dist.HashStore(), timeout_s=20, address="192.0.2.1")
    assert group.counts(7) == [[7]]
    group.close()
