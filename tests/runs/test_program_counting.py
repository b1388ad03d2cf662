"""The counter: a budget that comes out exact whatever the actors do."""

import threading

import pytest
from background import Background
from hypothesis import given
from hypothesis import strategies as st

from framework.runs.services import Counter


def test_save_and_restore_in_another_counter():
    counter = Counter(max_steps=10)
    counter.increment(foo=3)
    counter.grant("a", 6)
    counter.grant("a", 2, spent=4, episodes=1)
    state = counter.save()
    counter.increment(foo=1)  # the snapshot does not see this
    other = Counter(max_steps=10)
    other.restore(state)
    assert other.get_counts() == {"foo": 3, "env_steps": 4, "episodes": 1}
    assert other.grant("a", 100) == 6  # the open grant of 2 is not part of the state


class TestBudget:
    def test_is_spent_where_a_resumed_run_has_made_more(self):
        counter = Counter(max_steps=5)
        counter.restore({"counts": {"env_steps": 7}})
        assert counter.remaining() == counter.grant("a", 3) == 0
        assert not counter.wait_for_steps(0.0)

    def test_unspent_steps_come_back(self):
        counter = Counter(max_steps=10)
        counter.grant("a", 8)
        assert counter.grant("a", 8) == 8  # restarted in the middle of its grant
        assert counter.grant("a", 0, spent=3) == 0
        assert counter.remaining() == 7
        assert counter.grant("b", 99) == 7

    def test_it_is_ending_once_an_actor_was_refused(self):
        counter = Counter(10)
        assert counter.grant("a", 6) == 6 and not counter.is_ending()
        assert counter.grant("b", 9) == 4 and counter.is_ending()
        assert counter.grant("a", 6, spent=6) == 0
        # Two of the last steps come back, but nobody waits for them but b.
        assert counter.grant("b", 1, spent=1) == 1
        assert counter.ungranted() == 2 and counter.is_ending()
        counter.release("a")  # Its next life asks again.
        assert not counter.is_ending()
        assert counter.grant("a", 6) == 2 and counter.is_ending()

    def test_an_actor_with_a_life_waits_where_it_is_refused(self):
        counter = Counter(10)
        assert counter.grant("b", 10, life="1") == 10 and counter.grant("a", 6, life="2") == 0
        assert counter.grant("b", 5, spent=2, life="1") == 5
        assert counter.ungranted() == 3 and not counter.is_ending()

    def test_without_a_limit(self):
        counter = Counter()
        assert counter.grant("a", 1000) == 1000
        assert counter.grant("a", 5, spent=1000) == 5
        assert counter.remaining() is None
        assert counter.get_counts() == {"env_steps": 1000}

    BAD = {
        "more than granted": (lambda c: c.grant("a", 1, spent=3), "spent 3 steps but holds a grant of 2"),
        "negative": (lambda c: c.grant("a", -1), "got n=-1"),
        "negative limit": (lambda c: Counter(max_steps=-1), "max_steps: got -1"),
    }

    @pytest.mark.parametrize("call, text", BAD.values(), ids=BAD)
    def test_bad_calls(self, call, text):
        counter = Counter(max_steps=10)
        counter.grant("a", 2)
        with pytest.raises(ValueError, match=text):
            call(counter)
        assert counter.grant("a", 0, spent=2) == 0  # a refused call changed nothing

    @given(
        st.integers(0, 200),
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.floats(0, 1)), max_size=60),
    )
    def test_is_exact_whatever_the_actors_do(self, limit, calls):
        counter, held, spent_by_all = Counter(max_steps=limit), dict.fromkeys("abc", 0), 0
        for who, wanted, share in calls:
            spent = int(held[who] * share)
            spent_by_all += spent
            held[who] = counter.grant(who, wanted, spent)
            assert held[who] <= wanted
            assert spent_by_all + sum(held.values()) <= limit
            assert counter.remaining() == limit - spent_by_all
        for who in "abc":  # everybody spends what it has, then takes the rest
            held[who] = counter.grant(who, limit, held[who])
            counter.grant(who, 0, held[who])
        assert counter.get_counts().get("env_steps", 0) == limit

    def test_threads_stop_exactly(self):
        counter = Counter(max_steps=1003)
        barrier = threading.Barrier(4)

        def act(index):
            barrier.wait(10)
            taken, granted = 0, counter.grant(f"actor-{index}", 7)
            while granted:
                taken += granted
                counter.increment(made=granted)
                granted = counter.grant(f"actor-{index}", 7, spent=granted)
            return taken

        acting = [Background(act, index) for index in range(4)]
        assert sum(each.result(20) for each in acting) == 1003
        assert counter.get_counts() == {"env_steps": 1003, "made": 1003}


class TestWaitFor:
    def test_is_woken_by_an_increment_and_by_a_grant(self):
        counter = Counter()
        waits = [Background(counter.wait_for, name, 3) for name in ("foo", "env_steps")]
        counter.increment(foo=1)
        counter.increment(foo=2)
        counter.grant("a", 3)
        counter.grant("a", 0, spent=3)
        assert [wait.result(10) for wait in waits] == [True, True]

    def test_zero_polls_and_a_timeout_is_false(self):
        counter = Counter()
        assert counter.wait_for("foo", 0, timeout=0) is True
        assert counter.wait_for("foo", 1, timeout=0) is False
        assert counter.wait_for("foo", 1, timeout=0.01) is False
