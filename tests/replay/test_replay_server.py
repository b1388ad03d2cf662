"""A served replay: the same from this process, through shared memory, over TCP and over TCP with CURVE."""

import numpy as np
import pytest
from background import Background, until
from dm_env import specs
from served_table import connections, counts, num_rows, table, write, write_columns

from framework import replay
from framework.replay.client import ServedClient
from framework.replay.remote import writer as remote_writer


@pytest.mark.parametrize("priorities", [None, []], ids=["default priorities", "priorities"])
def test_no_items_are_no_error_and_change_nothing(connect, priorities):
    client = connect(table(sampler=replay.selectors.Fifo(), max_times_sampled=1))
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.arange(3)})
    assert len(writer.create_items("t", {"x": writer.slice("s", "x", rows[:0])}, priorities)) == 0
    keys = writer.create_items("t", {"x": writer.slice("s", "x", rows[1:])})
    writer.flush()
    sample = client.sample_batch("t", 2)
    assert sample.data["x"].tolist() == [1, 2]
    assert sample.info.key.tolist() == keys.tolist()


def test_batches_come_back_as_they_were_written(connect):
    client = connect(table(size=10_000))
    writer = client.batch_writer()
    observation = np.random.default_rng(0).integers(0, 255, (700, 5, 6), np.uint8)
    rows = writer.append("frames", {"o": observation})
    stacked = rows[np.arange(600)[:, None] + np.arange(4)]
    writer.create_items(
        "t", {"o": writer.slice("frames", "o", stacked), "n": writer.slice("frames", "o", rows[4:604])}
    )
    writer.release("frames", rows)
    writer.flush()
    sample = client.sample_batch("t", 256)
    assert sample.data["o"].shape == (256, 4, 5, 6) and sample.data["o"].flags.writeable
    index = {frame.tobytes(): at for at, frame in enumerate(observation)}
    for item, following in zip(sample.data["o"], sample.data["n"], strict=True):
        first = index[item[0].tobytes()]
        np.testing.assert_array_equal(item, observation[first : first + 4])
        np.testing.assert_array_equal(following, observation[first + 4])


def test_a_padded_batch_belongs_to_its_reader(connect):
    client = connect(table())
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.arange(3)})
    writer.create_items(
        "t", {"x": writer.slice("s", "x", rows[None], [2]), "y": writer.slice("s", "x", rows[:1])}
    )
    writer.flush()
    sample = client.sample_batch("t", 2, pad=True)
    assert sample.data["x"].tolist() == [[0, 1]] * 2 and sample.lengths["y"] is None
    for array in (*sample.info, sample.data["x"], sample.lengths["x"]):
        array[:] = 7  # all are copies


def test_out_is_filled(connect):
    client = connect(table())
    write(client.batch_writer(), 50)
    out = [np.zeros(8, np.int64), np.zeros((8, 3), np.float32)]
    sample = client.sample_batch("t", 8, out=out)
    assert sample.data["x"] is out[0] and out[1].sum() == 24


def test_info_says_the_same_everywhere(connect):
    from dm_env import specs

    signature = {"x": specs.Array((), np.int64), "y": specs.Array((3,), np.float32)}
    limiter = replay.rate_limiters.SampleToInsertRatio(2.0, 5, 100.0)
    client = connect(table(limiter=limiter, signature=signature, max_times_sampled=3))
    write(client.batch_writer(), 20)
    client.sample_batch("t", 4)
    info = client.server_info(timeout=60)["t"]
    here = client.server.tables["t"].info
    assert info._replace(signature=None, table_worker_time=None) == here._replace(
        signature=None, table_worker_time=None
    )
    assert info.signature["y"].shape == (3,) and info.signature["y"].dtype == np.float32
    assert info.rate_limiter_info.sample_stats.completed == 4


def test_priorities_deletes_and_reset(connect):
    client = connect(table(sampler=replay.selectors.Prioritized(1.0)))
    keys = write(client.batch_writer(), 4, priorities=[1, 1, 1, 1])
    client.update_priorities("t", keys, np.array([0.0, 0.0, 7.0, 0.0]))
    sample = client.sample_batch("t", 20)
    assert set(sample.data["x"].tolist()) == {2} and sample.info.priority[0] == 7
    client.mutate_priorities("t", updates={int(keys[0]): 1.0, 12345: 2.0}, deletes=[int(keys[2])])
    assert set(client.sample_batch("t", 20).data["x"].tolist()) == {0}
    with pytest.raises(ValueError, match="priorities"):
        client.update_priorities("t", keys, np.array([1, 1, -1.0, 1]))
    client.reset("t")
    assert client.server_info()["t"].current_size == 0


def test_a_batch_larger_than_the_limiters_window_fills_as_items_come(connect):
    client = connect(replay.Table.queue("t", 4))
    batch = Background(lambda: client.sample_batch("t", 30, timeout=20))
    writer = client.batch_writer(max_in_flight_items=2)
    for n in range(30):
        write(writer, 1, start=n)
    writer.flush(timeout=10)
    np.testing.assert_array_equal(batch.result().data["x"], np.arange(30))
    assert counts(client) == (30, 30)


