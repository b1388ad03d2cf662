"""Columns that are compressed at rest."""

import numpy as np
import pytest
import served_table

from framework import replay
from framework.replay.client import ServedClient
from framework.replay.rows.compression import CompressedColumn
from framework.replay.rows.store import RowStore

SHAPE = (20, 20)


def frames(n, start=0):
    """Frames that compress, each different."""
    array = np.zeros((n, *SHAPE), np.uint8)
    array[:, 3] = (np.arange(start, start + n) % 251)[:, None]
    return array


def table():
    return served_table.table(size=50, sampler=replay.selectors.Fifo())


def write(writer, n, start=0):
    columns = {"x": frames(n, start), "n": np.arange(start, start + n)}
    served_table.write_columns(writer, columns)


def embedded(compress=("x*",), checkpointer=None, **options):
    store = RowStore(compress=compress, **options)
    return replay.EmbeddedClient([table()], store=store, checkpointer=checkpointer)


def column(account=lambda n: None):
    return CompressedColumn((100, *SHAPE), np.dtype(np.uint8), account)


READS = {
    "one": np.array([4]),
    "some": np.array([5, 0, 9]),
    "repeats": np.array([3, 3, 1, 3]),
    "stacks": np.array([[0, 1, 2], [1, 2, 3]]),
    "none": np.array([], np.int64),
}


@pytest.mark.parametrize("name", READS)
def test_take_is_that_of_an_array(name):
    packed, plain = column(), np.zeros((100, *SHAPE), np.uint8)
    packed[0:10] = plain[0:10] = frames(10)
    rows = READS[name]
    np.testing.assert_array_equal(packed.take(rows, 0), plain.take(rows, 0))
    wide = np.empty((*rows.shape, 2, *SHAPE), np.uint8)
    into = wide[..., 1, :, :]  # not contiguous
    packed.take(rows, 0, into, "clip")
    np.testing.assert_array_equal(into, plain.take(rows, 0))


def test_rows_set_by_number_come_back_and_cleared_ones_are_zeros():
    booked = []
    packed = column(booked.append)
    packed[np.array([7, 2])] = frames(2, 5)
    read = packed.take(np.array([7, 2, 3]))
    np.testing.assert_array_equal(read, [*frames(2, 5), np.zeros(SHAPE)])
    packed[7:8] = frames(1, 9)
    np.testing.assert_array_equal(packed.take(np.array([7])), frames(1, 9))
    packed.clear(np.array([2, 7, 50]))
    assert not packed.take(np.arange(10)).any()
    assert sum(booked) == 0


def test_samples_are_what_was_written_and_memory_is_little():
    client = embedded()
    with client.batch_writer() as writer:
        for start in range(0, 400, 40):
            write(writer, 40, start)
    assert isinstance(client.store.streams["s"].columns["x"], CompressedColumn)
    assert isinstance(client.store.streams["s"].columns["n"], np.ndarray)
    sample = client.sample_batch("t", 1)
    np.testing.assert_array_equal(sample.data["x"], frames(1, 350))
    assert client.store.streams["s"].num_rows == 50
    packed = sum(len(data) for data in client.store.streams["s"].columns["x"]._rows if data)
    assert packed < 50 * 400 / 4


def test_freed_rows_give_their_bytes_back():
    client = embedded()
    writer = client.batch_writer()
    write(writer, 50)
    full = client.store.num_bytes
    for start in range(0, 500, 50):
        write(writer, 50, start)
    assert client.store.num_bytes <= full + 64 * 50
    client.reset("t")
    assert not any(client.store.streams["s"].columns["x"]._rows)


def test_max_bytes_counts_what_is_kept():
    client = embedded(max_bytes=1 << 16)
    writer = client.batch_writer()
    noise = np.random.default_rng(0).integers(0, 255, (400, *SHAPE), np.uint8)
    with pytest.raises(replay.StoreFullError, match="max_bytes"):
        writer.append("s", {"x": noise})
    assert client.store.streams["s"].num_rows == 0
    rows = writer.append("s", {"x": noise[:20]})
    np.testing.assert_array_equal(client.store.streams["s"].columns["x"].take(rows), noise[:20])


def test_a_string_instead_of_patterns_is_an_error():
    with pytest.raises(ValueError, match="compress"):
        RowStore(compress="x")


@pytest.mark.parametrize("local", [None, False], ids=["same machine", "remote"])
def test_other_processes_read_and_write_through_messages(local):
    with replay.Server([table()], compress=("x*",)) as server:
        client = ServedClient(server.address, local=local)
        writer = client.batch_writer()
        write(writer, 30)
        writer.flush(timeout=10)
        sample = client.sample_batch("t", 1, timeout=10)
        np.testing.assert_array_equal(sample.data["x"], frames(1))
        direct = server.localhost_client().sample_batch("t", 1)
        np.testing.assert_array_equal(direct.data["x"], frames(1))
        assert writer.close(timeout=10) == 0
        client.close()


def test_a_checkpoint_is_restored_with_and_without_compression(tmp_path):
    checkpointer = replay.checkpointers.DefaultCheckpointer(str(tmp_path))
    client = embedded(checkpointer=checkpointer)
    write(client.batch_writer(), 30)
    client.checkpoint()
    for patterns in ((), ("x",)):
        again = embedded(patterns, replay.checkpointers.DefaultCheckpointer(str(tmp_path)))
        np.testing.assert_array_equal(again.sample_batch("t", 1).data["x"], frames(1))
        assert again.server_info()["t"].current_size == 30


@pytest.mark.parametrize("which", ["full", "behind it"])
def test_items_of_rows_that_found_no_room_are_refused_in_later_messages_too(which, monkeypatch):
    with replay.Server([table()], compress=("x*",), max_bytes=1 << 16) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer()
        noise = np.random.default_rng(0).integers(0, 255, (400, *SHAPE), np.uint8)
        written = {
            "full": writer.append("s", {"x": noise, "n": np.arange(400)}),
            "behind it": writer.append("s", {"x": frames(5), "n": np.arange(5)}),
        }
        # The answers are on their way while the writer goes on.
        monkeypatch.setattr(writer, "_collect", lambda *arguments: False)
        writer._push()
        rows = written[which]
        writer.create_items("t", {name: writer.slice("s", name, rows) for name in ("x", "n")})
        for rows in written.values():
            writer.release("s", rows)
        writer._push()
        monkeypatch.undo()
        with pytest.raises(replay.StoreFullError):
            writer.flush(timeout=60)
        assert client.server_info()["t"].current_size == 0
        # The same rows hold other data later.
        write(writer, 50)
        writer.flush(timeout=60)
        np.testing.assert_array_equal(client.sample_batch("t", 1, timeout=60).data["x"], frames(1))
        assert server._store.streams["s"].num_rows < 1500
        client.close()


def test_a_message_without_room_leaves_its_layout_to_later_ones():
    with replay.Server([table()], compress=("x*",), max_bytes=1 << 16) as server:
        client = ServedClient(server.address)
        writer = client.batch_writer()
        noise = np.random.default_rng(0).integers(0, 255, (400, *SHAPE), np.uint8)
        served_table.write_columns(writer, {"x": noise})
        with pytest.raises(replay.StoreFullError):
            writer.flush(timeout=60)
        served_table.write_columns(writer, {"x": frames(5)})
        writer.flush(timeout=60)
        assert client.server_info()["t"].current_size == 5
        client.close()
