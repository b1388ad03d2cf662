"""TrajectoryWriter and Reverb's client methods, embedded."""

import numpy as np
import pytest
from background import until
from served_table import num_rows

from framework import replay
from framework.replay import rate_limiters as rl
from framework.replay import selectors


def make(limiter=None, size=100, times=1, **options):
    tables = [
        replay.Table("t", selectors.Fifo(), selectors.Fifo(), size, limiter or rl.MinSize(1), times),
        replay.Table("u", selectors.Fifo(), selectors.Fifo(), size, rl.MinSize(1), times),
    ]
    return replay.EmbeddedClient(tables, **options)


def fill(writer, n, begin=0):
    for i in range(begin, begin + n):
        writer.append({"a": i, "x": np.full(3, i, np.float32)})


def one(client, table="t"):
    return next(client.sample(table, emit_timesteps=False, unpack_as_table_signature=True, timeout=0)).data


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (-1, 4),
        (0, 0),
        (slice(-3, None), [2, 3, 4]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        ([2, 1, 0], [2, 1, 0]),
        ([0, 0, -1], [0, 0, 4]),
        (slice(1, 2), [1]),
    ],
    ids=str,
)
def test_any_reference_reads_what_it_says(index, expected):
    client = make()
    writer = client.trajectory_writer(5)
    fill(writer, 5)
    column = writer.history["a"][index]
    assert column.numpy().tolist() == expected
    assert column.shape == np.shape(expected) and column.dtype == np.int64
    writer.create_item("t", 1.0, {"v": column, "w": [writer.history["x"][index]]})
    data = one(client)
    assert data["v"].tolist() == expected
    assert data["w"][0].tolist() == np.multiply.outer(expected, np.ones(3)).tolist()


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (0, ValueError, "no longer kept: num_keep_alive_refs is 3"),
        (slice(None), ValueError, "no longer kept"),
        (slice(2, 2), ValueError, "got index slice"),
        (7, IndexError, "got step 7, expected one of 5 steps"),
        (-6, IndexError, "got step -6, expected one of"),
        (1.5, TypeError, "got index 1.5, expected an int"),
        ([True] * 5, TypeError, "expected an int, a slice or a list of ints"),
    ],
    ids=str,
)
def test_wrong_references(index, error, message):
    writer = make().trajectory_writer(3)
    fill(writer, 5)
    assert len(writer.history["a"]) == 5
    with pytest.raises(error, match=message):
        writer.history["a"][index]


def test_reference_that_expires_later_is_refused():
    client = make()
    writer = client.trajectory_writer(2)
    fill(writer, 2)
    old = writer.history["a"][:]
    fill(writer, 1)
    with pytest.raises(ValueError, match="no longer kept"):
        writer.create_item("t", 1.0, old)
    assert num_rows(client) == 2


def test_a_trajectory_without_leaves_is_refused():
    writer = make().trajectory_writer(2)
    fill(writer, 2)
    with pytest.raises(ValueError, match="without leaves"):
        writer.create_item("t", 1.0, {})


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"a": 1.0}, r"'a': got float64\[\], expected int64\[\]"),
        ({"a": np.array([1, 2])}, r"'a': got int64\[2\], expected int64\[\]"),
        ({"a": {"b": 1}}, "got a dict at /a, expected a leaf as in earlier steps"),
        ({"z": object()}, "'z': got dtype object"),
        ({"z/b": 1, "z": {"b": 1}}, "expected different paths"),
    ],
)
def test_append_checks_and_writes_nothing(step, message):
    client = make()
    writer = client.trajectory_writer(2)
    fill(writer, 2)
    rows = num_rows(client)
    with pytest.raises(ValueError, match=message):
        writer.append(step)
    assert (writer.episode_steps, num_rows(client)) == (2, rows)
    fill(writer, 1)


def test_an_error_that_comes_during_an_append_is_raised_by_the_next_one(monkeypatch):
    client = make()
    writer = client.trajectory_writer(1)
    fill(writer, 1)
    inner = writer._writer
    lease = inner._lease

    def lease_while_another_thread_fails(held, n):
        inner._errors.append(ValueError("an earlier item was refused"))
        return lease(held, n)

    monkeypatch.setattr(inner, "_lease", lease_while_another_thread_fails)
    fill(writer, 1, 1)
    monkeypatch.undo()
    assert (writer.episode_steps, len(writer.history["a"]), num_rows(client)) == (2, 2, 1)
    with pytest.raises(ValueError, match="an earlier item was refused"):
        fill(writer, 1, 2)
    fill(writer, 1, 2)
    assert (writer.episode_steps, len(writer.history["a"]), num_rows(client)) == (3, 3, 1)


def test_a_column_of_an_open_step_is_written_once():
    writer = make().trajectory_writer(4)
    writer.append({"o": 1}, partial_step=True)
    with pytest.raises(ValueError, match="got column 'o' twice"):
        writer.append({"o": 2})


def test_configure_keeps_a_column_longer():
    writer = make().trajectory_writer(2)
    writer.configure("a", num_keep_alive_refs=4)
    fill(writer, 6)
    assert writer.history["a"][-4:].numpy().tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="no longer kept"):
        writer.history["x"][-3:]
    writer.configure(("x",), 5)  # from now on: what is gone does not come back
    fill(writer, 3, begin=6)
    assert writer.history["x"][-5:].numpy()[:, 0].tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="no longer kept"):
        writer.history["x"][-6:]
    with pytest.raises(ValueError, match="max_chunk_length: got 3, expected 1 to num_keep_alive_refs 2"):
        writer.configure("a", 2, max_chunk_length=3)


