"""A table with a rate limiter against a model: inserts, draws, releases and returns in any order."""

import numpy as np
import pytest
from embedded_table import contents, insert, insert_now, make
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interrupts import interrupt

from framework import replay
from framework.replay import rate_limiters as rl
from framework.replay import selectors
from framework.replay.rows.layout import gather

LIMITERS = [
    lambda: rl.MinSize(3),
    lambda: rl.Queue(4),
    lambda: rl.Queue(1),
    lambda: rl.SampleToInsertRatio(2.0, 3, 4.0),
    lambda: rl.SampleToInsertRatio(0.5, 2, (0.0, 3.0)),
    lambda: rl.SampleToInsertRatio(3.7, 2, (-5.0, 20.0)),
]


class DeliveryMachine(RuleBasedStateMachine):
    """Values are numbered as they come, so their order is that of the items."""

    @initialize(
        which=st.integers(0, len(LIMITERS) - 1),
        turns=st.integers(0, 3),
        size=st.integers(3, 6),
        fifo=st.booleans(),
    )
    def start(self, which, turns, size, fifo):
        limiter = LIMITERS[which]()
        self.limiter, self.turns, self.size, self.fifo = limiter, turns, size, fifo
        kind = selectors.Fifo if fifo else selectors.Lifo
        self.client = make(sampler=kind(), size=size, limiter=limiter, times=turns)
        self.table, self.writer = self.client.tables["t"], self.client.batch_writer()
        self.live, self.spent = {}, {}  # value -> how often it was sampled
        self.inserts = self.samples = self.age = self.next = 0
        self.born = {}  # value -> inserts before
        self.held = []  # [delivery, values, their ages, resets before]
        self.resets = 0
        self.keys = {}

    def readers(self, value):
        return sum(values.count(value) for _, values, _, _ in self.held)

    def trim(self):
        while len(self.live) > self.size:
            del self.live[min(self.live)]

    def can_sample(self):
        diff = self.inserts * self.limiter.samples_per_insert - self.samples
        return len(self.live) >= self.limiter.min_size_to_sample and diff - 1 >= self.limiter.min_diff

    def can_insert(self):
        limiter = self.limiter
        diff = (self.inserts + 1) * limiter.samples_per_insert - self.samples
        return len(self.live) + 1 <= limiter.min_size_to_sample or diff <= limiter.max_diff

    @rule(n=st.integers(1, 7))
    def insert(self, n):
        """The table takes those that the limiter allows and leaves the rest to the caller."""
        values = range(self.next, self.next + n)
        fits = 0
        while fits < n and self.can_insert():
            self.live[values[fits]], self.born[values[fits]] = 0, self.inserts
            self.inserts += 1
            self.trim()
            fits += 1
        rows = self.writer.append("s", {"x": np.array(values)})
        keys, done = insert_now(self.table, self.writer.slice("s", "x", rows))
        self.writer.release("s", rows)
        assert done == fits
        self.keys.update(zip(values, keys.tolist(), strict=True))
        self.next += n

    @rule(n=st.integers(1, 6))
    def draw(self, n):
        before = dict(self.live), dict(self.spent), self.samples
        values, times, sizes = [], [], []
        while len(values) < n and self.can_sample():
            sizes.append(len(self.live))
            value = min(self.live) if self.fifo else max(self.live)
            self.live[value] += 1
            self.samples += 1
            values.append(value)
            times.append(self.live[value])
            if self.live[value] == self.turns:
                self.spent[value] = self.live.pop(value)
        if len(values) < n:
            self.live, self.spent, self.samples = before
            with pytest.raises(replay.DeadlineExceededError):
                self.table.sample(n, timeout=0)
            return
        delivery = self.table.sample(n, timeout=0)
        assert gather("t", delivery.info, delivery.parts).data.tolist() == values
        assert delivery.info.times_sampled.tolist() == times
        assert delivery.info.table_size.tolist() == sizes
        ages = [self.inserts - self.born[value] for value in values]
        self.age += sum(ages)
        self.held.append((delivery, values, ages, self.resets))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), used=st.sampled_from([None, 0, 1, 2]))
    def end(self, data, used):
        """Gives all but the first `used` samples back; None releases all."""
        at = data.draw(st.integers(0, len(self.held) - 1))
        delivery, values, ages, resets = self.held.pop(at)
        assert gather("t", delivery.info, delivery.parts).data.tolist() == values, "the rows stay"
        if used is not None:
            self.table.give_back(delivery, used)
        for each in (self.table.release, self.table.give_back):
            each(delivery)  # Only the first call counts.
        if resets == self.resets:
            if used is not None:
                self.samples -= len(values[used:])
                self.age -= sum(ages[used:])
                for value in values[used:]:
                    if value in self.spent:
                        self.live[value] = self.spent.pop(value)
                    if value in self.live:
                        self.live[value] -= 1
            self.spent = {v: n for v, n in self.spent.items() if self.readers(v)}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def delete(self, data):
        value = data.draw(st.sampled_from(sorted({**self.live, **self.spent})))
        self.live.pop(value, None)
        self.spent.pop(value, None)
        self.client.mutate_priorities("t", deletes=[self.keys[value], 12345])

    @rule()
    def reset(self):
        self.client.reset("t")
        self.live, self.spent = {}, {}
        self.inserts = self.samples = self.age = 0
        self.resets += 1

    @invariant()
    def agree(self):
        if not hasattr(self, "live"):
            return
        info = self.client.server_info()["t"]
        stats = info.rate_limiter_info
        assert info.current_size == len(self.live) == self.limiter.size
        assert info.sampled_age == self.age
        assert (stats.insert_stats.completed, stats.sample_stats.completed) == (self.inserts, self.samples)
        assert self.client.can_sample("t", 1) == self.can_sample()
        assert self.client.can_insert("t", 1) == self.can_insert()
        if self.next:
            held = {value for _, values, _, _ in self.held for value in values}
            assert self.client.store.streams["s"].num_rows == len(held | set(self.live))


DeliveryMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestDeliveries = DeliveryMachine.TestCase


@pytest.mark.parametrize("turns", [0, 1, 2])
@pytest.mark.parametrize(
    "sampler", [selectors.Uniform(), selectors.Prioritized(0.5)], ids=["uniform", "priority"]
)
def test_what_is_given_back_was_never_drawn(sampler, turns):
    client = make(
        sampler=sampler.copy(), times=turns, size=20, limiter=rl.SampleToInsertRatio(2.0, 1, (0, 100))
    )
    insert(client, range(20), np.arange(20) + 1.0)
    table = client.tables["t"]
    before = table.info
    deliveries = [table.sample(n, timeout=0) for n in (7, 1, 9)]
    assert table.info.rate_limiter_info.sample_stats.completed == 17
    for at in (1, 0, 2):
        table.give_back(deliveries[at])
    assert table.info == before
    if turns:
        got = client.sample_batch("t", 20 * turns, timeout=0).data
        assert np.bincount(got).tolist() == [turns] * 20


def test_a_queue_that_was_refilled_keeps_what_is_given_back():
    client = make(sampler=selectors.Fifo(), limiter=rl.Queue(4), size=4, times=1)
    table = client.tables["t"]
    insert(client, range(4))
    delivery = table.sample(4, timeout=0)
    insert(client, range(4, 8))
    table.give_back(delivery)
    assert table.info.current_size == 8, "more than max_size: nothing is lost"
    assert not client.can_insert("t", 1)
    assert client.sample_batch("t", 5, timeout=0).data.tolist() == [0, 1, 2, 3, 4]
    assert client.can_insert("t", 1) and not client.can_insert("t", 2)
    assert client.sample_batch("t", 3, timeout=0).data.tolist() == [5, 6, 7]
    assert client.can_insert("t", 4), "empty, it takes as many as before"


def test_a_priority_that_is_set_after_the_last_turn_counts_once_the_item_is_back():
    client = make(sampler=selectors.Prioritized(1.0), times=1)
    keys = insert(client, [0, 1], [1.0, 1.0])
    table = client.tables["t"]
    held = table.sample(1)
    client.update_priorities("t", [*held.info.key, *keys[keys != held.info.key]], [5.0, 2.0])
    assert table.weight()[:2] == (2.0, 1)
    table.give_back(held)
    assert table.weight()[:2] == (7.0, 2)


INTERRUPTED = {
    "a batch": (0, lambda client, writer, keys: insert(client, [8, 9, 10], writer=writer)),
    "an item": (0, lambda client, writer, keys: insert(client, [8], writer=writer)),
    "a sample": (0, lambda client, writer, keys: client.sample_batch("t", 3, timeout=0)),
    "last samples": (2, lambda client, writer, keys: client.sample_batch("t", 3, timeout=0)),
    "changes": (0, lambda client, _, keys: client.mutate_priorities("t", {int(keys[3]): 3.0}, keys[:3])),
    "a reset": (0, lambda client, writer, keys: client.reset("t")),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_anywhere_leaves_a_whole_table_or_ends_it(name):
    times, use = INTERRUPTED[name]
    at, ended = 0, 0
    while True:
        client = make(sampler=selectors.Prioritized(1.0), size=5, times=times, concurrent=False)
        writer, table = client.batch_writer(), client.tables["t"]
        keys = insert(client, range(7), range(1, 8), writer=writer)[2:]
        files = [f"tables/{name}.py" for name in ("items", "keys", "rate_limiters", "selectors", "table")]
        files += ["local/client.py", "tables/sum_tree.py"]
        files += [f"replay/{name}.py" for name in ("base", "writer", "writers")]
        if not interrupt(lambda: use(client, writer, keys), at, *files):  # noqa: B023
            break
        at += 1
        try:
            insert(client, [20, 21], writer=writer)
        except replay.ServerClosed as error:
            assert "in the middle of a change" in str(error)
            ended += 1
            for call in (client.sample_batch, client.reset, client.checkpoint, client.server_info):
                with pytest.raises(replay.ServerClosed):
                    call(*("t", 1)[: call.__code__.co_argcount - 1])
            continue
        items, live = table.items, contents(client)
        assert len(live) == len(table) == len(table.sampler) == len(table.remover) <= 5
        assert live == sorted(set(live)) and live[-2:] == [20, 21]
        assert sorted(items.find(items.keys[items.keys > 0])) == sorted(items.in_order())
        assert set(client.sample_batch("t", 3, timeout=0).data) <= set(live)
        assert writer.close(0) == 0
    assert at > ended > 3
