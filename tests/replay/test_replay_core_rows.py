"""The row store and the batched writer, embedded: layouts, signatures, and rows that are used again."""

import numpy as np
import pytest
from embedded_table import contents, make

from framework import replay
from framework.replay import selectors
from framework.replay.rows.store import Allocator, RowStore, span


def test_strings_are_padded_with_empty_strings():
    client = make(sampler=selectors.Fifo(), times=1)
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.array(["a", "b"])})
    for n in (1, 2):
        writer.create_items("t", [writer.slice("s", "x", rows[None, :n])])
    assert client.sample_batch("t", 2, pad=True).data[0].tolist() == [["a", ""], ["a", "b"]]


def test_items_of_different_structures_are_no_batch():
    client = make(sampler=selectors.Fifo(), times=1)
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.arange(5)})
    writer.create_items("t", [writer.slice("s", "x", rows[:1])])
    writer.create_items("t", {"x": writer.slice("s", "x", rows[:1])})
    with pytest.raises(ValueError, match="different kinds"):
        client.sample_batch("t", 2, pad=True)
    assert client.server_info()["t"].current_size == 2, "a batch that cannot be put together was not sampled"


def test_max_bytes():
    RowStore(max_bytes=1200).stream("s", {"x": ((), np.int64)}).lease(
        100
    )  # 8 bytes each, and 4 for the count
    store = RowStore(max_bytes=100_000)
    client = make(size=10_000, store=store)
    writer = client.batch_writer()
    total = 0
    with pytest.raises(replay.StoreFullError, match="max_bytes=100000"):
        for _ in range(200):
            rows = writer.append("s", {"x": np.zeros((10, 16))})
            total += len(rows)
    assert store.num_bytes <= 100_000
    assert total >= 100_000 // (16 * 8 + 4) - 10, "the budget can be used up"
    writer.release("s", rows)
    writer.append("s", {"x": np.zeros((10, 16))})


def test_rows_at_the_end_give_their_memory_back_and_take_it_again():
    store = RowStore()
    stream = store.stream("s", {"x": ((16,), np.float32)})
    rows = stream.lease(100)
    stream.release(np.concatenate([rows[10:20], rows[50:]]))
    assert stream.trim() > 0 and store.num_bytes == 50 * stream.row_bytes
    held = {*rows[:10].tolist(), *rows[20:50].tolist(), *stream.lease(70).tolist()}
    assert len(held) == stream.num_rows == 110, "no row is leased twice"
    assert store.num_bytes >= stream.num_leased * stream.row_bytes


def test_rows_that_find_no_memory_do_not_count():
    class Full(Allocator):
        is_full = True

        def reserve(self, stream, column, begin, end):
            if end and self.is_full:
                raise replay.StoreFullError("no memory")

    allocator = Full()
    store = RowStore(max_bytes=10**9, allocator=allocator)
    stream = store.stream("s", {"x": ((4,), np.float32)})
    for _ in range(2):
        with pytest.raises(replay.StoreFullError, match="no memory"):
            stream.lease(10)
        assert store.num_bytes == 0
    allocator.is_full = False
    stream.lease(10)
    allocator.is_full = True
    for _ in range(2):
        with pytest.raises(replay.StoreFullError, match="no memory"):
            store.stream("s", {"y": ((4,), np.float32)})
        assert store.num_bytes == stream.num_reserved * stream.row_bytes and list(stream.columns) == ["x"]


def test_rows_are_written_with_their_dtype_and_shape():
    stream = RowStore().stream("s", {"x": ((3,), np.float32)})
    rows = stream.lease(2)
    stream.write("x", rows, np.ones((2, 3), np.float32))
    for shape, kind in (((2, 3), "f8"), ((2, 3), "i4"), ((2, 1), "f4"), ((1, 3), "f4")):
        with pytest.raises(ValueError, match=r"stream 's', column 'x': got .*, expected float32\[2, 3\]"):
            stream.write("x", rows, np.zeros(shape, kind))
    assert (stream.columns["x"][rows] == 1).all()


def test_rows_are_counted():
    stream = RowStore(capacity=4096).stream("s", {"x": ((), np.float32)})
    rows = stream.lease(1500)
    rng = np.random.default_rng(0)
    picks = rng.permutation(np.concatenate([rows, rows[:700], rows[:9]]))
    stream.acquire(picks)
    stream.acquire(rows[::2])  # not contiguous
    stream.release(rows[::2])
    stream.release(rows)
    left = np.bincount(picks, minlength=1500)
    assert stream.num_rows == 1500
    for part in np.array_split(picks, 7):
        stream.release(part)
        left -= np.bincount(part, minlength=1500)
        assert stream.num_rows == np.count_nonzero(left)
    assert stream.num_rows == 0
    assert sorted(stream.lease(1500).tolist()) == rows.tolist()


@pytest.mark.parametrize("wrong", [[-1], [2], [1 << 40]], ids=str)
@pytest.mark.parametrize("call", ["append", "create_items", "release"])
def test_rows_that_the_writer_does_not_hold_are_refused(call, wrong):
    client = make()
    writer, other = client.batch_writer(), client.batch_writer()
    rows = writer.append("s", {"x": np.arange(2)})
    other.append("s", {"x": np.arange(1)})
    calls = {
        "append": lambda rows: writer.append("s", {"x": np.arange(3)}, rows),
        "create_items": lambda rows: writer.create_items("t", writer.slice("s", "x", rows)),
        "release": lambda rows: writer.release("s", rows),
    }
    with pytest.raises(ValueError, match="does not hold"):
        calls[call](np.array([*rows, *wrong]))
    with pytest.raises(ValueError, match="does not hold"):
        other.create_items("t", writer.slice("s", "x", rows))
    writer.create_items("t", writer.slice("s", "x", rows))
    assert contents(client) == [0, 1]


def test_a_row_that_is_released_twice_in_one_call_is_refused():
    client = make()
    writer = client.batch_writer()
    rows = writer.append("s", {"x": np.arange(2)})
    writer.create_items("t", writer.slice("s", "x", rows))
    with pytest.raises(ValueError, match="one row twice"):
        writer.release("s", rows[[0, 1, 0]])
    writer.append("s", {"x": np.full(2, 99)})
    assert contents(client) == [0, 1], "the rows of items are not used again"
    writer.release("s", rows)


def test_a_row_that_is_dropped_twice_in_one_call_is_free_once():
    stream = RowStore(capacity=64).stream("s", {"x": ((), np.float32)})
    rows = stream.lease(4)
    stream.acquire(rows[[2, 2, 1, 0, 3]])
    stream.release(rows)
    stream.release(rows[[2, 1, 3, 2, 0]])
    assert stream.num_rows == 0
    assert stream.lease(4).tolist() == rows.tolist(), "ascending: consecutive rows copy faster"


@pytest.mark.parametrize(
    "rows, expected", [([5], True), ([5, 6, 7], True), ([5, 7, 6, 8], False), ([3, 3, 5], False), ([], False)]
)
def test_consecutive_rows_become_a_slice(rows, expected):
    assert isinstance(span(np.array(rows, np.int64)), slice) == expected