def test_a_batch_that_does_not_fill_in_time_takes_nothing(connect):
    client = connect(replay.Table.queue("t", 6))
    assert not client.can_sample("t", 1) and client.can_insert("t", 6)
    write(client.batch_writer(), 6)
    assert client.can_sample("t", 6) and not client.can_insert("t", 1)
    for timeout in (0.1, 0):
        with pytest.raises(replay.DeadlineExceededError, match=r"8 items \(6 went through\): size 0"):
            client.sample_batch("t", 8, timeout=timeout)
    assert counts(client) == (6, 0)
    np.testing.assert_array_equal(client.sample_batch("t", 6).data["x"], np.arange(6))
    with pytest.raises(RuntimeError, match="'no' was not found"):
        client.sample_batch("no", 1)


def test_a_waiting_sampler_is_woken_by_every_way_in(connect):
    client = connect(table())
    for way in ("embedded", "local", "remote"):
        client.reset("t")
        sampling = Background(client.sample_batch, "t", 1)
        if way == "embedded":
            other = client.server.localhost_client()
        else:
            other = ServedClient(client.server.address, client.keys, local=way == "local")
        writer = other.batch_writer()
        write(writer, 1)
        writer.close(timeout=5)
        assert len(sampling.result(10).info.key) == 1
        other.close()


def test_a_writer_waits_while_too_much_is_in_flight(connect):
    client = connect(replay.Table.queue("t", 4))
    writer = client.batch_writer(max_in_flight_items=3)
    created = []

    def produce():
        for n in range(20):
            write(writer, 1, start=n)
            created.append(n)

    writing = Background(produce)
    until(lambda: len(created) > 3)
    reader = client.server.localhost_client()
    assert len(created) <= 4 + 3 + 1
    seen = [reader.sample_batch("t", 1, timeout=10).data["x"][0] for _ in range(20)]
    assert seen == list(range(20))
    writing.result()
    assert writer.close(timeout=60) == 0


WRONG_COLUMNS = {
    "dtype": ({"x": np.zeros(2, np.float32)}, "'x': got float32.*expected int64"),
    "shape": ({"x": np.zeros((2, 2), np.int64)}, "as in the first append"),
    "ragged append": ({"x": np.zeros(2, int), "z": np.zeros(3)}, "with the same n"),
    "objects": ({"x": np.arange(2), "o": np.array([None, 1])}, "'o'.*object"),
    "nothing": ({}, "got columns of the shapes {}"),
}


def test_wrong_writes_are_errors_at_the_caller_and_change_nothing(connect):
    client = connect(table())
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.arange(2)})
    for columns, message in WRONG_COLUMNS.values():
        with pytest.raises(ValueError, match=message):
            writer.append("s", columns)
    for priorities in ([np.nan, 1.0], [-1.0, 1.0], [1.0]):
        with pytest.raises(ValueError, match="priorities"):
            writer.create_items("t", {"x": writer.slice("s", "x", rows)}, priorities)
    with pytest.raises(ValueError, match=r"'u' was not found; .*'t'"):
        writer.create_items("u", {"x": writer.slice("s", "x", rows)})
    writer.create_items("t", {"x": writer.slice("s", "x", rows)})
    writer.flush()
    assert client.server_info()["t"].current_size == 2


def test_items_that_the_server_refuses_count_as_dropped_and_keep_no_rows():
    with connections("local") as connect:
        client = connect(table(signature={"x": specs.Array((2,), np.int64)}))
        writer = client.batch_writer()
        for _ in range(50):
            write_columns(
                writer, {"x": np.arange(40)}
            )  # Few enough to go with the message that releases them.
            with pytest.raises(ValueError, match="signature"):
                writer.flush()
        assert num_rows(client.server._client) <= 1200  # Blocks that writers lease.
        assert writer.close() == 2000


def test_rows_are_used_again_also_those_of_samples(connect):
    client = connect(table(size=100))
    writer = client.batch_writer()
    for n in range(100):
        write(writer, 20, start=n)
        writer.flush()
        client.sample_batch("t", 20)
    assert num_rows(client.server._client) <= 1200  # 100 items, and blocks that writers lease


@pytest.mark.parametrize("connect", ["local", "remote"], indirect=True)
def test_a_writer_refuses_one_shape_too_many_and_goes_on(connect, monkeypatch):
    monkeypatch.setattr(remote_writer, "MAX_LAYOUTS", 2)
    writer = connect(table()).batch_writer()
    rows = writer.append("s", {"x": np.arange(4)})
    for n in (1, 2):
        writer.create_items("t", {"x": writer.slice("s", "x", rows[None, :n])})
    with pytest.raises(ValueError, match="got more than 2 combinations of their columns' lengths"):
        writer.create_items("t", {"x": writer.slice("s", "x", rows[None, :3])})
    writer.create_items("t", {"x": writer.slice("s", "x", rows[None, :2])})
    writer.flush(5)
    assert writer.num_pending == 0
