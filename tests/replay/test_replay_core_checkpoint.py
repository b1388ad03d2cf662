"""Checkpoints: exact, atomic, verified, and no other program's files."""

import errno
import hashlib
import json
import logging
import os
import pathlib
import shutil

import numpy as np
import pytest
from embedded_table import insert, make

from framework import replay
from framework.replay import checkpointers, selectors
from framework.replay import rate_limiters as rl
from framework.replay.rows.store import RowStore

at = checkpointers.DefaultCheckpointer


def tables(max_size=300, sampler="Prioritized"):
    options = {"Prioritized": (0.7,)}.get(sampler, ())
    sampler, limiter = getattr(selectors, sampler)(*options), rl.SampleToInsertRatio(8.0, 2, 100_000.0)
    main = replay.Table("main", sampler, selectors.Fifo(), max_size, limiter, seed=3)
    return [
        main,
        replay.Table.queue("queue", 5),
        replay.Table("idle", selectors.MaxHeap(), selectors.Lifo(), 9, rl.MinSize(1)),
    ]


def work(client, steps, seed):
    """Inserts, samples and changes; what was sampled."""
    rng = np.random.default_rng(seed)
    writer = client.batch_writer()
    seen = []
    for step in range(steps):
        rows = writer.append("a", {"x": rng.random((20, 3)), "n": np.arange(20) + 20 * step})
        other = writer.append("b", {"image": rng.integers(0, 255, (20, 2, 2), dtype=np.uint8)})
        leaf = {"x": writer.slice("a", "x", rows), "image": writer.slice("b", "image", other)}
        keys = writer.create_items("main", leaf, rng.random(20))
        client.mutate_priorities("main", {int(keys[0]): 3.0}, [int(key) for key in keys[3:5]])
        stacked = np.stack([rows[:4], rows[4:8]])
        writer.create_items("queue", [writer.slice("a", "n", stacked[:1])], timeout=0)
        if step % 2:
            if isinstance(
                client.tables["main"].sampler, selectors.Prioritized
            ):  # never sampled, another kind
                writer.create_items("main", [writer.slice("a", "n", stacked)], [0.0, 0.0])
            seen.append(client.sample_batch("queue", 2, timeout=0).data[0])
        writer.release("a", rows)
        writer.release("b", other)
        sample = client.sample_batch("main", 16)
        seen += [sample.data["x"], sample.data["image"], *sample.info[1:]]
    return seen


def worked(folder, steps=31, **options):
    """A client whose tables were used and saved."""
    client = replay.EmbeddedClient(tables(**options), checkpointer=at(folder, keep=2))
    work(client, steps, seed=1)
    client.checkpoint()
    return client


def restored(folder, **options):
    checkpointer = at(folder)
    return replay.EmbeddedClient(tables(**options), checkpointer=checkpointer)


def same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def info(client):
    return {name: each._replace(table_worker_time=None) for name, each in client.server_info().items()}


@pytest.mark.parametrize("sampler", ["Prioritized", "Uniform", "MaxHeap", "Fifo"])
def test_continues_exactly(tmp_path, sampler):
    client = worked(tmp_path, sampler=sampler)
    again = restored(tmp_path, sampler=sampler)
    assert info(again) == info(client)
    assert again.store.streams["a"].num_rows == client.store.streams["a"].num_rows
    same(work(again, 11, seed=2), work(client, 11, seed=2))


def test_a_restored_table_has_room_for_all_of_its_slots(tmp_path):
    worked(tmp_path, steps=3, sampler="Uniform")
    work(restored(tmp_path, sampler="Uniform"), 20, seed=2)


