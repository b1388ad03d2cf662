"""The queue of a writer in the server's process: items that a rate limiter refuses wait there, in order."""

import collections
import gc

import numpy as np
import pytest
from background import Background
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from framework import replay

CAPACITY = {"a": 3, "b": 2}


def make_client(concurrent=True):
    tables = [replay.Table.queue(name, size) for name, size in CAPACITY.items()]
    return replay.EmbeddedClient(tables, concurrent=concurrent)


def create(writer, table, values, ragged=False):
    rows = writer.append("s", {"x": np.asarray(values, np.int64)})
    lengths = np.ones(len(rows), np.int32) if ragged else None
    leaf = writer.slice("s", "x", rows[:, None] if ragged else rows, lengths)
    keys = writer.create_items(table, leaf)
    writer.release("s", rows)
    return keys


class QueueMachine(RuleBasedStateMachine):
    """Random calls of a writer and a reader; the model is a list that waits and two bounded tables."""

    @initialize()
    def start(self):
        self.client = make_client(concurrent=False)
        self.writer = self.client.batch_writer()
        self.waiting = collections.deque()  # (table, value, key)
        self.tables = {name: collections.deque() for name in CAPACITY}
        self.values = 0

    def settle(self):
        """What any look at a table does first: the front of the queue goes in while there is room for it."""
        while self.waiting:
            table, value, key = self.waiting[0]
            if len(self.tables[table]) == CAPACITY[table]:
                return
            self.tables[table].append((value, key))
            self.waiting.popleft()

    @rule(table=st.sampled_from(sorted(CAPACITY)), n=st.integers(0, 9), ragged=st.booleans())
    def create(self, table, n, ragged):
        values = range(self.values, self.values + n)
        self.values += n
        keys = create(self.writer, table, values, ragged)
        assert len(keys) == n
        self.waiting.extend((table, value, key) for value, key in zip(values, keys.tolist(), strict=True))

    @rule(table=st.sampled_from(sorted(CAPACITY)), n=st.integers(1, 3))
    def sample(self, table, n):
        self.settle()
        expected = self.tables[table]
        if len(expected) < n:
            assert not self.client.can_sample(table, n)
            return
        for _ in range(n):
            value, key = expected.popleft()
            drawn = self.client.sample_batch(table, 1, timeout=0)
            assert (drawn.data.reshape(-1).tolist(), drawn.info.key.tolist()) == ([value], [key])
            self.settle()

    @rule(keep=st.integers(0, 4))
    def flush(self, keep):
        self.settle()
        if len(self.waiting) <= keep:
            self.writer.flush(keep=keep)
            return
        with pytest.raises(replay.DeadlineExceededError):
            self.writer.flush(timeout=0, keep=keep)

    @rule(table=st.sampled_from(sorted(CAPACITY)))
    def can_insert(self, table):
        self.settle()
        assert self.writer.can_insert(table) == (len(self.tables[table]) < CAPACITY[table])

    @invariant()
    def tables_and_queue_are_as_the_model_says(self):
        infos = self.client.server_info()
        self.settle()
        assert {name: infos[name].current_size for name in CAPACITY} == {
            name: len(items) for name, items in self.tables.items()
        }
        assert self.writer.num_pending == len(self.waiting)
        held = len(self.waiting) + sum(map(len, self.tables.values()))
        rows = self.client.store.stream("s").num_rows
        assert rows == held if not self.waiting else rows >= held

    def teardown(self):
        waiting = len(self.waiting)
        assert self.writer.close(timeout=0) == waiting
        assert self.client.store.stream("s").num_rows == sum(map(len, self.tables.values()))


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_writer_that_is_dropped_with_the_object_that_stages_for_it_is_ended():
    """The two refer to one another, so they are garbage together."""

    class Stages:
        def __init__(self, client):
            self.staged = [7]
            self.writer = client.batch_writer()
            self.writer.before_read(self.write)

        def write(self):
            staged, self.staged = self.staged, []
            create(self.writer, "a", staged)

    client = make_client()
    stages = Stages(client)
    stages.writer.append("s", {"x": np.arange(100)})
    del stages
    gc.collect()
    assert client.sample_batch("a", 1, timeout=10).data.tolist() == [7]
    assert not client.can_sample("a")
    assert client.store.stream("s").num_rows == 0
    assert not client.writers.dropped


@pytest.mark.parametrize("connect", ["embedded", "remote"], indirect=True)
def test_an_error_in_the_block_of_a_writer_does_not_wait_for_room(connect):
    client = connect(replay.Table.queue("a", 1))

    def fail():
        with client.batch_writer() as writer:
            create(writer, "a", [1, 2])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Background(fail).result()
    assert client.server_info()["a"].current_size == 1
