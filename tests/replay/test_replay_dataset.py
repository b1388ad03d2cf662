"""`Dataset`: exact counts, giving back, mixing, padding, ends and errors; on every way in."""

import contextlib
import importlib.util
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from background import Background, until
from hypothesis import example, given
from hypothesis import strategies as st
from served_table import connections, counts, table, write

from framework import replay
from framework.datasets import Dataset, as_tf, table_numbers
from framework.datasets.mixture import Mixture
from framework.datasets.transfer import AlignedTransfer, PinnedTransfer
from framework.replay.tables.rate_limiters import SAMPLERS


@pytest.fixture(params=["embedded", "local", "remote"])
def make(request):
    with connections(request.param) as build:
        yield build


def fill(client, n, table="t", start=0):
    writer = client.batch_writer(max_in_flight_items=10**6)
    write(writer, n, table, start)
    writer.close(timeout=5)


def test_only_what_is_handed_out_counts_and_the_rest_is_given_back(make):
    client = make(table(limiter=replay.rate_limiters.SampleToInsertRatio(10, 1, 1000)))
    fill(client, 50)
    dataset = Dataset(client, "t", 16, prefetch=4)
    for _ in range(3):
        next(dataset)
    dataset.close()
    assert counts(client) == (50, 48)
    sample = client.sample_batch("t", 1000)
    assert counts(client) == (50, 1048)
    assert sample.info.times_sampled.sum() >= 1000


def test_a_queue_loses_nothing_to_prefetching_and_keeps_its_order(make):
    client = make(replay.Table.queue("t", 100))
    fill(client, 60)
    with Dataset(client, "t", 10, prefetch=3) as dataset:
        first = [next(dataset).data["x"] for _ in range(2)]
    np.testing.assert_array_equal(np.concatenate(first), np.arange(20))
    with Dataset(client, "t", 10, prefetch=3, rate_limiter_timeout=0.1) as dataset:
        rest = [sample.data["x"] for sample in dataset]
    np.testing.assert_array_equal(np.concatenate(rest), np.arange(20, 60))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ends_when_the_time_is_over(make, prefetch):
    client = make(replay.Table.queue("t", 100))
    fill(client, 25)
    with Dataset(client, "t", 10, prefetch=prefetch, rate_limiter_timeout=0.05) as dataset:
        assert len(list(dataset)) == 2
        with pytest.raises(StopIteration):
            next(dataset)
    assert counts(client)[1] == 20


@pytest.mark.parametrize("asks", [True, False])
def test_without_a_timeout_the_thread_asks_when_the_consumer_does(make, monkeypatch, asks):
    client = make(replay.Table.queue("t", 100))
    fill(client, 10)
    with Dataset(client, "t", 10, prefetch=2, rate_limiter_timeout=0) as dataset:
        draws = threading.Semaphore(0)
        draw = dataset._source.draw
        monkeypatch.setattr(dataset._source, "draw", lambda *args: (draws.release(), draw(*args))[1])
        next(dataset)
        for _ in range(2):
            assert draws.acquire(timeout=60)
        assert not draws.acquire(timeout=0.2), "it drew again without a request"
        fill(client, 10)
        while asks and not dataset.ready():
            assert draws.acquire(timeout=60)
        next(dataset)
        assert list(dataset) == []


@pytest.mark.parametrize("how", ["interrupt", "stop", "close"])
def test_a_waiting_dataset_ends_with_the_program(make, how):
    client = make(table())
    dataset = Dataset(client, "t", 8)
    reading, waiting = Background(list, dataset), client.server.tables["t"].waiting
    until(lambda: waiting.counts[SAMPLERS])
    Background({"interrupt": client.interrupt, "stop": waiting.close, "close": dataset.close}[how]).result(10)
    assert reading.result(10) == []
    dataset.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_wait_that_nothing_can_end_says_which_tables_wait(make, monkeypatch, caplog, prefetch):
    """A writer that waits for room in one table cannot fill the other, from which the dataset draws."""
    monkeypatch.setattr(Dataset, "stall_s", 0.05)
    client = make(replay.Table.queue("a", 1), table(size=100, limiter=replay.rate_limiters.MinSize(5)))
    writer = client.batch_writer(max_in_flight_items=1)
    writing = Background(lambda: [write(writer, 1, name, at) for at in range(5) for name in "at"])
    dataset = Dataset(client, "t", 4, prefetch=prefetch)
    batch = Background(next, dataset)
    until(lambda: len(caplog.messages) > 1)  # Once more, if the wait lasts.
    for what in ("'a' refuses the next insert", "'t' refuses the next sample: size 1 < ", "4 items"):
        assert all(what in text for text in caplog.messages)
    assert not batch.done()
    for _ in range(5):
        client.sample_batch("a", 1, timeout=60)
    assert batch.result().data["x"].shape == (4,)
    dataset.close()
    writing.result()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_close_ends_the_iteration_of_another_thread(make, prefetch):
    client = make(table())
    fill(client, 100)
    for delay in range(20):
        dataset = Dataset(client, "t", 8, prefetch=prefetch)
        consumed = Background(lambda dataset=dataset: sum(1 for _ in dataset))
        threading.Event().wait(delay / 2000)
        dataset.close()
        consumed.result()
        assert next(dataset, None) is None


