"""Rate limiters: validation, and tables against a ten-line reference."""

import numpy as np
import pytest
from embedded_table import insert_now
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from framework import replay
from framework.replay import rate_limiters as rl
from framework.replay import selectors

CASES = {
    "ratio zero": lambda: rl.SampleToInsertRatio(0.0, 1, 10.0),
    "ratio negative": lambda: rl.SampleToInsertRatio(-1.0, 1, 10.0),
    "ratio not a number": lambda: rl.SampleToInsertRatio(float("nan"), 1, 10.0),
    "minimum zero": lambda: rl.MinSize(0),
    "buffer below one": lambda: rl.SampleToInsertRatio(1.0, 1, 0.5),
    "buffer below the ratio": lambda: rl.SampleToInsertRatio(4.0, 1, 3.9),
    "window too narrow": lambda: rl.SampleToInsertRatio(4.0, 10, (36.0, 43.9)),
    "window above the minimum": lambda: rl.SampleToInsertRatio(1.0, 10, (11.0, 20.0)),
    "window empty": lambda: rl.RateLimiter(1.0, 1, 3.0, 3.0),
    "queue of nothing": lambda: rl.Queue(0),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_wrong_arguments_are_refused(make):
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize("buffer", [4.0, 4, np.int64(4), np.float32(4.0)], ids=lambda n: type(n).__name__)
def test_number_is_a_window_around_the_minimum(buffer):
    limiter = rl.SampleToInsertRatio(2.0, 5, buffer)
    assert (limiter.min_diff, limiter.max_diff) == (6.0, 14.0)


def test_minimum_above_max_size_is_refused():
    with pytest.raises(ValueError, match="never be sampled"):
        replay.Table("t", selectors.Uniform(), selectors.Fifo(), 3, rl.MinSize(4))


def test_one_limiter_serves_one_table():
    limiter = rl.MinSize(1)
    replay.Table("a", selectors.Uniform(), selectors.Fifo(), 3, limiter)
    with pytest.raises(ValueError, match="belongs to table 'a'"):
        replay.Table("b", selectors.Uniform(), selectors.Fifo(), 3, limiter)


@pytest.mark.parametrize(
    ("ratio", "minimum", "buffer", "expected"),
    [(1, 1, 1, 2), (2, 3, 4, 5), (0.5, 4, 2, 8), (4, 2, (0, 16), 4), (8, 10, 80, 20)],
)
def test_inserts_before_the_first_sample(ratio, minimum, buffer, expected):
    client, table = make_client(rl.SampleToInsertRatio(ratio, minimum, buffer), 1000, 0)
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.arange(100)})
    assert insert_now(table, writer.slice("s", "x", rows))[1] == expected
    assert client.server_info()["t"].current_size == expected


def make_client(limiter, max_size, max_times, sampler=None):
    table = replay.Table(
        "t", sampler or selectors.Fifo(), selectors.Fifo(), max_size, limiter, max_times, seed=0
    )
    return replay.EmbeddedClient([table]), table


class Reference:
    """The rule of the limiters, on a list of [value, times sampled], oldest first."""

    def __init__(self, spi, minimum, low, high, max_size, max_times):
        self.rule = spi, minimum, low, high
        self.max_size, self.max_times = max_size, max_times
        self.items, self.inserts, self.samples = [], 0, 0

    def can_sample(self):
        spi, minimum, low, _ = self.rule
        return len(self.items) >= minimum and self.inserts * spi - self.samples - 1 >= low

    def can_insert(self):
        spi, minimum, _, high = self.rule
        return len(self.items) + 1 <= minimum or (self.inserts + 1) * spi - self.samples <= high

    def insert(self, value):
        self.items = [*self.items, [value, 0]][-self.max_size :]
        self.inserts += 1

    def sample(self):
        self.samples += 1
        self.items[0][1] += 1
        value, times = self.items[0]
        if times == self.max_times:
            self.items.pop(0)
        return value, times


LIMITERS = [
    lambda: rl.MinSize(3),
    lambda: rl.Queue(4),
    lambda: rl.Queue(1),
    lambda: rl.SampleToInsertRatio(2.0, 3, 4.0),
    lambda: rl.SampleToInsertRatio(0.5, 2, (0.0, 3.0)),
    lambda: rl.SampleToInsertRatio(3.7, 2, (-5.0, 20.0)),
]