@pytest.mark.parametrize("left", [0, 2])
def test_streams_and_layouts_whose_items_are_gone(tmp_path, left):
    checkpointer = at(tmp_path)

    def write(writer, stream, column, values):
        rows = writer.append(stream, {column: np.asarray(values)})
        writer.create_items("t", writer.slice(stream, column, rows))
        writer.release(stream, rows)

    client = replay.EmbeddedClient([replay.Table.queue("t", 9)], checkpointer=checkpointer)
    writer = client.batch_writer()
    write(writer, "gone", "x", [1.0, 2.0])
    assert client.sample_batch("t", 2).data.tolist() == [1.0, 2.0]
    if left:
        write(writer, "here", "n", [3, 4])
    client.checkpoint()

    client = replay.EmbeddedClient([replay.Table.queue("t", 9)], checkpointer=checkpointer)
    assert client.server_info()["t"].current_size == left
    writer = client.batch_writer()
    write(writer, "gone", "x", [5.0])
    write(writer, "here", "n", [6])
    seen = [client.sample_batch("t", 1).data[0] for _ in range(left + 2)]
    assert seen == [3, 4][:left] + [5.0, 6]
    writer.close()
    assert all(stream.num_rows == 0 for stream in client.store.streams.values())


def test_larger_table_keeps_keys(tmp_path):
    keys = worked(tmp_path).sample_batch("main", 64).info.key
    again = restored(tmp_path, max_size=50_000)
    again.update_priorities("main", keys, np.full(64, 2.5))
    sample = again.sample_batch("main", 500).info
    known = np.isin(sample.key, keys)
    assert known.any() and (sample.priority[known] == 2.5).all()
    table = again.tables["main"]
    before = len(table)
    live = set(table.items.keys[table.items.in_order()].tolist())
    writer = again.batch_writer()
    rows = writer.append("a", {"x": np.zeros((500, 3)), "n": np.zeros(500, int)})
    new = writer.create_items("main", writer.slice("a", "n", rows))
    assert not live & set(new.tolist()) and len(table) == before + 500


def test_smaller_table_drops_the_oldest(tmp_path):
    worked(tmp_path)
    assert restored(tmp_path, max_size=10).server_info()["main"].current_size == 10


def test_a_smaller_queue_drops_nothing_and_is_sampled_before_it_takes_more(tmp_path):
    checkpointer = at(tmp_path)
    client = replay.EmbeddedClient([replay.Table.queue("t", 8)], checkpointer=checkpointer)
    insert(client, range(8))
    client.checkpoint()
    again = replay.EmbeddedClient([replay.Table.queue("t", 4)], checkpointer=checkpointer)
    assert not again.can_insert("t", 1)
    assert again.sample_batch("t", 8, timeout=0).data.tolist() == [*range(8)]
    assert again.can_insert("t", 4)


def test_weights_that_would_overflow_with_another_exponent_are_refused(tmp_path):
    checkpointer = at(tmp_path)
    client = make(sampler=selectors.Prioritized(1.0), checkpointer=checkpointer)
    insert(client, range(2), [1.0, 1e200])
    client.checkpoint()
    with pytest.raises(checkpointers.CheckpointError, match="sampler: priorities: got 1e\\+200"):
        make(sampler=selectors.Prioritized(2.0), checkpointer=checkpointer)


def test_the_configuration_of_the_constructor_wins(tmp_path, caplog):
    worked(tmp_path, 5)
    with caplog.at_level(logging.WARNING):
        again = restored(tmp_path, max_size=77, sampler="Uniform")
    got = again.server_info()["main"]
    assert (got.max_size, got.sampler_options["kind"]) == (77, "Uniform")
    assert "the constructor's is used" in caplog.text and "max_size" in caplog.text
    again.sample_batch("queue", 1)


def test_a_checkpoint_counts_samples_that_are_drawn(tmp_path):
    client = worked(tmp_path, 3)
    delivery = client.tables["queue"].sample(1)
    before = info(client)["queue"]
    client.checkpoint()
    again = restored(tmp_path)
    assert info(again)["queue"] == before
    client.tables["queue"].release(delivery)
    assert info(client)["queue"] == before
    same(work(again, 5, seed=2), work(client, 5, seed=2))


@pytest.mark.parametrize("damaged", ["stream-0-0", "DONE"])
def test_damage_is_refused_or_passed_over(tmp_path, damaged):
    """All kinds of damage are in tests/checkpoints."""
    client = worked(tmp_path, 3)
    before = info(client)
    work(client, 2, seed=2)
    pathlib.Path(client.checkpoint(), damaged).unlink()
    fresh = tables()
    with pytest.raises(replay.CheckpointError, match="checkpoint-000002"):
        replay.EmbeddedClient(fresh, checkpointer=at(tmp_path, keep=2))
    assert len(fresh[0]) == 0, "nothing is restored from a damaged one"
    asked = at(tmp_path, use_previous=True)
    assert info(replay.EmbeddedClient(tables(), checkpointer=asked)) == before


