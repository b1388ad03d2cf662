"""Several servers as one."""

import contextlib

import numpy as np
import pytest
import torch
from background import Background, until
from served_table import table, write_columns

from framework import replay
from framework.datasets import Dataset
from framework.losses import importance_weights
from framework.replay.client import ServedClient
from framework.replay.sharded import ShardedClient, shard_of
from framework.replay.tables.rate_limiters import SAMPLERS


def by_priority(exponent=1.0):
    return table(sampler=replay.selectors.Prioritized(exponent))


@pytest.fixture
def shards():
    with contextlib.ExitStack() as stack:

        def build(*tables, served=True):
            servers = [stack.enter_context(replay.Server([each])) for each in tables]
            clients = [ServedClient(each.address) if served else each.localhost_client() for each in servers]
            client = ShardedClient(clients, seed=0)
            stack.callback(client.close)
            return client

        yield build


def sample_while_waiting(client, tables, values):
    """A batch of 20 that is asked for before `values` come to the second of two servers."""
    batch = Background(client.sample_batch, "t", 20)
    until(lambda: tables[0].waiting.counts[SAMPLERS])
    writers = [client.batch_writer() for _ in tables]
    write(next(writer for writer in writers if writer.shard == 1), values)
    return batch.result(10)


def write(writer, values, priorities=None):
    keys = write_columns(writer, {"x": np.asarray(values)}, "t", priorities)
    writer.flush()
    return keys


def test_uniform_over_all_items(shards):
    client = shards(table(), table(), table())
    writers = [client.batch_writer() for _ in range(3)]
    assert sorted(writer.shard for writer in writers) == [0, 1, 2]
    for writer, values in zip(writers, (range(10), range(10, 40), range(40, 100)), strict=True):
        write(writer, list(values))
    counts = np.zeros(100)
    for _ in range(50):
        sample = client.sample_batch("t", 200)
        counts += np.bincount(sample.data["x"], minlength=100)
        np.testing.assert_allclose(sample.info.probability, 0.01)
    expected = counts.sum() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 160  # chi² with 99 degrees of freedom: 1e-4
    info = client.server_info()["t"]
    assert info.current_size == 100 and info.rate_limiter_info.sample_stats.completed == 10_000


def test_by_priority_over_all_items(shards):
    client = shards(by_priority(), by_priority())
    a, b = client.batch_writer(), client.batch_writer()
    keys = [write(a, [0, 1], [1.0, 2.0]), write(b, [2, 3], [6.0, 1.0])]
    sample = client.sample_batch("t", 10_000)
    shares = np.array([0.1, 0.2, 0.6, 0.1])
    np.testing.assert_allclose(np.bincount(sample.data["x"], minlength=4) / 10_000, shares, atol=0.02)
    np.testing.assert_allclose(sample.info.probability, shares[sample.data["x"]], rtol=1e-6)
    new, mixed = np.array([0.5, 1.0, 2.0, 5.0]), [3, 0, 2, 1]
    client.update_priorities("t", np.concatenate(keys)[mixed], new[mixed])
    sample = client.sample_batch("t", 200)
    np.testing.assert_array_equal(sample.info.priority, new[sample.data["x"]])
    client.mutate_priorities("t", updates={int(keys[1][0]): 0.0}, deletes=[int(keys[0][0])])
    assert client.server_info()["t"].current_size == 3
    with pytest.raises(ValueError, match="priorities"):
        client.update_priorities("t", keys[0], [1.0, -1.0])


