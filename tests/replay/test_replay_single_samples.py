"""`client.sample` draws exactly what it is asked for, however many samples one message brings."""

import itertools

import numpy as np
import pytest
from background import Background
from hypothesis import given, settings
from hypothesis import strategies as st
from served_table import counts, table, write, write_columns

from framework import replay
from framework.replay.client import ServedClient
from framework.replay.sharded import ShardedClient

SELECTORS = {"fifo": replay.selectors.Fifo, "lifo": replay.selectors.Lifo}
LIMITERS = {
    "min size": lambda: replay.rate_limiters.MinSize(2),
    "window": lambda: replay.rate_limiters.SampleToInsertRatio(2.0, 1, (0.0, 100.0)),
    "queue": lambda: replay.rate_limiters.Queue(50),
}
NAMES = ["/".join(each) for each in itertools.product(SELECTORS, LIMITERS, "013")]


def tables():
    for name in NAMES:
        selector, limiter, turns = name.split("/")
        most = {"sampler": SELECTORS[selector](), "limiter": LIMITERS[limiter]()}
        yield table(name, max_times_sampled=int(turns), **most)


def fill(client, name, lengths, number):
    with client.trajectory_writer(3) as writer:
        for _ in range(2):
            writer.append({"x": -1})
        for at, length in enumerate(lengths):
            writer.append({"x": number + at})
            writer.create_item(name, 1.0 + at, {"x": writer.history["x"][-length:]})


def plain(sample):
    """A sample without its key, which differs between two writers."""
    steps = sample if isinstance(sample, list) else [sample]
    return [(step.info._replace(key=0), [leaf.tolist() for leaf in step.data]) for step in steps]


def draw(client, name, n, stop, steps):
    """The first `stop` of `n` samples, and the error; at no time are more than `n` samples counted."""
    before, seen = counts(client, name)[1], []
    samples = client.sample(name, n, emit_timesteps=steps, timeout=0)
    try:
        for sample in itertools.islice(samples, stop):
            seen.append(plain(sample))
            assert len(seen) <= counts(client, name)[1] - before <= n
    except replay.errors.DeadlineExceededError as error:
        return seen, type(error)
    finally:
        samples.close()
    return seen, None


@pytest.mark.parametrize("way", ["local", "remote", "sharded"])
def test_single_samples_are_those_of_a_table_in_this_process(way):
    number = itertools.count(0, 100)
    with replay.Server(list(tables())) as server:
        served = ServedClient(server.address, local=way != "remote")
        client = ShardedClient([served]) if way == "sharded" else served
        oracle = replay.EmbeddedClient(list(tables()))

        @settings(max_examples=30, deadline=None)
        @given(
            st.sampled_from(NAMES),
            st.lists(st.integers(1, 2), min_size=1, max_size=20) | st.just([2] * 20),
            st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=4),
            st.booleans(),
        )
        def check(name, lengths, draws, steps):
            first = next(number)
            for each in (client, oracle):
                each.reset(name)
                fill(each, name, lengths, first)
            for n, stop in draws:
                assert draw(client, name, n, stop, steps) == draw(oracle, name, n, stop, steps)
                assert counts(client, name) == counts(oracle, name)
                sizes = [each.server_info()[name].current_size for each in (client, oracle)]
                assert sizes[0] == sizes[1]

        check()
        client.close()


def test_single_samples_come_as_a_limiter_lets_them():
    """A writer that waits for room goes on with each sample, which waits for nothing but itself."""
    with replay.Server([replay.Table.queue("t", 3)]) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer()
        writing = Background(lambda: (write(writer, 100), writer.flush()))
        samples = client.sample("t", 100, emit_timesteps=False, timeout=60)
        assert [int(sample.data[0]) for sample in samples] == list(range(100))
        writing.result(60)
        assert counts(client) == (100, 100)
        client.close()


@pytest.mark.parametrize("way", ["local", "remote", "sharded"])
@pytest.mark.parametrize("uint8s", [1, 1 << 20])
def test_a_message_brings_many_samples_if_they_are_small(way, uint8s):
    with replay.Server([table()]) as server:
        served = ServedClient(server.address, local=way != "remote")
        client = ShardedClient([served]) if way == "sharded" else served
        with client.batch_writer() as writer:
            write_columns(writer, {"x": np.zeros((4, uint8s), np.uint8)})
        before = server.messages
        assert len(list(client.sample("t", 60, emit_timesteps=False))) == 60
        assert (server.messages - before < 25) == (uint8s == 1), server.messages - before
        client.close()