def test_no_more_batches_are_fetched_ahead_than_the_prefetch(make):
    client = make(table())
    fill(client, 10)
    with Dataset(client, "t", 8, prefetch=2) as dataset:
        dataset.ready()
        until(lambda: dataset._changed._waiters)  # The thread has enough.
        assert counts(client)[1] == 16


def test_errors_of_the_thread_are_raised_in_the_consumer(make):
    client = make(table())
    with Dataset(client, "no such table", 8) as dataset, pytest.raises(RuntimeError, match="no such table"):
        next(dataset)


def test_ready(make):
    client = make(table())
    with Dataset(client, "t", 8, prefetch=0) as dataset:
        assert not dataset.ready()
        fill(client, 10)
        assert dataset.ready()
        next(dataset)


def test_mixed_tables_keep_their_weights_exactly():
    client = replay.EmbeddedClient([table("a"), table("b")])
    fill(client, 50, "a")
    fill(client, 50, "b", start=1000)
    with Dataset(client, {"a": 0.7, "b": 0.3}, 8, prefetch=2) as dataset:
        from_b = 0
        for _ in range(50):
            sample = next(dataset)
            assert sample.info.key.shape == sample.data["x"].shape == (8,)
            mine = sample.data["x"] >= 1000
            assert (np.sort(mine) == mine).all()  # the first table comes first
            from_b += mine.sum()
        dataset.update_priorities(sample.info.key, sample.data["x"] + 1.0)
    assert abs(from_b - 0.3 * 400) <= 1
    assert counts(client, "a")[1] + counts(client, "b")[1] == 400
    for name, low, high in (("a", 1, 51), ("b", 1001, 1051)):
        drawn = client.sample_batch(name, 500)
        changed = drawn.info.priority != 1.0
        np.testing.assert_array_equal(drawn.info.priority[changed], drawn.data["x"][changed] + 1)
        assert changed.any() and (drawn.info.priority[changed] >= low).all()
        assert (drawn.info.priority[changed] <= high).all()


def test_the_first_batches_of_a_mixture_may_be_of_one_table():
    client = replay.EmbeddedClient([table("a"), table("b")])
    fill(client, 50, "a")
    fill(client, 50, "b", start=1000)
    with Dataset(client, {"a": 0.25, "b": 0.75}, 8, only_first=3) as dataset:
        samples = [next(dataset) for _ in range(7)]
    from_b = [int((sample.data["x"] >= 1000).sum()) for sample in samples]
    assert from_b == [0, 0, 0, 6, 6, 6, 6]
    for sample in samples:
        np.testing.assert_array_equal(table_numbers(sample.info.key), sample.data["x"] >= 1000)
    assert counts(client, "b")[1] == 24  # What was fetched ahead is given back.


def test_keys_of_all_64_bits_tell_tables_apart_and_set_priorities(monkeypatch):
    """Those of dm-reverb. Here, the high bits are added where the mixture draws, and must come back."""
    high = np.uint64(0xA5 << 56)
    client = replay.EmbeddedClient([table("a"), table("b")])
    fill(client, 10, "a")
    fill(client, 10, "b", start=1000)
    mixture = Mixture({(client, "a"): 0.5, (client, "b"): 0.5})
    (source,) = mixture._sources
    draw, update = source.draw, client.update_priorities

    def draws(*arguments):
        sample, drawn = draw(*arguments)
        return sample._replace(info=sample.info._replace(key=sample.info.key | high)), drawn

    def updates(table, keys, priorities):
        assert (keys & high == high).all()
        update(table, keys & ~high, priorities)

    monkeypatch.setattr(source, "draw", draws)
    monkeypatch.setattr(client, "update_priorities", updates)
    sample, drawn = mixture.draw("", 8, None, None, False)
    np.testing.assert_array_equal(table_numbers(sample.info.key), sample.data["x"] >= 1000)
    mixture.update_priorities("", sample.info.key, sample.data["x"] + 2.0)
    mixture.release(drawn)
    for name in ("a", "b"):
        seen = client.sample_batch(name, 200)
        changed = seen.info.priority != 1.0
        assert changed.any()
        np.testing.assert_array_equal(seen.info.priority[changed], seen.data["x"][changed] + 2)