@pytest.mark.parametrize("served", [True, False])
def test_shares_are_those_of_the_moment(shards, served):
    """From the first batch on, and right after priorities and items have changed."""
    client = shards(by_priority(), by_priority(), served=served)

    def share_of_second():
        info = client.sample_batch("t", 4000).info
        second = info.key >> np.uint64(56) > 0
        weights = {
            name: info.priority[at][0] / info.probability[at][0]
            for name, at in (("a", ~second), ("b", second))
            if at.any()
        }
        assert len(set(np.round(list(weights.values()), 6))) == 1  # probabilities are those among all items
        return np.mean(second)

    first, second = client.batch_writer(), client.batch_writer()
    if first.shard:
        first, second = second, first
    mine = write(first, list(range(100)), np.full(100, 1.0))
    theirs = write(second, list(range(100)), np.full(100, 3.0))
    assert share_of_second() == pytest.approx(0.75, abs=0.04)
    client.update_priorities("t", theirs, np.full(100, 0.25))
    assert share_of_second() == pytest.approx(0.2, abs=0.04)
    write(second, list(range(300)), np.full(300, 1.0))
    assert share_of_second() == pytest.approx(325 / 425, abs=0.04)
    client.update_priorities("t", np.concatenate([mine, theirs]), np.zeros(200))
    assert share_of_second() == 1.0


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("look_first", [True, False])
@pytest.mark.parametrize("selector", [replay.selectors.Uniform, lambda: replay.selectors.Prioritized(0.6)])
def test_importance_weights_of_equal_items_are_equal(shards, served, look_first, selector):
    """Their formula multiplies the probability by the table's size, both of all servers together."""
    client = shards(*[table(sampler=selector(), size=2000) for _ in range(2)], served=served)
    for writer, size in zip([client.batch_writer() for _ in range(2)], (2000, 1000), strict=True):
        write(writer, np.arange(size), np.ones(size))
    source = client.source()
    if look_first:
        assert source.can_sample("t", 64)
    sample, drawn = source.draw("t", 64, 10.0, None, False)
    assert (sample.info.table_size == 3000).all() and sample.info.table_size.dtype == np.int64
    weights = importance_weights(
        torch.as_tensor(sample.info.probability), torch.as_tensor(sample.info.table_size), 0.5
    )
    np.testing.assert_allclose(weights, 1.0)
    source.release(drawn)
    source.close()


def test_all_priorities_zero_are_uniform_over_shards(shards):
    client = shards(by_priority(0.5), by_priority(0.5))
    first, second = client.batch_writer(), client.batch_writer()
    write(first, list(range(30)), np.zeros(30))
    write(second, list(range(10)), np.zeros(10))
    info = client.sample_batch("t", 4000).info
    np.testing.assert_allclose(info.probability, 1 / 40)
    assert np.mean(info.key >> np.uint64(56) == second.shard) == pytest.approx(0.25, abs=0.04)


def test_servers_that_sample_differently(shards):
    client = shards(by_priority(0.5), by_priority(0.6))
    write(client.batch_writer(), [1])
    with pytest.raises(ValueError, match="expected the same on all servers"):
        client.sample_batch("t", 1, timeout=60)


def sampled(client):
    return client.server_info()["t"].rate_limiter_info.sample_stats.completed


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 3, None])
def test_a_dataset_over_shards_counts_exactly(shards, served, prefetch):
    client = shards(table(), table(), served=served)
    for first in (0, 50):
        write(client.batch_writer(), list(range(first, first + 50)))
    with Dataset(client, "t", 64, prefetch=prefetch) as dataset:
        for taken in range(1, 21):
            seen = next(dataset)
            assert sampled(client) <= 64 * (taken + (16 if prefetch is None else prefetch))
        dataset.update_priorities(seen.info.key, np.full(64, 9.0))
    assert sampled(client) == 64 * 20
    assert client.sample_batch("t", 500).info.priority.max() == 9