def test_unknown_table_in_the_checkpoint(tmp_path):
    client = replay.EmbeddedClient(tables(), checkpointer=at(tmp_path))
    client.checkpoint()
    with pytest.raises(replay.CheckpointError, match=r"\['idle', 'queue'\]"):
        replay.EmbeddedClient(tables()[:1], checkpointer=at(tmp_path))


def test_files_outside_of_the_checkpoint_are_not_read(tmp_path):
    work(client := replay.EmbeddedClient(tables(), checkpointer=at(tmp_path / "here")), 3, seed=1)
    manifest = pathlib.Path(client.checkpoint()) / "manifest.json"
    shutil.copy(manifest.parent / "stream-0-0", tmp_path / "other")
    content = json.loads(manifest.read_text())
    next(iter(content["note"]["streams"]["a"]["columns"].values()))[0] = "../../other"
    manifest.write_text(text := json.dumps(content))
    (manifest.parent / "DONE").write_text(hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(replay.CheckpointError, match=r"no part '../../other'"):
        replay.EmbeddedClient(tables(), checkpointer=at(tmp_path / "here"))


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    client = replay.EmbeddedClient(tables(), checkpointer=at(tmp_path))
    work(client, 3, seed=1)
    rows = client.store.streams["a"].num_rows

    def full(*_):
        yield b"half"
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(checkpointers, "_blocks", full)
    with pytest.raises(replay.CheckpointError, match=r"stream-0-0: no space is left.*There was none before"):
        client.checkpoint()
    assert os.listdir(tmp_path) == []
    client.reset("main")
    client.reset("queue")
    assert client.store.streams["a"].num_rows == 0 < rows


def test_fallback_and_default(tmp_path):
    client = replay.EmbeddedClient(tables())
    work(client, 3, seed=1)
    path = client.checkpoint()
    other = at(tmp_path, group="g", fallback_checkpoint_path=path)
    again = replay.EmbeddedClient(tables(), checkpointer=other)
    assert info(again) == info(client)
    assert os.path.dirname(again.checkpoint()) == str(tmp_path / "g")


def test_rows_stay_as_they_were_until_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointers, "_BLOCK", 10_000)
    width = 1000

    checkpointer = at(tmp_path)
    store = RowStore(max_bytes=2_500 * width)
    client = make(selectors.Fifo(), size=1000, store=store, checkpointer=checkpointer)
    writer = client.batch_writer()

    def put(n):
        rows = writer.append("s", {"x": np.full((10, width // 2), n, np.uint16), "n": np.full(10, n)})
        writer.create_items("t", {"x": writer.slice("s", "x", rows), "n": writer.slice("s", "n", rows)})
        writer.release("s", rows)

    for n in range(200):
        put(n)
    save, inserted = checkpointer._checkpointer.save, 0

    def slow(part):
        """As many items come as are written."""
        nonlocal inserted
        for block in part:
            yield block
            if len(block) == 10 * width:
                put(200 + inserted)
                inserted += 1

    def save_slowly(step, parts, note):
        return save(
            step, {name: part if callable(part) else slow(part) for name, part in parts.items()}, note
        )

    monkeypatch.setattr(checkpointer._checkpointer, "save", save_slowly)
    client.checkpoint()
    assert inserted == 100
    assert client.store.streams["s"].num_rows == 1000
    again = make(selectors.Fifo(), size=1000, checkpointer=at(tmp_path))
    data = again.sample_batch("t", 1).data
    assert data["n"] == 100 and (data["x"] == 100).all()
    assert again.store.streams["s"].num_rows == 1000
    for _ in range(100):
        key = again.sample_batch("t", 1)
        assert (key.data["x"] == key.data["n"]).all()
        again.mutate_priorities("t", deletes=[int(key.info.key[0])])
