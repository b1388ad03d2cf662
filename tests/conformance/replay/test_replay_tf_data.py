"""`datasets.as_tf` on the TensorFlow that is installed; each way into replay."""

from __future__ import annotations

import collections
import gc

import numpy as np
import pytest
from background import until
from served_table import connections, counts, table, write, write_columns

from framework import replay
from framework.datasets import as_tf
from framework.replay.types import TensorSpec

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.reverb


@pytest.fixture(params=["embedded", "local", "remote"])
def make(request):
    with connections(request.param) as build:
        yield build


def fill(client, n=50, **columns):
    with client.batch_writer(max_in_flight_items=10**6) as writer:
        write_columns(writer, columns, "t") if columns else write(writer, n)


def drawn(client, n):
    """Waits until `n` samples count: TensorFlow deletes what is unused on a thread of its own."""
    gc.collect()
    until(lambda: counts(client)[1] == n)


def test_an_eager_loop_a_graph_and_a_map_get_the_items_and_what_is_not_used_is_given_back(make):
    client = make(replay.Table.queue("t", 1000))
    fill(client, 200)
    dataset = as_tf(client, "t", batch_size=10, prefetch_size=3)

    @tf.function
    def of_iterator(iterator):
        return tf.concat([next(iterator).data["x"], iterator.get_next().data["x"]], 0)

    @tf.function
    def of_dataset(dataset):
        total = tf.constant(0, tf.int64)
        for sample in dataset:
            total += tf.reduce_sum(sample.data["x"])
        return total

    iterator = iter(dataset)
    first = [next(iterator), iterator.get_next()]
    assert type(first[0]) is replay.ReplaySample and tf.nest.map_structure(tf.type_spec_from_value, first[0])
    assert [sample.data["x"].numpy().tolist() for sample in first] == [[*range(10)], [*range(10, 20)]]
    np.testing.assert_array_equal(first[0].info.times_sampled, np.ones(10, np.int32))
    del iterator
    drawn(client, 20)
    iterator = iter(dataset)
    assert of_iterator(iterator).numpy().tolist() == [*range(20, 40)]
    of_iterator, iterator = None, None
    drawn(client, 40)
    assert of_dataset(as_tf(client, "t", batch_size=10, max_samples=29)).numpy() == sum(range(40, 60))
    drawn(client, 60)
    mapped = as_tf(client, "t", batch_size=10, rate_limiter_timeout_ms=50).map(
        lambda sample: sample.data["x"]
    )
    assert np.concatenate([*mapped]).tolist() == [*range(60, 200)]


def test_no_more_is_drawn_than_the_limiter_and_the_prefetch_allow(make):
    client = make(table(limiter=replay.rate_limiters.SampleToInsertRatio(2.0, 1, 50.0)))
    fill(client, 20)
    iterator = iter(as_tf(client, "t", batch_size=16, prefetch_size=1, rate_limiter_timeout_ms=200))
    next(iterator)
    until(lambda: counts(client)[1] == 32)  # One batch is ahead, and the limiter allows 52 - 32.
    assert len([*iterator]) == 3 - 1 + 2  # Its window is 20 * 2 + 50 samples wide: 5 batches in all.
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    assert counts(client)[1] == 80


def test_the_signature_is_the_tables_or_of_a_sample_or_given(make):
    signed = {"b": TensorSpec((2,), np.dtype(bool)), "z": TensorSpec((), np.dtype("<U2"))}
    client = make(table(signature=signed), table("u"))
    assert as_tf(client, "t", batch_size=None).element_spec.data == {
        "b": tf.TensorSpec([2], tf.bool),
        "z": tf.TensorSpec([], tf.string),
    }
    fill(client, b=np.array([[True, False]]), z=np.array(["ab"]))
    sample = next(iter(as_tf(client, "t", batch_size=None)))
    assert sample.data["b"].numpy().tolist() == [True, False] and sample.data["z"].numpy() == b"ab"
    with pytest.raises(replay.DeadlineExceededError):
        as_tf(client, "u", batch_size=8, get_signature_timeout_secs=1)

    Pair = collections.namedtuple("Pair", "one two")
    with client.trajectory_writer(1) as writer:
        writer.append(Pair([np.float16(1), np.uint32(2)], {"n": np.arange(3, dtype=np.int8)}))
        column = writer.history
        writer.create_item("u", 1.0, Pair([each[-1] for each in column.one], {"n": column.two["n"][-1]}))
    dataset = as_tf(client, "u", batch_size=4)
    assert counts(client, "u") == (1, 0)
    for data in (next(iter(dataset)).data, next(iter(dataset.map(lambda sample: sample))).data):
        assert type(data).__name__ == "Pair" and type(data.one) is tuple
        assert data.two["n"].numpy().tolist() == [[0, 1, 2]] * 4 and data.one[1].dtype == tf.uint32
    other = Pair((np.float32(1), np.uint32(2)), {"n": TensorSpec((4,), np.dtype(np.int8))})
    wrong = as_tf(client, "u", batch_size=4, signature=other)
    with pytest.raises(ValueError, match=r"item: got .* at 'one/0', expected"):
        next(iter(wrong))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("batch_size", 0, "at least 1."),
        ("prefetch_size", -1, "at least 0"),
        ("max_in_flight_samples_per_worker", 15, "at least 16"),
        ("num_workers_per_iterator", 4, "Leave it out"),
        ("max_samples_per_stream", 1, "Leave it out"),
        ("rate_limiter_timeout_ms", -2, "at least 0"),
        ("max_samples", 8, "at least 16"),
    ],
)
def test_what_makes_no_sense_here_is_refused(name, value, expected):
    client = replay.EmbeddedClient([table(signature={"x": TensorSpec((), np.dtype(np.int64))})])
    with pytest.raises(ValueError, match=f"{name}: got {value}, expected .*{expected}"):
        as_tf(client, "t", **{"batch_size": 16, name: value})