def test_items_share_rows_and_free_them():
    client = make(times=0, size=2)
    writer = client.trajectory_writer(3)
    for i in range(50):
        fill(writer, 1, i)
        if i >= 2:
            item = {"a": writer.history["a"][-3:], "x": writer.history["x"][-1]}
            keys = [writer.create_item(table, 1.0, item) for table in "tu"]
            assert keys[0] != keys[1]
    writer.flush()
    client.mutate_priorities("t", {keys[0]: 7.0})
    assert client.server_info()["t"].max_priority == 7.0 and num_rows(client) == 4
    writer.close()
    client.reset("t")
    client.reset("u")
    assert num_rows(client) == 0
    with pytest.raises(RuntimeError, match="was not found"), client.trajectory_writer(3) as writer:
        fill(writer, 2)
        writer.create_item("no table", 1.0, writer.history["a"][:])
    with pytest.raises(RuntimeError, match="was not found"):
        client.insert({"a": 1}, {"t": 1.0, "no table": 1.0})
    assert one(client) == {"a": 1}
    client.reset("t")
    assert writer.closed and num_rows(client) == 0, "after an error, too"


def test_create_item_does_not_wait_and_flush_does():
    client = make(limiter=rl.Queue(2))
    writer = client.trajectory_writer(1)
    for i in range(5):
        fill(writer, 1, i)
        writer.create_item("t", 1.0, writer.history["a"][-1])
    with pytest.raises(replay.DeadlineExceededError):
        writer.flush(timeout=0)
    with pytest.raises(replay.DeadlineExceededError):
        writer.flush(2, timeout_ms=0)
    writer.flush(3, timeout=0)
    assert client.server_info()["t"].current_size == 2
    got = [int(one(client)) for _ in range(4)]
    assert got == [0, 1, 2, 3], "what waits in the writer goes in before a read, in order"
    writer.flush(timeout=0)
    assert one(client) == 4
    writer.close()
    assert num_rows(client) == 0


@pytest.mark.parametrize("clear", [True, False])
def test_end_episode(clear):
    client = make(times=0)
    writer = client.trajectory_writer(3)
    fill(writer, 2)
    writer.create_item("t", 1.0, writer.history["a"][:])
    writer.end_episode(clear_buffers=clear)
    assert writer.episode_steps == 0
    fill(writer, 1, 7)
    assert len(writer.history["a"]) == (1 if clear else 3)
    if not clear:
        assert writer.history["a"][:].numpy().tolist() == [0, 1, 7]
    writer.create_item("t", 1.0, writer.history["a"][-1:])
    assert client.server_info()["t"].num_episodes == 2
    client.reset("t")
    assert client.server_info()["t"].num_episodes == 0
    assert num_rows(client) == (1 if clear else 3)


def test_end_episode_resets_even_if_the_flush_times_out():
    client = make(limiter=rl.Queue(1))
    writer = client.trajectory_writer(3)
    fill(writer, 2)
    for _ in range(2):
        writer.create_item("t", 1.0, writer.history["a"][:])
    with pytest.raises(replay.DeadlineExceededError):
        writer.end_episode(timeout=0)
    assert writer.episode_steps == 0 and len(writer.history["a"]) == 0
    assert [one(client).tolist() for _ in range(2)] == [[0, 1]] * 2


def test_episode_counts():
    client = make(times=0, size=3)
    writer = client.trajectory_writer(1)
    for episode in range(4):
        fill(writer, 1, episode)
        writer.create_item("t", 1.0, writer.history["a"][-1])
        writer.create_item("t", 1.0, writer.history["a"][-1])
        writer.end_episode()
    info = client.server_info()["t"]
    assert (info.num_episodes, info.num_deleted_episodes) == (2, 2)


def test_sample_checks():
    client = make()
    with pytest.raises(ValueError, match="num_samples"):
        client.sample("t", 0)
    assert list(client.sample("t", -1)) == []
    with pytest.raises(replay.DeadlineExceededError):
        list(client.sample("u", timeout=0))


@pytest.mark.parametrize("kind", ["trajectory", "structured", "older"])
def test_writers_that_are_dropped_release_their_rows(kind):
    client = make(times=0)
    reference = replay.structured.create_reference_step({"a": None})
    config = replay.structured.create_config({"v": reference["a"][-1]}, "t")
    make_writer = {
        "trajectory": lambda: client.trajectory_writer(10),
        "structured": lambda: client.structured_writer([config]),
        "older": lambda: client.writer(10),
    }[kind]
    for _ in range(3):
        writer = make_writer()
        for i in range(10):
            writer.append({"a": i})
        del writer
    assert client.server_info()["t"].current_size == num_rows(client) == (30 if kind == "structured" else 0)
    client.reset("t")
    # A look ends the last writer, which its late thread may have held until now.
    until(lambda: client.server_info() and not num_rows(client))


def test_keys_of_any_kind_that_sorts():
    client = make()
    writer = client.trajectory_writer(2)
    for i in range(2):
        writer.append({2: i, 1: 10 + i})
        writer.append({1: 20 + i, 2: i})
    writer.create_item("t", 1.0, {7: writer.history[1][-2:], 3: writer.history[2][-1]})
    assert {key: leaf.tolist() for key, leaf in one(client).items()} == {7: [11, 21], 3: 1}