class LimiterMachine(RuleBasedStateMachine):
    """Random operations on a table and on the reference; every answer must agree."""

    @initialize(which=st.integers(0, len(LIMITERS) - 1), times=st.integers(0, 3), size=st.integers(4, 6))
    def start(self, which, times, size):
        limiter = LIMITERS[which]()
        numbers = limiter.options().values()
        self.reference = Reference(*numbers, size, times)
        self.client, self.table = make_client(limiter, size, times)
        self.writer = self.client.batch_writer()
        self.keys = {}
        self.value = 0
        self.held = []

    @rule(n=st.integers(1, 7))
    def insert(self, n):
        rows = self.writer.append("s", {"x": np.arange(self.value, self.value + n)})
        allowed = 0
        while allowed < n and self.reference.can_insert():
            self.reference.insert(self.value + allowed)
            allowed += 1
        leaf = self.writer.slice("s", "x", rows)
        keys, done = insert_now(self.table, leaf)
        assert done == allowed
        self.keys.update(zip(range(self.value, self.value + done), keys[:done].tolist(), strict=True))
        self.writer.release("s", rows)
        self.value += n

    @rule(n=st.integers(1, 6))
    def sample(self, n):
        expected, saved = [], (list(map(list, self.reference.items)), self.reference.samples)
        while len(expected) < n and self.reference.can_sample():
            expected.append(self.reference.sample())
        if len(expected) == n:
            sample = self.client.sample_batch("t", n, timeout=0)
            assert (
                list(zip(sample.data.tolist(), sample.info.times_sampled.tolist(), strict=True)) == expected
            )
        else:
            self.reference.items, self.reference.samples = saved
            with pytest.raises(replay.DeadlineExceededError):
                self.client.sample_batch("t", n, timeout=0)

    @rule(n=st.integers(1, 4))
    def sample_and_give_back(self, n):
        """Must not be noticed."""
        try:
            delivery = self.table.sample(n, timeout=0)
        except replay.DeadlineExceededError:
            return
        self.table.give_back(delivery)

    @precondition(lambda self: self.reference.items)
    @rule(data=st.data())
    def delete(self, data):
        value, _ = data.draw(st.sampled_from(self.reference.items))
        if value in self.keys:
            self.reference.items = [item for item in self.reference.items if item[0] != value]
            self.client.mutate_priorities("t", deletes=[self.keys[value], 12345])

    @invariant()
    def agree(self):
        if not hasattr(self, "reference"):
            return
        info = self.client.server_info()["t"]
        stats = info.rate_limiter_info
        assert info.current_size == len(self.reference.items)
        assert stats.insert_stats.completed == self.reference.inserts
        assert stats.sample_stats.completed == self.reference.samples
        assert self.client.can_sample("t", 1) == self.reference.can_sample()
        assert self.client.can_insert("t", 1) == self.reference.can_insert()
        assert self.client.store.streams["s"].num_rows == len(self.reference.items) if self.value else True


@settings(max_examples=300, deadline=None)
@given(
    ratio=st.floats(0.01, 50),
    minimum=st.integers(1, 40),
    low=st.floats(-100, 100),
    width=st.floats(0.01, 300),
    counts=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 60)),
    n=st.integers(0, 100),
)
def test_as_many_are_allowed_as_go_through_one_by_one(ratio, minimum, low, width, counts, n):
    inserts, samples, size = counts
    limiter = rl.RateLimiter(ratio, minimum, low, low + width)
    limiter.inserts, limiter.samples, limiter.size = inserts, samples, size

    allowed = 0
    while allowed < n and size >= minimum and inserts * ratio - samples - (allowed + 1) >= low:
        allowed += 1
    assert limiter.allowed_samples(n) == allowed

    allowed = 0
    while allowed < n and (
        size + allowed + 1 <= minimum or (inserts + allowed + 1) * ratio - samples <= limiter.max_diff
    ):
        allowed += 1
    assert limiter.allowed_inserts(n) == allowed


LimiterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLimiters = LimiterMachine.TestCase