def test_a_mixture_checks_the_priorities_of_all_of_its_tables():
    client = replay.EmbeddedClient([table("a"), table("b")])
    fill(client, 3, "a")
    fill(client, 4, "b")
    dataset = Dataset(client, {"a": 1.0, "b": 1.0}, 4, prefetch=0)
    keys = next(dataset).info.key
    for wrong in ([5.0, 5.0, 5.0, -1.0], [5.0] * 3):
        with pytest.raises(ValueError, match="'a, b', priorities"):
            dataset.update_priorities(keys, wrong)
    assert {info.max_priority for info in client.server_info().values()} == {1.0}


def test_a_mixture_draws_from_several_clients_by_its_shares(make):
    here, elsewhere = make(table()), replay.EmbeddedClient([table(), table("b")])
    fill(here, 10)
    fill(elsewhere, 10, start=1000)
    fill(elsewhere, 10, "b", start=2000)
    both = Mixture({(here, "t"): 0.5, (elsewhere, "t"): 0.25, (elsewhere, "b"): 0.25})
    with Dataset(both, "", 8, prefetch=2) as dataset:
        for _ in range(5):
            sample = next(dataset)
            assert (sample.data["x"] // 1000).tolist() == [0] * 4 + [1] * 2 + [2] * 2
            dataset.update_priorities(sample.info.key, sample.data["x"] + 2.0)
    for client, name in ((here, "t"), (elsewhere, "t"), (elsewhere, "b")):
        seen = client.sample_batch(name, 100)
        changed = seen.info.priority != 1.0
        assert changed.any()
        np.testing.assert_array_equal(seen.info.priority[changed], seen.data["x"][changed] + 2)


def test_a_mixture_with_one_table_alone_waits_for_no_other():
    client = replay.EmbeddedClient([table("a"), table("b")])
    fill(client, 10, "a")
    with Dataset(client, {"a": 0.5, "b": 0.5}, 4, only_first=1, rate_limiter_timeout=0.05) as dataset:
        assert len([*dataset]) == 1


@given(
    weights=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60),
)
# Three of the eight had more than their share together, which made the batch too large.
@example(weights=[0.01, 0.01, 0.06, 0.46, 0.01, 0.89, 0.8, 0.01], sizes=[4] * 80)
def test_every_batch_of_a_mixture_has_its_size_and_every_table_its_share(weights, sizes):
    names = [f"t{at}" for at in range(len(weights))]
    client = replay.EmbeddedClient([table(name) for name in names])
    mixture = Mixture({(client, name): weight for name, weight in zip(names, weights, strict=True)})
    total = np.zeros(len(weights))
    for n in sizes:
        counts, mixture._owed = mixture._counts(n)
        assert counts.sum() == n and (counts >= 0).all()
        total += counts
    share = np.array(weights) / sum(weights)
    assert np.abs(total - share * sum(sizes)).max() < len(weights)


def test_ragged_items_of_several_tables_are_padded_or_refused():
    client = replay.EmbeddedClient([table("a"), table("b")])
    write_ragged(client, [3], "a")
    write_ragged(client, [5], "b")
    with Dataset(client, {"a": 0.5, "b": 0.5}, 4, ragged="pad") as dataset:
        batch = next(dataset)
    assert batch.lengths["x"].tolist() == [3, 3, 5, 5]
    assert batch.data["x"].tolist() == 2 * [[3, 3, 3, 0, 0]] + 2 * [[5] * 5]
    with (
        Dataset(client, {"a": 0.5, "b": 0.5}, 4) as dataset,
        pytest.raises(ValueError, match="different lengths from several tables"),
    ):
        next(dataset)
    assert counts(client, "a")[1] == counts(client, "b")[1] == 2


@pytest.fixture
def transfer(monkeypatch):
    """A transfer to a GPU, for which other objects stand."""
    empty = torch.empty
    event = SimpleNamespace(record=lambda: None, query=lambda: True, synchronize=lambda: None)
    stream = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    return PinnedTransfer("cpu")