@pytest.mark.parametrize(
    "sizes, uint8s, messages", [((10, 30, 60), 1, (20, 60)), ((10, 30, 60), 10_000, (300, 320))]
)
def test_a_message_brings_samples_for_several_batches(sizes, uint8s, messages):
    """Unless the items are large. They are drawn from all servers, in proportion to their sizes."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(replay.Server([table()])) for _ in sizes]
        client = ShardedClient([ServedClient(server.address) for server in servers], seed=0)
        writers = sorted([client.batch_writer() for _ in sizes], key=lambda writer: writer.shard)
        values = np.arange(sum(sizes))
        for writer, mine in zip(writers, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
            write_columns(writer, {"x": mine, "y": np.zeros((len(mine), uint8s), np.uint8)}, "t")
            writer.flush()
        before, counts = sum(server.messages for server in servers), np.zeros(len(values))
        with Dataset(client, "t", 200) as dataset:
            for _ in range(100):
                sample = next(dataset)
                counts += np.bincount(sample.data["x"], minlength=len(values))
                np.testing.assert_allclose(sample.info.probability, 1 / len(values))
                assert (
                    sample.data["y"].shape == (200, uint8s) and (sample.info.table_size == len(values)).all()
                )
                keys = sample.info.key >> np.uint64(56)
                np.testing.assert_array_equal(
                    keys, np.searchsorted(np.cumsum(sizes), sample.data["x"], "right")
                )
            assert messages[0] <= sum(server.messages for server in servers) - before <= messages[1]
        expected = counts.sum() / len(values)
        assert ((counts - expected) ** 2 / expected).sum() < 160  # chi² with 99 degrees of freedom: 1e-4
        client.close()


def test_batches_of_one_item_each_may_differ_in_length(shards):
    client = shards(table(), table())
    for _ in range(2):
        writer = client.trajectory_writer(2)
        for x in range(40):
            writer.append(x)
            writer.create_item("t", 1.0, writer.history[-1 - x % 2 :])
        writer.flush()
    with Dataset(client, "t", 1) as dataset:
        lengths = {len(next(dataset).data[0]) for _ in range(50)}
    assert lengths == {1, 2}


def test_samples_that_are_kept_go_into_the_given_arrays_and_back(shards):
    client = shards(table(), table())
    keys = [write(client.batch_writer(), values) for values in np.arange(100).reshape(2, 50)]
    values = dict(zip(np.concatenate(keys).tolist(), range(100), strict=True))
    source, out = client.source(), [np.zeros(40, np.int64)]
    for batch in range(20):
        source.spare = 200
        sample, drawn = source.draw("t", 40, 10.0, out, False)
        assert sample.data["x"] is out[0]
        assert out[0].tolist() == [values[key] for key in sample.info.key.tolist()]
        (source.release if batch < 19 else source.give_back)(drawn)
    assert 800 <= sampled(client) <= 1000
    with pytest.raises(ValueError, match="out"):
        source.draw("t", 40, 10.0, [np.zeros((40, 2), np.int64)], False)
    source.close()
    assert sampled(client) == 19 * 40


def test_shares_of_what_is_fetched_ahead_follow_the_priorities(shards):
    client = shards(by_priority(), by_priority())
    keys = [write(client.batch_writer(), list(range(100)), np.full(100, 1.0)) for _ in range(2)]
    with Dataset(client, "t", 100, prefetch=4) as dataset:
        for _ in range(8):
            next(dataset)
        for priority, share, probability in ((0.0, 0.0, 0.01), (1.0, 0.5, 0.005)):
            client.update_priorities("t", keys[0], np.full(100, priority))
            late = [next(dataset).info for _ in range(64)][40:]
            of_first = [np.mean(info.key >> np.uint64(56) == keys[0][0] >> np.uint64(56)) for info in late]
            assert np.mean(of_first) == pytest.approx(share, abs=0.06)
            np.testing.assert_allclose([info.probability for info in late], probability)


@pytest.mark.parametrize("prefetch", [2, None])
def test_queues_lose_nothing_to_a_dataset(shards, prefetch):
    client = shards(*[replay.Table.queue("t", 100) for _ in range(2)])
    for first in (0, 50):
        write(client.batch_writer(), list(range(first, first + 50)))
    seen = []
    for batches in (3, 7):
        with Dataset(client, "t", 10, prefetch=prefetch, rate_limiter_timeout=20) as dataset:
            seen += [next(dataset).data["x"] for _ in range(batches)]
    assert sorted(np.concatenate(seen)) == list(range(100))


def test_a_batch_that_does_not_come_leaves_no_sample_counted(shards):
    """One server gives its part, the other does not, or has another error."""
    limiter = replay.rate_limiters.RateLimiter(1.0, 1, 5.0, 1e9)
    limited = replay.Table("t", replay.selectors.Uniform(), replay.selectors.Fifo(), 100, limiter)
    client = shards(limited, limited.replace())
    for values in (range(10), range(10)):
        write(client.batch_writer(), list(values))
    with pytest.raises(replay.DeadlineExceededError):
        client.sample_batch("t", 11, timeout=0.2)
    assert sampled(client) == 0
    assert len(client.sample_batch("t", 10, timeout=20).info.key) == sampled(client) == 10


def test_empty_shards_are_waited_for(shards):
    tables = table(), table()
    client = shards(*tables)
    with pytest.raises(replay.DeadlineExceededError):
        client.sample_batch("t", 4, timeout=0.2)
    batch = sample_while_waiting(client, tables, [1, 2])
    assert set(batch.data["x"].tolist()) == {1, 2}


def test_inserts_are_spread(shards):
    client = shards(table(), table())
    for value in range(4):
        client.insert({"x": np.int64(value)}, {"t": 1.0})
    assert [shard.server_info()["t"].current_size for shard in client.shards] == [2, 2]
    client.reset("t")
    assert not client.can_sample("t", 1) and client.can_insert("t", 5)


def test_why_not_is_that_of_all_servers(shards):
    client = shards(*[replay.Table.queue("t", 1) for _ in range(2)], served=False)
    info = client.server_info()["t"]
    assert "size 0" in info.why_not_sample and info.why_not_insert == ""
    write(next(each for each in (client.batch_writer(), client.batch_writer()) if each.shard == 1), [0])
    info = client.server_info()["t"]
    assert info.why_not_sample == "" and "max_diff" in info.why_not_insert
    assert client.can_sample("t") and not client.can_insert("t")


def test_too_many_shards():
    with pytest.raises(ValueError, match="1 to 32"):
        ShardedClient([])


def test_a_shard_has_its_part_of_the_sizes_and_of_the_window():
    limiter = replay.rate_limiters.SampleToInsertRatio(4.0, 10, 20.0)
    whole = replay.Table("t", replay.selectors.Uniform(), replay.selectors.Fifo(), 101, limiter)
    part = shard_of(whole, 4)
    assert part.max_size == 26 and part.rate_limiter.min_size_to_sample == 3
    assert (part.rate_limiter.min_diff, part.rate_limiter.max_diff) == (5.0, 15.0)
    assert part.rate_limiter.samples_per_insert == 4.0 and whole.max_size == 101


def test_a_shard_of_a_narrow_window_blocks_one_side_at_most():
    limiter = replay.rate_limiters.SampleToInsertRatio(8.0, 1, 8.0)
    whole = replay.Table("t", replay.selectors.Uniform(), replay.selectors.Fifo(), 100, limiter)
    part = shard_of(whole, 4).rate_limiter
    for _ in range(20):
        if part.allowed_inserts(1):
            part.inserts, part.size = part.inserts + 1, part.size + 1
        assert part.allowed_samples(1)
        part.samples += part.allowed_samples(100)


@pytest.mark.parametrize(("size", "part"), [(1, 1), (2, 2), (3, 2), (8, 4)])
def test_a_shard_of_a_small_queue_loses_no_items(size, part):
    client = replay.EmbeddedClient([shard_of(replay.Table.queue("t", size), 2)], concurrent=False)
    write_columns(client.batch_writer(), {"x": np.arange(10)})
    info = client.server_info()["t"]
    assert info.current_size == info.rate_limiter_info.insert_stats.completed == part


def test_a_batch_may_be_larger_than_one_draw(shards):
    client = shards(table(), table(), served=False)
    write(client.batch_writer(), [1])
    assert client.source().can_sample("t", 200_000)


@pytest.mark.parametrize("served", [True, False])
def test_a_server_at_the_end_of_its_ratio_leaves_the_batch_to_the_others(shards, served):
    def limited(samples):
        limiter = replay.rate_limiters.RateLimiter(1.0, 1, 100.0 - samples, 1e9)
        return replay.Table("t", replay.selectors.Uniform(), replay.selectors.Fifo(), 1000, limiter)

    tables = limited(10), limited(50)
    client = shards(*tables, served=served)
    for _ in range(2):
        write(client.batch_writer(), list(range(100)))
    source = client.source()
    assert source.can_sample("t", 60) and not source.can_sample("t", 61)
    info = client.sample_batch("t", 40, timeout=60).info
    first = int(np.sum(info.key >> np.uint64(56) == 0))
    assert first <= 10
    np.testing.assert_allclose(info.probability[:first], first / 40 / 100)
    np.testing.assert_allclose(info.probability[first:], (40 - first) / 40 / 100)
    client.sample_batch("t", 20, timeout=60)
    with pytest.raises(replay.DeadlineExceededError):
        client.sample_batch("t", 1, timeout=0.2)
    assert len(sample_while_waiting(client, tables, list(range(30))).info.key) == 20