def test_batches_of_items_of_other_lengths_do_not_fill_the_buffers_of_those_before(transfer):
    client = replay.EmbeddedClient([replay.Table.queue("t", 10)])
    writer = client.trajectory_writer(3)
    for x in range(5):
        writer.append(x)
        writer.create_item("t", 1.0, writer.history[-(1, 2, 1, 3, 3)[x] :])
    writer.flush()
    with Dataset(client, "t", 1, device="cpu", prefetch=0) as dataset:
        dataset._pinned = transfer
        batches = [next(dataset).data[0].tolist() for _ in range(5)]
        assert batches == [[0], [0, 1], [2], [1, 2, 3], [2, 3, 4]]
    with pytest.raises(ValueError, match=r"out, leaf .*\(1, 2\), expected \(1, 1\)"):
        writer.create_item("t", 1.0, writer.history[-1:])
        client.sample_batch("t", 1, out=[np.zeros((1, 2), np.int64)])


def write_ragged(client, lengths, table="t"):
    writer = client.batch_writer()
    for length in lengths:
        rows = writer.append("s", {"x": np.full(length, length)})
        padded = np.concatenate([rows, np.full(6 - length, rows[-1])])[None]
        writer.create_items(table, {"x": writer.slice("s", "x", padded, lengths=[length])})
        writer.release("s", rows)
    writer.close(timeout=5)


def test_ragged_items_are_padded_or_refused(make):
    client = make(table())
    write_ragged(client, [2, 5, 3])
    with Dataset(client, "t", 64, ragged="pad") as dataset:
        sample = next(dataset)
        lengths = sample.lengths["x"]
        assert set(lengths.tolist()) == {2, 3, 5} and sample.data["x"].shape == (64, 5)
        mask = np.arange(5) < lengths[:, None]
        np.testing.assert_array_equal(sample.data["x"], np.where(mask, lengths[:, None], 0))
    with Dataset(client, "t", 64) as dataset, pytest.raises(ValueError, match="different lengths"):
        next(dataset)
    assert counts(client)[1] == 64


def test_tensors():
    client = replay.EmbeddedClient([table()])
    fill(client, 100)
    with Dataset(client, "t", 16, device="cpu") as dataset:
        sample = next(dataset)
    assert isinstance(sample.data["y"], torch.Tensor) and sample.data["y"].dtype == torch.float32
    assert isinstance(sample.info.key, np.ndarray)
    client.update_priorities("t", sample.info.key, sample.data["x"].double().numpy() + 5)


def test_no_thread_where_nothing_is_concurrent():
    client = replay.EmbeddedClient([table()], concurrent=False)
    fill(client, 10)
    before = {*threading.enumerate()}  # One of another test may end meanwhile.
    with Dataset(client, "t", 4) as dataset:
        assert dataset.ready()
        next(dataset)
        assert {*threading.enumerate()} <= before
    assert counts(client)[1] == 4


WRONG = {
    "batch size": {"batch_size": 0},
    "in flight": {"batch_size": 8, "max_in_flight": 7},
    "ragged": {"batch_size": 8, "ragged": "maybe"},
    "prefetch": {"batch_size": 8, "prefetch": -1},
    "timeout": {"batch_size": 8, "rate_limiter_timeout": -1},
    "no table": {"batch_size": 8, "table": {}},
    "only first": {"batch_size": 8, "only_first": -1, "table": {"a": 1}},
    "weight": {"batch_size": 8, "table": {"a": 1, "b": 0}},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    arguments = {"table": "t", **WRONG[name]}
    with pytest.raises(ValueError, match="got"):
        Dataset(replay.EmbeddedClient([table()]), **arguments)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_without_tensorflow_the_error_says_what_to_install(make):
    with pytest.raises(ImportError, match="pip install tensorflow"):
        as_tf(make(table()), "t", batch_size=8)


def test_what_tensorflow_takes_lies_where_it_needs_no_copy(make):
    client = make(table())
    fill(client, 10)
    with Dataset(client, "t", 3, prefetch=0) as dataset:
        dataset._transfer = AlignedTransfer()
        batches = [next(dataset) for _ in range(3)]
    arrays = [array for batch in batches for array in (*batch.info, *batch.data.values())]
    assert {array.ctypes.data % 64 for array in arrays} == {0}
    gathered = [batch.data["y"] for batch in batches[1:]]
    assert not np.shares_memory(*gathered) and all(array.flags.writeable for array in gathered)
    assert all(0 <= x < 10 for batch in batches for x in batch.data["x"])
